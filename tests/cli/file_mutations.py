"""Random changes of files: of their bytes, their words and lines, and of what their grammar knows as a whole.

`mutated(rng, kind, text, other)` changes a text one to three times; `other` is another text of the kind, of which
parts are taken. A kind is "toml", "json", "csv" or "program".
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

Change = Callable[[random.Random, str, str], str]

NUMBERS = (
    *("-1", "0", "1", "2", "3", "7", "8", "16", "64", "100", "1000", "4096", "65536", "300000", "9999999"),
    *("16777216", "4294967296", "9223372036854775807", "9223372036854775808", "1" + "0" * 30, "9" * 5000),
    *("0.0", "-0.0", "0.5", "1.5", "1e3", "1e-9", "1e308", "1e400", "5e-324", "nan", "inf", "-inf"),
    *(
        "0x" + "f" * 5000,
        "0b101",
        "0o17",
        "1_000",
        "007",
        "+1",
        "1.",
        ".5",
        "1j",
        "--1",
        "1e",
        "1//0",
        "2**70",
    ),
)
STRINGS = (
    *(
        "",
        " ",
        "x",
        "x" * 300,
        "x" * 100_000,
        "é" * 200,
        "\u202e\u200b",
        "🕸" * 50,
        "a\\nb",
        "\\ud800",
        "\\u0000",
    ),
    *("'", '"', "%s%n", "../../etc/passwd", "$(id)", "{0}", "-", "a.b", "float8", "bfloat16", "\\x1b[31m"),
)
WORDS = (
    *(
        "true",
        "false",
        "null",
        "None",
        "True",
        "NaN",
        "[]",
        "{}",
        "()",
        "[[]]",
        "[1, 2]",
        "1979-05-27",
        "12:30:00",
    ),
    *("lambda: 0", "x", "rank", "peer", "S(0)", "R", "P", "tp.row", "range(3)", "...", "*a", "**a", "a := 1"),
)
SIGNS = "()[]{},:;=+-*/%.#\"'\\<>@!~|& \t\n\r\x00\x0b\x1b\x7f\x85\u00a0\u2028é\ufeff"
DEPTHS = (1, 3, 15, 17, 50, 70, 200, 1000, 20_000, 100_000)
_TOKEN = re.compile(r"\w+|\s+|.", re.DOTALL)
_NUMBER = re.compile(r"(?<![\w.])\d[\w.]*")
_STRING = re.compile(r'"[^"\n]*"')


def mutated(rng: random.Random, kind: str, text: str, other: str) -> bytes:
    """Return a text of `kind` after one to three random changes, now and then of its bytes too."""
    changes = CHANGES[kind]
    for _ in range(rng.choice((1, 1, 1, 1, 2, 3))):
        text = rng.choice(changes)(rng, text, other)
        if len(text) > 3_000_000:
            break
    data = text.encode("utf-8", "surrogatepass")
    return _changed_bytes(rng, data) if rng.random() < 0.12 else data


# --- bytes, words and lines -----------------------------------------------------------------------------


def _changed_bytes(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    to = min(len(data), at + rng.choice((1, 1, 2, 8, 100)))
    put = rng.choice(
        (b"", b"\x00", b"\xff", b"\xc3", b"\xed\xa0\x80", bytes([rng.randrange(256)]), data[at:to] * 2)
    )
    return rng.choice(
        (
            data[:at] + put + data[to:],
            data[:at],
            data[at:],
            b"\xef\xbb\xbf" + data,
            data.replace(b"\n", b"\r\n"),
            data.replace(b"\n", b"\r"),
            data.decode("utf-8", "replace").encode("utf-16"),
            data * 2,
            put * 1000,
        )
    )


def _token(rng: random.Random, text: str, other: str) -> str:
    """Leave a token out, double it, swap it with another, or put something in its place."""
    tokens, others = _TOKEN.findall(text) or [""], _TOKEN.findall(other) or [""]
    i, j = rng.randrange(len(tokens)), rng.randrange(len(tokens))
    put = (rng.choice(others), rng.choice(SIGNS), rng.choice(WORDS), rng.choice(NUMBERS), rng.choice(STRINGS))
    kind = rng.randrange(5)
    if kind == 0:
        del tokens[i]
    elif kind == 1:
        tokens.insert(j, tokens[i])
    elif kind == 2:
        tokens[i], tokens[j] = tokens[j], tokens[i]
    elif kind == 3:
        tokens[i] = rng.choice(put)
    else:
        tokens.insert(i, rng.choice(put))
    return "".join(tokens)


def _line(rng: random.Random, text: str, other: str) -> str:
    """Leave a line out, double it up to thousands of times, move it, or put one of another text in."""
    lines, others = text.splitlines() or [""], other.splitlines() or [""]
    i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
    to = min(len(lines), i + rng.choice((1, 1, 2, 5)))
    kind = rng.randrange(7)
    if kind == 0:
        del lines[i:to]
    elif kind == 1:
        lines[j:j] = lines[i:to] * rng.choice((1, 1, 2, 30, 3000))
    elif kind == 2:
        lines[i], lines[j] = lines[j], lines[i]
    elif kind == 3:
        lines[i:to] = [rng.choice(others)]
    elif kind == 4:
        lines[i] = rng.choice(("    ", "  ", "\t", " " * 400)) + lines[i]
    elif kind == 5:
        lines[i] = lines[i].strip()
    else:
        lines[i:to] = [" ".join(lines[i:to])]
    return "\n".join(lines) + "\n"


def _replace_one(rng: random.Random, pattern: re.Pattern[str], text: str, put: str) -> str:
    places = list(pattern.finditer(text))
    if not places:
        return text + put
    place = rng.choice(places)
    return text[: place.start()] + put + text[place.end() :]


def _number(rng: random.Random, text: str, other: str) -> str:
    return _replace_one(rng, _NUMBER, text, rng.choice(NUMBERS))


def _string(rng: random.Random, text: str, other: str) -> str:
    return _replace_one(rng, _STRING, text, f'"{rng.choice(STRINGS)}"')


# --- TOML -----------------------------------------------------------------------------------------------

_TOML_LINE = re.compile(r"^[^\[#\n=]+=.*$", re.MULTILINE)


def _toml_value(rng: random.Random, text: str, other: str) -> str:
    """Give a key another value, of another type, deep, long or huge."""
    places = [place for place in _TOML_LINE.finditer(text) if place[0].strip()]
    if not places:
        return text
    place = rng.choice(places)
    key, _, value = place[0].partition("=")
    return text[: place.start()] + f"{key}= {_odd_toml(rng, value.strip())}" + text[place.end() :]


def _odd_toml(rng: random.Random, value: str) -> str:
    depth = rng.choice(DEPTHS)
    return rng.choice(
        (
            rng.choice(NUMBERS),
            rng.choice(WORDS),
            f'"{rng.choice(STRINGS)}"',
            f"[{value}]",
            f"{{ a = {value} }}",
            f"[{', '.join([value] * rng.choice((2, 7, 1000)))}]",
            "[" * depth + value + "]" * depth,
            "{ a = " * depth + value + " }" * depth,
            f'"""{value}"""',
        )
    )


def _toml_key(rng: random.Random, text: str, other: str) -> str:
    """Add a table or key: dotted, repeated, long or unknown."""
    name = rng.choice(re.findall(r"\w+", text) or ["x"])
    parts = ".".join([name] * rng.choice(DEPTHS))
    added = rng.choice(
        (
            f"{parts} = 1",
            f"[{parts}]",
            f"[[{parts}]]",
            f'"{name * rng.choice((1, 100, 30_000))}" = 1',
            "\n".join(f"{name}{number} = {number}" for number in range(rng.choice((3, 25, 5000)))),
            f"[[network.axes]]\nname = '{name}'\nlink_bytes_per_s = 1e9\n" * rng.choice((1, 5, 900)),
        )
    )
    lines = text.splitlines()
    lines.insert(rng.randrange(len(lines) + 1), added)
    return "\n".join(lines) + "\n"


# --- JSON -----------------------------------------------------------------------------------------------


def _places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every (container, key) in JSON data."""
    for key in list(data) if isinstance(data, dict) else range(len(data)):
        yield data, key
        if isinstance(data[key], dict | list):
            yield from _places(data[key])


