"""Descriptions as TOML: the file of a cluster, and of the kernels of a chip."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.machine.cluster_table import cluster_table, kernels_table
from meshweave.describe.machine.kernels import ChipKernels


def to_toml(cluster: Cluster, comments: Sequence[str] = ()) -> str:
    """Return the text of a file that `load_cluster` reads as an equal cluster; `comments` are its first lines."""
    return _text_of(cluster_table(cluster, whole=False), comments)


def kernels_toml(kernels: ChipKernels, comments: Sequence[str] = ()) -> str:
    """Return the text of a kernels file, without its tables of measured products; `comments` are its first
    lines.
    """
    table = kernels_table(kernels)
    table.pop("tables", None)
    return _text_of(table, comments)


def _text_of(table: Mapping[str, Any], comments: Sequence[str]) -> str:
    lines = [f"# {line}" for text in comments for line in _printable(text).split("\n")]
    return "\n".join([*lines, *([""] if lines else []), *_lines(table, "")]) + "\n"


def _lines(table: Mapping[str, Any], path: str) -> Iterator[str]:
    """Yield the lines of a table: its values, and then the tables within it."""
    inner = {key: value for key, value in table.items() if _is_section(value)}
    yield from (f"{key} = {_value(value)}" for key, value in table.items() if key not in inner)
    for key, value in inner.items():
        for each in value if isinstance(value, list) else [value]:
            head = f"{path}{key}"
            yield from ("", f"[[{head}]]" if isinstance(value, list) else f"[{head}]")
            yield from _lines(each, f"{head}.")


def _is_section(value: object) -> bool:
    """Return whether a value has lines of its own: a list of tables, or a table of more than numbers."""
    if isinstance(value, list):
        return bool(value) and isinstance(value[0], dict)
    return isinstance(value, dict) and not all(isinstance(each, int | float) for each in value.values())


def _value(value: Any) -> str:
    if isinstance(value, bool | str):  # the escapes of a TOML basic string are those of JSON
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{_key(key)} = {_value(each)}' for key, each in value.items())} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(value)


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else json.dumps(key)


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)
