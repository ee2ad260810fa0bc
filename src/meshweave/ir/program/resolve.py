"""Turns an op of a template into one with plain integers, for one rank and one turn of its loops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from meshweave.base.errors import ProgramError
from meshweave.ir.program.expressions import Expr, evaluate
from meshweave.ir.program.include import Submesh
from meshweave.ir.program.ops import Op
from meshweave.ir.program.release import CollectiveStep, Release
from meshweave.ir.program.views import Range, View
from meshweave.ir.program.written import WrittenProgram

_HOLDS_INDICES = (View, Expr, Submesh, Range, tuple)


def resolve_op(program: WrittenProgram, op: Op, env: Mapping[str, int], rank: int) -> Op:
    """Return an op with plain integers, as the global rank `rank` runs it; its `over` lists global ranks.

    `env` has the integer of each variable but `peer`. Raises ProgramError where an expression has no value, or a
    view does not fit its buffer.
    """
    changes: dict[str, Any] = {}
    for name in _field_names(type(op)):
        value = getattr(op, name)
        if name == "over":
            changes[name] = program.group(value, rank)
        elif name.endswith("sizes"):
            count = len(program.group(op.over, rank))  # type: ignore[attr-defined]
            changes[name] = _sizes(value, count, env)
        else:
            resolved = _value(program, value, env, rank)
            if resolved is not value:
                changes[name] = resolved
    return replace(op, **changes) if changes else op


def _value(program: WrittenProgram, value: Any, env: Mapping[str, int], rank: int) -> Any:
    if isinstance(value, Expr):
        return evaluate(value, env)
    if isinstance(value, View):
        owner = rank if value.rank is None else evaluate(value.rank, env)
        shape = program.local_shape(value.buffer, owner)
        try:
            return value.resolve(env, shape, program.buffer_of[value.buffer].slots)
        except ProgramError as error:
            raise ProgramError(error.message, rank=rank, buffer=value.buffer) from None
    if isinstance(value, Release):
        return replace(
            value, tile=tuple(evaluate(size, env) for size in value.tile), first=evaluate(value.first, env)
        )
    if isinstance(value, CollectiveStep):
        return replace(value, index=evaluate(value.index, env), count=evaluate(value.count, env))
    if isinstance(value, Submesh):
        return replace(value, coordinates=_value(program, value.coordinates, env, rank))
    if isinstance(value, Range):
        stop = None if value.stop is None else evaluate(value.stop, env)
        return Range(evaluate(value.start, env), stop)
    if isinstance(value, tuple) and any(isinstance(item, _HOLDS_INDICES) for item in value):
        return tuple(_value(program, item, env, rank) for item in value)
    return value


def _sizes(value: Any, count: int, env: Mapping[str, int]) -> tuple[int, ...] | None:
    if value is None or isinstance(value, tuple):
        return value
    return tuple(evaluate(value, {**env, "peer": peer}) for peer in range(count))


_FIELDS: dict[type[Op], tuple[str, ...]] = {}


def _field_names(kind: type[Op]) -> tuple[str, ...]:
    names = _FIELDS.get(kind)
    if names is None:
        names = _FIELDS[kind] = tuple(item.name for item in fields(kind) if item.name not in ("lane", "name"))
    return names