_MARK = '"\\u0001"'


def _json_tree(rng: random.Random, text: str, other: str) -> str:
    """Change a place of the tree; what JSON libraries do not write is put into the text."""
    try:
        data, others = json.loads(text), json.loads(other)
    except (ValueError, RecursionError):
        return _token(rng, text, other)
    places = list(_places(data)) if isinstance(data, dict | list) else []
    if not places:
        return rng.choice(NUMBERS)
    parent, key = rng.choice(places)
    old = parent[key]
    kind = rng.randrange(6)
    if kind == 0:
        del parent[key]
    elif kind == 1 and isinstance(parent, dict):
        parent[rng.choice((key + "x", key * 3000, "", "\ud800", rng.choice(STRINGS)))] = old
    elif kind == 2 and isinstance(parent, list):
        parent += [old] * rng.choice((1, 2, 300, 20_000 if not isinstance(old, dict | list) else 3))
    elif kind == 3 and isinstance(others, dict | list) and (donors := list(_places(others))):
        donor, at = rng.choice(donors)
        parent[key] = donor[at]
    else:
        parent[key] = "\x01"
    return json.dumps(data).replace(_MARK, _odd_json(rng, json.dumps(old)))


def _odd_json(rng: random.Random, value: str) -> str:
    depth = rng.choice(DEPTHS)
    return rng.choice(
        (
            rng.choice(NUMBERS),
            rng.choice(("true", "false", "null", "NaN", "Infinity", "[]", "{}", '"x"', "[null]", '{"": 1}')),
            json.dumps(rng.choice(STRINGS)),
            f"[{value}]",
            f'{{"a": {value}}}',
            "[" * depth + value + "]" * depth,
            '{"a":' * depth + value + "}" * depth,
            f"[{', '.join([value[:200]] * rng.choice((2, 1000)))}]",
            '"\\ud800"',
        )
    )


