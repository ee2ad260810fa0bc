"""Read a description file (TOML or JSON) and check it against a pydantic model.

Whatever is wrong with a file becomes one `DescriptionError`. A single problem is one line,
`file: key.path: what is wrong; what would be right`; several are a headline `file: 3 problems` and one indented
line each.
"""

from __future__ import annotations

import json
import re
import stat
import sys
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn, TypeVar, get_args, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
)
from pydantic.fields import FieldInfo

from meshweave.base.errors import (
    DescriptionError,
    did_you_mean,
    nearest_word,
    printable,
    without_control_characters,
)
from meshweave.base.limits import FILE_BYTES, KEY_PARTS, NESTING, TOML_BYTES, VALUES, Limit
from meshweave.base.outputs import refuse_input

MAX_PROBLEMS = 20
"""Problems of a file that one error lists; it counts the others."""
MAX_JUDGED = 1000
"""Problems of a file that are looked at."""


def whole_float_to_int(value: object) -> object:
    """Return a whole float as an int (files write large counts as `32e9`); anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def require_printable(value: str) -> str:
    """Return a name unchanged. Raises ValueError if a character is not printable: messages have one line."""
    if not value.isprintable():
        raise ValueError("not printable")
    return value


Name = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(require_printable)]
# A rate below one per second would round to zero inside the simulator; a duration above 1e6 s would not
# fit 64 bits of picoseconds.
Rate = Annotated[float, Field(ge=1.0, le=1e24, allow_inf_nan=False)]
Duration = Annotated[float, Field(ge=0.0, le=1e6, allow_inf_nan=False)]
Count = Annotated[int, BeforeValidator(whole_float_to_int), Field(ge=1, le=2**24)]
Size = Annotated[int, BeforeValidator(whole_float_to_int), Field(ge=1, le=2**60)]


def key(description: str, **limits: Any) -> Any:
    """Return an annotation for a field of a dataclass that `file_model` reads.

    `description` says unit and range in words; `limits` are those of pydantic's `Field`, such as `ge=0`.
    """
    return Field(description=description, **limits)


class FileModel(BaseModel):
    """Base class of the models that check a file: unknown keys and silent conversions are errors."""

    model_config = ConfigDict(extra="forbid", strict=True)


def file_model(of: type, base: type[FileModel] = FileModel) -> Any:
    """Return a pydantic model class with the fields of `base`, then those of the dataclass `of` as annotated."""
    hints = get_type_hints(of, include_extras=True)
    own: Any = {
        each.name: (hints[each.name], ... if each.default is MISSING else each.default) for each in fields(of)
    }
    return create_model(f"{of.__name__}Table", __base__=base, **own)


class Problem(NamedTuple):
    """One error in a file: the path of its key (empty: the whole file), and what is wrong."""

    key: str
    message: str


_M = TypeVar("_M", bound=BaseModel)


def fail(file: str | Path, key: str, message: str) -> NoReturn:
    """Raise the DescriptionError `file: key: message` on one line; an empty `key` means the whole file."""
    raise DescriptionError(f"{printable(file)}: {_line(Problem(key, message))}")


def fail_with_all(file: str | Path, problems: Sequence[Problem]) -> NoReturn:
    """Raise one DescriptionError with the problems of a file: one line, or a headline and a line each.

    At most `MAX_PROBLEMS` are listed; the headline has the number of all.
    """
    if len(problems) == 1:
        fail(file, *problems[0])
    count = f"{'at least ' if len(problems) >= MAX_JUDGED else ''}{len(problems)}"
    lines = [f"{printable(file)}: {count} problems", *map(_line, problems[:MAX_PROBLEMS])]
    if len(problems) > MAX_PROBLEMS:
        lines.append(f"and {len(problems) - MAX_PROBLEMS} more")
    raise DescriptionError("\n  ".join(lines))


def _line(problem: Problem) -> str:
    message = without_control_characters(problem.message)
    return f"{printable(problem.key)}: {message}" if problem.key else message


def format_value(value: object) -> str:
    """Return a wrong value as error text: "a table", "a list", "true", or its repr cut to 60 characters."""
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, bool):
        return str(value).lower()
    try:
        text = repr(value)
    except ValueError:  # an int with more digits than Python prints
        return "a number far too large"
    return printable(text if len(text) <= 60 else f"{text[:57]}...")


def is_path(name: str) -> bool:
    """Return whether `name` means a file rather than a catalog entry: it looks like a path, or it exists."""
    if "/" in name or "\\" in name or name.lower().endswith((".toml", ".json")):
        return True
    try:
        return Path(name).exists()
    except (OSError, ValueError):
        return False


def read_text(path: str | Path, limit: Limit = FILE_BYTES) -> str:
    """Return the text of a regular file (UTF-8), of at most `limit.most` bytes.

    Raises:
        DescriptionError: the file is missing, unreadable, too large or binary, a directory, a device or a pipe,
            or the file that the running command is to write.
    """
    file = Path(path)
    try:
        mode = file.stat().st_mode
        if stat.S_ISDIR(mode):
            fail(path, "", "is a directory; give a file")
        if not stat.S_ISREG(mode):
            fail(path, "", "is not a regular file; give one")
        with file.open("rb") as opened:
            refuse_input(opened.fileno(), path)
            data = opened.read(limit.most + 1)  # the size that the system reports may be anything
    except DescriptionError:
        raise
    except FileNotFoundError:
        fail(path, "", "no such file")
    except (OSError, ValueError) as error:  # ValueError: a NUL or an unencodable character in the path
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        fail(path, "", f"cannot be read ({reason})")
    return _decoded(data, path, limit)


def read_stdin(limit: Limit = FILE_BYTES) -> str:
    """Return what stdin gives until it ends, as text (UTF-8) of at most `limit.most` bytes.

    Raises:
        DescriptionError: it is too large, binary, cannot be read, or is the file that the running command is to
            write.
    """
    refuse_input(0, "stdin")
    binary = getattr(sys.stdin, "buffer", None)
    try:
        data = sys.stdin.read(limit.most + 1).encode() if binary is None else binary.read(limit.most + 1)
    except (OSError, ValueError, AttributeError) as error:  # closed, or none at all
        fail("stdin", "", f"cannot be read ({error})")
    return _decoded(data, "stdin", limit)


def _decoded(data: bytes, file: str | Path, limit: Limit) -> str:
    if len(data) > limit.most:
        fail(file, "", limit.refusal())
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        fail(file, "", f"is not UTF-8 text (byte {error.start}); give a text file")


def parse_table(text: str, file: str | Path, kind: str) -> dict[str, Any]:
    """Return the table that `text` contains, parsed as `kind`, which is `toml` or `json`.

    Raises:
        DescriptionError: the text is empty, is not valid in that format or no table at its top, a key stands
            twice, or it is over a limit of `base.limits`: bytes, values, nesting, parts of a dotted key. `file`
            is what the error names.
    """
    if not text.strip():
        fail(file, "", f"is empty; give a {kind.upper()} description")
    if kind == "toml":
        if len(text) > TOML_BYTES.most:
            fail(file, "", TOML_BYTES.refusal(len(text)))
        parts = _longest_key(text)
        if parts > KEY_PARTS.most:
            fail(file, "", KEY_PARTS.refusal(parts))
    try:
        data = tomllib.loads(text) if kind == "toml" else json.loads(text, object_pairs_hook=_table_of)
    except RecursionError:
        fail(file, "", NESTING.refusal())
    except ValueError as error:
        fail(file, "", f"is not valid {kind.upper()}: {error}")
    if not isinstance(data, dict):
        fail(file, "", f"holds {format_value(data)}, not a table of keys and values")
    _check_extent(data, file)
    return data


def _table_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a table of JSON. Raises ValueError where a key stands twice in it, as TOML does."""
    table = dict(pairs)
    if len(table) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = next(key for key, count in counts.items() if count > 1)
        raise ValueError(f"the key '{printable(twice[:60])}' stands twice in a table")
    return table


