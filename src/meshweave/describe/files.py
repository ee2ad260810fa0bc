"""Read a description file (TOML or JSON) and check it against a pydantic model.

Whatever is wrong with a file becomes one `DescriptionError`. A single problem is one line,
`file: key.path: what is wrong; what would be right`; several are a headline `file: 3 problems` and one indented
line each.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from meshweave.base.errors import DescriptionError, did_you_mean, nearest_word

MAX_FILE_BYTES = 2**24
MAX_PROBLEMS = 20
"""Problems of a file that one error lists; it counts the others."""


def _whole_float_to_int(value: object) -> object:
    """Return a float that is a whole number as an int: files write large counts as `32e9`."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _require_printable(value: str) -> str:
    """Return a name. Raises ValueError for control characters: names are printed in one-line messages."""
    if not value.isprintable():
        raise ValueError("not printable")
    return value


Name = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_require_printable)]
# A rate below one per second would round to zero inside the simulator; a duration above 1e6 s would not
# fit 64 bits of picoseconds.
Rate = Annotated[float, Field(ge=1.0, le=1e24, allow_inf_nan=False)]
Duration = Annotated[float, Field(ge=0.0, le=1e6, allow_inf_nan=False)]
Count = Annotated[int, BeforeValidator(_whole_float_to_int), Field(ge=1, le=2**24)]
Size = Annotated[int, BeforeValidator(_whole_float_to_int), Field(ge=1, le=2**60)]


class FileModel(BaseModel):
    """Base class of the models that check a file: unknown keys and silent conversions are errors."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Problem(NamedTuple):
    """One thing that is wrong with a file: the path of its key (empty: the whole file), and what is wrong."""

    key: str
    message: str


_M = TypeVar("_M", bound=BaseModel)


def _without_control_characters(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


def printable(text: object) -> str:
    """Return `text` on one line, without control characters, cut to 200 characters."""
    line = _without_control_characters(str(text))
    return line if len(line) <= 200 else f"{line[:197]}..."


def fail(file: str | Path, key: str, message: str) -> NoReturn:
    """Raise the DescriptionError `file: key: message` on one line; an empty `key` means the whole file."""
    raise DescriptionError(f"{printable(file)}: {_line(Problem(key, message))}")


def fail_with_all(file: str | Path, problems: Sequence[Problem]) -> NoReturn:
    """Raise one DescriptionError with every problem of a file: one line, or a headline and a line each."""
    if len(problems) == 1:
        fail(file, *problems[0])
    lines = [f"{printable(file)}: {len(problems)} problems", *map(_line, problems[:MAX_PROBLEMS])]
    if len(problems) > MAX_PROBLEMS:
        lines.append(f"and {len(problems) - MAX_PROBLEMS} more")
    raise DescriptionError("\n  ".join(lines))


def _line(problem: Problem) -> str:
    message = _without_control_characters(problem.message)
    return f"{printable(problem.key)}: {message}" if problem.key else message


def format_value(value: object) -> str:
    """Return the text of a wrong value for an error message."""
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


def read_text(path: str | Path) -> str:
    """Return the text of a description file (UTF-8, at most 16 MiB).

    Raises:
        DescriptionError: the file is missing, unreadable, empty or binary, or a directory.
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


def parse_table(text: str, file: str | Path, kind: str) -> dict[str, Any]:
    """Return the table that `text` contains; `kind` is `toml` or `json`. Raises DescriptionError."""
    if not text.strip():
        fail(file, "", f"is empty; give a {kind.upper()} description")
    try:
        data = tomllib.loads(text) if kind == "toml" else json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        fail(file, "", f"is not valid {kind.upper()}: {reason}")
    if not isinstance(data, dict):
        fail(file, "", f"holds {format_value(data)}, not a table of keys and values")
    return data


def load_table(path: str | Path) -> dict[str, Any]:
    """Read and parse a file; JSON if its name ends in `.json`, else TOML. Raises DescriptionError."""
    return parse_table(read_text(path), path, "json" if str(path).lower().endswith(".json") else "toml")


def check_table(model: type[_M], data: Any, file: str | Path, at: tuple[str | int, ...] = ()) -> _M:
    """Return `data` as an instance of `model`. `at` is the key path of `data` in the file.

    Raises:
        DescriptionError: `data` does not fit the model; the error lists every problem.
    """
    checked, problems = validate_table(model, data, at)
    if checked is None:
        fail_with_all(file, problems)
    return checked


def validate_table(
    model: type[_M], data: Any, at: tuple[str | int, ...] = ()
) -> tuple[_M | None, list[Problem]]:
    """Return `data` as an instance of `model` and no problems, or None and everything that is wrong with it.

    A misspelt key is both unknown and missing: it counts once, as the unknown key.
    """
    try:
        return model.model_validate(data), []
    except ValidationError as error:
        errors = error.errors(include_url=False)
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