# --- programs -------------------------------------------------------------------------------------------

_OP_LINE = re.compile(r"^( *)(\w+\(.*lane=.*\))$", re.MULTILINE)


def _program_loops(rng: random.Random, text: str, other: str) -> str:
    """Put an op into nested loops and conditions."""
    places = list(_OP_LINE.finditer(text))
    if not places:
        return text
    place = rng.choice(places)
    indent, lines = place[1], []
    counts = rng.choice(((0,), (3,), (10,), (1000,), (300_000,), (10**9,), (2, 10), (0, 10**6), (50, 50)))
    for number in range(rng.choice((1, 1, 2, 4, 18, 40, 120))):
        count = rng.choice(counts)
        lines.append(
            indent
            + rng.choice((f"for z{number} in range({count}):", f"for z{number} in range({count}):", "if 1:"))
        )
        indent += " "
    lines.append(indent + place[2])
    return text[: place.start()] + "\n".join(lines) + text[place.end() :]


def _program_expression(rng: random.Random, text: str, other: str) -> str:
    """Put an expression in place of a number: deep, long, or of names."""
    depth = rng.choice(DEPTHS)
    name = rng.choice(("1", "0", "tp.row", "tp.col", "s", "rank", "peer", "x"))
    put = rng.choice(
        (
            "(" * min(depth, 2000) + name + ")" * min(depth, 2000),
            " + ".join([name] * depth),
            " and ".join([name] * depth),
            "-" * depth + name,
            "min(" * min(depth, 2000) + name + ", 1)" * min(depth, 2000),
            "(" + ", ".join([name] * depth) + ")[0]",
            f"({name}, {name})[{name}]",
            f"{name} * {rng.choice(NUMBERS)}",
            f"{name} // {rng.choice(NUMBERS)}",
            f"{name} % 3",
        )
    )
    return _replace_one(rng, _NUMBER, text, put)


