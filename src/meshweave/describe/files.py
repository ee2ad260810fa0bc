"""From a description file to checked values, with one-line errors.

A file is read, parsed and held against a pydantic model; whatever is wrong with it becomes one
`DescriptionError` of the form `file: key.path: what is wrong; what would be right`.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from meshweave.base.errors import DescriptionError, nearest

MAX_FILE_BYTES = 2**24


def _whole(value: object) -> object:
    """TOML and JSON write large counts as `32e9`: take a float that is a whole number as an int."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _plain(value: str) -> str:
    """Names end up in one-line messages."""
    if not value.isprintable():
        raise ValueError("not printable")
    return value


Name = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_plain)]
# A rate below one per second would round to zero inside the simulator; a duration above 1e6 s would not
# fit 64 bits of picoseconds.
Rate = Annotated[float, Field(ge=1.0, le=1e24, allow_inf_nan=False)]
Duration = Annotated[float, Field(ge=0.0, le=1e6, allow_inf_nan=False)]
Count = Annotated[int, BeforeValidator(_whole), Field(ge=1, le=2**24)]
Size = Annotated[int, BeforeValidator(_whole), Field(ge=1, le=2**60)]


class FileModel(BaseModel):
    """Base of the models that check a file: unknown keys and silent conversions are errors."""

    model_config = ConfigDict(extra="forbid", strict=True)


_M = TypeVar("_M", bound=BaseModel)


def printable(text: object) -> str:
    """`text` on one line, without control characters, cut to 200 characters."""
    line = "".join(c if c.isprintable() else "?" for c in str(text))
    return line if len(line) <= 200 else f"{line[:197]}..."


def fail(file: str | Path, key: str, message: str) -> NoReturn:
    """Raise the DescriptionError `file: key: message` on one line; an empty `key` means the whole file."""
    parts = [printable(file), printable(key)] if key else [printable(file)]
    raise DescriptionError(": ".join([*parts, "".join(c if c.isprintable() else "?" for c in message)]))


def shown(value: object) -> str:
    """A wrong value as an error shows it."""
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
    """Whether `name` means a file rather than a catalog entry: it looks like one, or it is there."""
    if "/" in name or "\\" in name or name.lower().endswith((".toml", ".json")):
        return True
    try:
        return Path(name).exists()
    except (OSError, ValueError):
        return False


def read_text(path: str | Path) -> str:
    """The text of a description file (UTF-8, at most 16 MiB).

    Raises DescriptionError for a missing or unreadable file, a directory, an empty or a binary file.
    """
    file = Path(path)
    try:
        if file.is_dir():
            fail(path, "", "is a directory; give a file")
        if not file.exists():
            fail(path, "", "no such file")
        if not file.is_file() or file.stat().st_size > MAX_FILE_BYTES:
            fail(path, "", "is not a regular file of at most 16 MiB")
        data = file.read_bytes()
    except DescriptionError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL or an unencodable character in the path
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        fail(path, "", f"cannot be read ({reason})")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        fail(path, "", "is not UTF-8 text; give a TOML or JSON text file")


def parse(text: str, file: str | Path, kind: str) -> dict[str, Any]:
    """The table that `text` holds; `kind` is `toml` or `json`. Raises DescriptionError."""
    if not text.strip():
        fail(file, "", f"is empty; give a {kind.upper()} description")
    try:
        data = tomllib.loads(text) if kind == "toml" else json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        fail(file, "", f"is not valid {kind.upper()}: {reason}")
    if not isinstance(data, dict):
        fail(file, "", f"holds {shown(data)}, not a table of keys and values")
    return data


def load(path: str | Path) -> dict[str, Any]:
    """Read and parse a file; JSON where its name ends in `.json`, else TOML. Raises DescriptionError."""
    return parse(read_text(path), path, "json" if str(path).lower().endswith(".json") else "toml")


def check(model: type[_M], data: Any, file: str | Path, at: tuple[str | int, ...] = ()) -> _M:
    """`data` as `model`. `at` is the key path of `data` in the file. Raises DescriptionError."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        # A misspelt key is both missing and unknown: the unknown one tells the user more.
        errors = sorted(error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")
        first = errors[0]
        loc = first["loc"]
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        key = ".".join(str(part) for part in (*at, *loc))
        if first["type"] == "extra_forbidden":
            known = list(_model_at(model, loc[:-1]).model_fields)
            hint = nearest(str(loc[-1]), known)
            fail(file, key, f"unknown key{hint}; known keys: {', '.join(known)}{more}")
        wanted = _wanted(model, loc, first["msg"])
        if first["type"] == "missing":
            fail(file, key, f"missing; give {'a value' if wanted == first['msg'] else wanted}{more}")
        fail(file, key, f"{shown(first['input'])} is not valid; give {wanted}{more}")


def _inner(annotation: Any) -> type[BaseModel] | None:
    """The model inside an annotation such as `list[Model] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for arg in get_args(annotation) if (found := _inner(arg))), None)


def _model_at(model: type[BaseModel], loc: tuple[int | str, ...]) -> type[BaseModel]:
    for part in loc:
        field = model.model_fields.get(part) if isinstance(part, str) else None
        model = (_inner(field.annotation) if field else None) or model
    return model


def _wanted(model: type[BaseModel], loc: tuple[int | str, ...], otherwise: str) -> str:
    """The description of the innermost field along `loc`."""
    wanted = otherwise
    for part in loc:
        field = model.model_fields.get(part) if isinstance(part, str) else None
        if field:
            wanted = field.description or otherwise
            model = _inner(field.annotation) or model
    return wanted