_KEY = re.compile(
    r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')(?:[ \t]*+\.[ \t]*+(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+'))*+"""
)
_QUOTED_PART = re.compile(r"""\"[^"\n]*+\"|'[^'\n]*+'""")
_AFTER_KEY = re.compile(r"[ \t]*+[=\]]")


def _longest_key(text: str) -> int:
    """Return the number of parts of the longest dotted key of a TOML text; tomllib takes its square in time.

    Words with dots between them count wherever `=` or `]` follows, in comments and longer strings too.
    """
    keys = (match[0] for match in _KEY.finditer(text) if _AFTER_KEY.match(text, match.end()))
    return max((_QUOTED_PART.sub("", key).count(".") + 1 for key in keys), default=0)


def _check_extent(data: dict[str, Any], file: str | Path) -> None:
    """Raise DescriptionError where tables and lists are nested too deeply, or hold too many values."""
    level: list[Any] = [data]
    count = depth = 0
    while level:
        depth += 1
        if depth > NESTING.most:
            fail(file, "", NESTING.refusal())
        count += sum(map(len, level))
        if count > VALUES.most:
            fail(file, "", VALUES.refusal())
        inner = (value.values() if isinstance(value, dict) else value for value in level)
        level = [item for items in inner for item in items if isinstance(item, dict | list)]