def _program_declaration(rng: random.Random, text: str, other: str) -> str:
    """Add a declaration or change one: large meshes, many dims, many slots, long names."""
    name = rng.choice(("z", "tp", "rank", "z" * 300, "z" * 100_000, "é", "class", "z1"))
    sizes = ", ".join([rng.choice(("1", "2", "3", "300", "60000"))] * rng.choice((1, 2, 3, 33, 65, 300)))
    axes = ", ".join(f'"a{number}"' for number in range(sizes.count(",") + 1))
    added = rng.choice(
        (
            f"{name} = mesh(({sizes},), ({axes},))",
            f"{name} = mesh((2,), ('a',), ranks=({rng.choice(NUMBERS)}, 5))",
            f"{name} = mesh((4,), ('a',), first={rng.choice(NUMBERS)})",
            f'{name} = tensor(({sizes},), "float32")',
            f'{name} = scratch(({sizes},), "float32", on=tp, slots={rng.choice(NUMBERS)})',
            f"{name} = lane(width={rng.choice(NUMBERS)})",
            f'{name} = lane(order="ready")',
            f'program("{rng.choice(STRINGS)}")',
        )
    )
    lines = text.splitlines()
    lines.insert(rng.randrange(len(lines) + 1), added)
    return "\n".join(lines) + "\n"


def _program_mesh(rng: random.Random, text: str, other: str) -> str:
    """Give a mesh another shape."""
    sizes = rng.choice(
        ("1, 1", "3, 5", "16, 16", "64, 64", "250, 240", "60000, 1", "1, 4096", "0, 1", "2, 2, 2")
    )
    return _replace_one(rng, re.compile(r"mesh\(\([^)]*\)"), text, f"mesh(({sizes})")


# --- comma-separated values -----------------------------------------------------------------------------


MOST_CELLS = 3_000_000
"""The cells that a copied row of a table comes to at most: a sweep makes its files in its own memory."""


def _csv_cell(rng: random.Random, text: str, other: str) -> str:
    """Change a cell, or a row or column as a whole."""
    rows = [line.split(",") for line in text.splitlines()] or [[""]]
    i = rng.randrange(len(rows))
    j = rng.randrange(len(rows[i]))
    kind = rng.randrange(7)
    if kind == 0:
        del rows[i][j]
    elif kind == 1:
        rows[i][j:j] = [rng.choice(rows[i])] * rng.choice((1, 2, 50_000))
    elif kind == 2:
        rows = [row[:j] + row[j + 1 :] for row in rows]
    elif kind == 3:
        rows = [[*row, row[min(j, len(row) - 1)]] for row in rows if row]
    elif kind == 4:
        rows[i] = [f"c{number}" for number in range(rng.choice((3, 100_000)))]
    elif kind == 5:
        rows += [rows[i]] * min(rng.choice((3, 3000, 30_000)), MOST_CELLS // max(len(rows[i]), 1))
    else:
        put = (*NUMBERS, *STRINGS, *WORDS, "=1+1", "<script>", "0F0", "99999999F0", "0SEND_F1", '"', '""')
        rows[i][j] = rng.choice(put)
    return "\n".join(map(",".join, rows)) + "\n"


CHANGES: dict[str, tuple[Change, ...]] = {
    "csv": (_token, _line, _number, _string, _csv_cell, _csv_cell, _csv_cell, _csv_cell),
    "toml": (_token, _line, _number, _string, _toml_value, _toml_value, _toml_key),
    "json": (_token, _line, _number, _string, _json_tree, _json_tree, _json_tree, _json_tree),
    "program": (
        *(_token, _token, _line, _line, _number, _string, _program_loops, _program_loops),
        *(_program_expression, _program_expression, _program_declaration, _program_mesh),
    ),
}
"""The changes of each kind of file; what stands twice happens twice as often."""
