"""Small random changes to a per-rank program, of the kind that people make."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from builders import Listed

from meshweave.ir.program import Program
from meshweave.ir.program.ops import Call, Fence
from meshweave.ir.program.views import Blocked, Range, View

Mutation = Callable[[Program, Listed, random.Random], Listed]


def drop_op(program: Program, ops: Listed, draw: random.Random) -> Listed:
    at = draw.randrange(len(ops))
    return ops[:at] + ops[at + 1 :]


def duplicate_op(program: Program, ops: Listed, draw: random.Random) -> Listed:
    at = draw.randrange(len(ops))
    return ops[:at] + ops[at : at + 1] + ops[at:]


def drop_event(program: Program, ops: Listed, draw: random.Random) -> Listed:
    """A fence, or another op, on all ranks that have its like."""
    _, op = draw.choice(ops)
    return [pair for pair in ops if (pair[1].kind, pair[1].name) != (op.kind, op.name)]


def drop_fence(program: Program, ops: Listed, draw: random.Random) -> Listed:
    fences = [at for at, (rank, op) in enumerate(ops) if isinstance(op, Fence) and rank == 0]
    if not fences:
        return drop_op(program, ops, draw)
    number = draw.randrange(len(fences))
    gone = {
        [at for at, (rank, op) in enumerate(ops) if isinstance(op, Fence) and rank == owner][number]
        for owner in program.ranks
    }
    return [pair for at, pair in enumerate(ops) if at not in gone]


def swap_ops(program: Program, ops: Listed, draw: random.Random) -> Listed:
    """Two ops of one rank, neighbours or not."""
    rank = draw.choice(program.ranks)
    own = [at for at, (owner, _) in enumerate(ops) if owner == rank]
    if len(own) < 2:
        return ops
    first = draw.randrange(len(own) - 1)
    second = first + 1 if draw.random() < 0.5 else draw.randrange(len(own))
    i, j = own[first], own[second]
    out = list(ops)
    out[i], out[j] = out[j], out[i]
    return out


def swap_events(program: Program, ops: Listed, draw: random.Random) -> Listed:
    """The same two neighbours on every rank."""
    first = draw.randrange(max(1, len([1 for rank, _ in ops if rank == program.ranks[0]]) - 1))
    out = list(ops)
    for rank in program.ranks:
        own = [at for at, (owner, _) in enumerate(ops) if owner == rank]
        if first + 1 < len(own):
            i, j = own[first], own[first + 1]
            out[i], out[j] = out[j], out[i]
    return out


def _change(ops: Listed, draw: random.Random, change: Callable[[Any], Any]) -> Listed:
    """One op with something changed."""
    at = draw.randrange(len(ops))
    rank, op = ops[at]
    return [*ops[:at], (rank, change(op)), *ops[at + 1 :]]


def _view(op: Any, draw: random.Random, change: Callable[[View], View]) -> Any:
    names = [item.name for item in fields(op) if isinstance(getattr(op, item.name), View)]
    if isinstance(op, Call) and op.ins:
        name = draw.choice([name for name in ("ins", "outs") if getattr(op, name)])
        views = list(getattr(op, name))
        at = draw.randrange(len(views))
        views[at] = change(views[at])
        return replace(op, **{name: tuple(views)})
    if not names:
        return op
    name = draw.choice(names)
    return replace(op, **{name: change(getattr(op, name))})


def shift_view(program: Program, ops: Listed, draw: random.Random) -> Listed:
    def shift(view: View) -> View:
        dim, by = draw.randrange(len(view.selectors)), draw.choice([-2, -1, 1, 2, 3])
        old: Any = view.selectors[dim]
        new: Any = Range(old.start + by, old.stop + by)
        if isinstance(old, Blocked):
            new = replace(old, first=old.first + by)
        return replace(view, selectors=(*view.selectors[:dim], new, *view.selectors[dim + 1 :]))

    return _change(ops, draw, lambda op: _view(op, draw, shift))


def cut_view(program: Program, ops: Listed, draw: random.Random) -> Listed:
    def cut(view: View) -> View:
        dim = draw.randrange(len(view.selectors))
        old = view.selectors[dim]
        new = replace(old, stop=max(old.start, old.stop - 1))  # type: ignore[type-var, operator]
        return replace(view, selectors=(*view.selectors[:dim], new, *view.selectors[dim + 1 :]))

    return _change(ops, draw, lambda op: _view(op, draw, cut))


def other_slot(program: Program, ops: Listed, draw: random.Random) -> Listed:
    def turn(view: View) -> View:
        return replace(view, slot=(view.slot + 1) % program.buffer_of[view.buffer].slots)

    return _change(ops, draw, lambda op: _view(op, draw, turn))


def other_owner(program: Program, ops: Listed, draw: random.Random) -> Listed:
    def move(view: View) -> View:
        return replace(view, rank=draw.choice([None, *program.ranks]))

    return _change(ops, draw, lambda op: _view(op, draw, move))


def other_buffer(program: Program, ops: Listed, draw: random.Random) -> Listed:
    def move(view: View) -> View:
        return replace(view, buffer=draw.choice([buffer.name for buffer in program.buffers]))

    return _change(ops, draw, lambda op: _view(op, draw, move))


def other_lane(program: Program, ops: Listed, draw: random.Random) -> Listed:
    return _change(ops, draw, lambda op: replace(op, lane=draw.choice(program.lanes).name))


def other_field(program: Program, ops: Listed, draw: random.Random) -> Listed:
    def change(op: Any) -> Any:
        changes: dict[str, Any] = {}
        for item in fields(op):
            value = getattr(op, item.name)
            if item.name in ("accumulate", "update"):
                changes[item.name] = type(value)(not value)
            elif item.name == "args" and value:
                changes[item.name] = (max(value[0] + draw.choice([-1, 1]), 0), *value[1:])
            elif item.name == "stash" and value:
                changes[item.name] = ""
            elif item.name == "op":
                changes[item.name] = "max" if value == "sum" else "sum"
            elif item.name in ("peer", "tag", "root", "shift"):
                changes[item.name] = value + draw.choice([-1, 1])
            elif item.name == "release" and value is not None:
                changes[item.name] = draw.choice([None, replace(value, update=not value.update)])
            elif item.name == "over":
                changes[item.name] = draw.choice([tuple(reversed(value)), value[1:]])
        if not changes:
            return op
        name = draw.choice(sorted(changes))
        return replace(op, **{name: changes[name]})

    return _change(ops, draw, change)


MUTATIONS: tuple[Mutation, ...] = (
    drop_op, duplicate_op, drop_event, drop_fence, swap_ops, swap_events, shift_view, cut_view, other_slot,
    other_owner, other_buffer, other_lane, other_field,
)  # fmt: skip