def load_table(path: str | Path) -> dict[str, Any]:
    """Return the table in a file: JSON if its name ends in `.json`, else TOML.

    Raises:
        DescriptionError: the file cannot be read or parsed.
    """
    if str(path).lower().endswith(".json"):
        return parse_table(read_text(path), path, "json")
    return parse_table(read_text(path, TOML_BYTES), path, "toml")


def check_table(model: type[_M], data: Any, file: str | Path, at: tuple[str | int, ...] = ()) -> _M:
    """Return `data` as an instance of `model`.

    Args:
        file: what errors name.
        at: the key path of `data` in the file; () for the whole file.

    Raises:
        DescriptionError: `data` does not fit the model; the error lists at most `MAX_PROBLEMS` of the problems.
    """
    checked, problems = validate_table(model, data, at)
    if checked is None:
        fail_with_all(file, problems)
    return checked


def validate_table(
    model: type[_M], data: Any, at: tuple[str | int, ...] = ()
) -> tuple[_M | None, list[Problem]]:
    """Return (`data` as an instance of `model`, []), or (None, the problems in it).

    At most the first `MAX_JUDGED` errors of pydantic count. A misspelt key is both unknown and missing: it
    counts once, as the unknown key. `at` is the key path of `data` in its file.
    """
    try:
        return model.model_validate(data), []
    except ValidationError as error:
        errors = error.errors(include_url=False)[:MAX_JUDGED]
    meant: set[tuple[int | str, ...]] = set()
    unknown: list[Problem] = []
    for detail in errors:
        if detail["type"] == "extra_forbidden":
            *parents, key = detail["loc"]
            known = list(_fields_by_key(_model_at(model, tuple(parents))))
            meant.add((*parents, nearest_word(str(key), known) or ""))
            message = f"unknown key{did_you_mean(str(key), known)}; known keys: {', '.join(known)}"
            unknown.append(Problem(_key_path(at, detail["loc"]), message))
    problems = list(unknown)
    for detail in errors:
        location = detail["loc"]
        if detail["type"] == "extra_forbidden" or (detail["type"] == "missing" and location in meant):
            continue
        expected = _expected(model, location, detail["msg"])
        if detail["type"] == "missing":
            message = f"missing; give {'a value' if expected == detail['msg'] else expected}"
        else:
            message = f"{format_value(detail['input'])} is not valid; give {expected}"
        problems.append(Problem(_key_path(at, location), message))
    return None, list(dict.fromkeys(problems))


def _key_path(at: tuple[str | int, ...], location: tuple[str | int, ...]) -> str:
    return ".".join(str(part) for part in (*at, *location))


def _fields_by_key(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields of a model by the key that a file gives them."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _nested_model(annotation: Any) -> type[BaseModel] | None:
    """Return the model inside an annotation such as `list[Model] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for arg in get_args(annotation) if (model := _nested_model(arg))), None)


def _model_at(model: type[BaseModel], location: tuple[int | str, ...]) -> type[BaseModel]:
    """Return the model of the table at a key path."""
    for part in location:
        field = _fields_by_key(model).get(part) if isinstance(part, str) else None
        model = (_nested_model(field.annotation) if field else None) or model
    return model


def _expected(model: type[BaseModel], location: tuple[int | str, ...], otherwise: str) -> str:
    """Return the description of the innermost field along a key path."""
    expected = otherwise
    for part in location:
        field = _fields_by_key(model).get(part) if isinstance(part, str) else None
        if field:
            expected = field.description or otherwise
            model = _nested_model(field.annotation) or model
    return expected
