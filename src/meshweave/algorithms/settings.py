"""Problems from `name=value` settings, as on the command line: an algorithm's first example replaced in part."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import fields, is_dataclass, replace
from typing import Any

from meshweave.algorithms.contract import Algorithm
from meshweave.base.errors import LayoutError, did_you_mean
from meshweave.describe.layout import Layout
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.layout.spec import layout_of_spec, spec_of

MAX_SIZE = 2**40
"""The largest size of a dim; a larger one is taken for a typing error."""


def problem_from_settings(entry: Algorithm[Any, Any], settings: Iterable[str] = ()) -> Any:
    """Return the first example problem of an algorithm with the given fields replaced.

    Args:
        entry: the algorithm; its `examples` yields the problem.
        settings: "field=value" strings, such as `rows=16`, `mesh_shape=2x4` or `a=2x4 S0R`. A value has the type
            that the field has in the example: a whole number (0 or 1 for a flag), a word, sizes joined by `x`, or
            for a layout a mesh shape and a spec string. A field that is None in the example, or of another type,
            cannot be set.

    Raises:
        LayoutError: there is no such field to set, the value cannot be read, or the problem refuses it.
        DescriptionError: a problem of a training step refuses the value.
    """
    problem = next(entry.examples())
    assert is_dataclass(problem) and not isinstance(problem, type)
    values = {field.name: getattr(problem, field.name) for field in fields(problem)}
    known = {name: value for name, value in values.items() if _setting_text(value)}
    changes = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or name not in known:
            options = ", ".join(f"{field}={_setting_text(value)}" for field, value in known.items())
            nearest = did_you_mean(name, known)
            raise LayoutError(f"{entry.name} has no setting '{setting[:60]}'{nearest}; it has {options}")
        changes[name] = _parse_value(name, text, known[name])
    return replace(problem, **changes)


def _setting_text(value: object) -> str:
    match value:
        case bool():
            return str(int(value))
        case None:
            return ""
        case int() | str():
            return str(value)
        case tuple() if value and all(isinstance(item, int) for item in value):
            return "x".join(map(str, value))
        case Layout():
            return f"'{'x'.join(map(str, value.mesh.shape))} {_spec_text(value)}'"
    return ""


def _spec_text(layout: Layout) -> str:
    try:
        return spec_of(layout, 2)
    except LayoutError:
        return str(layout.placements)


def _parse_value(name: str, text: str, example: object) -> Any:
    try:
        match example:
            case bool():
                return {"0": False, "1": True}[text]
            case int():
                return _parse_size(text)
            case tuple():
                return tuple(_parse_size(part) for part in text.split("x"))
            case Layout():
                shape, _, spec = text.strip().partition(" ")
                sides = tuple(_parse_size(part) for part in shape.split("x"))
                if math.prod(sides) > 1 << 16:
                    raise ValueError
                axes = tuple(f"x{number}" for number in range(len(sides)))
                return layout_of_spec(spec.strip(), Mesh.of(f"mesh_{shape}", sides, axes))
            case _:
                return text
    except (ValueError, KeyError):
        raise LayoutError(
            f"{name}={text[:60]}: give a value such as {name}={_setting_text(example)}"
        ) from None


def _parse_size(text: str) -> int:
    size = int(text)
    if not 0 <= size <= MAX_SIZE:
        raise ValueError
    return size
