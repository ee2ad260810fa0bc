"""Reads the schedule back from the program that `program` wrote of it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from meshweave.algorithms.pipeline.actions import Action, ActionKind, Schedule
from meshweave.base.errors import ProgramError
from meshweave.describe.layout.mesh import Mesh
from meshweave.ir.program import Program
from meshweave.ir.program.ops import Call, Op, Recv, Send
from meshweave.ir.program.statements import Key

_KINDS = "|".join(sorted((kind.value for kind in ActionKind), key=len, reverse=True))
_LABEL = re.compile(rf"(\d+)({_KINDS})(?: with (\d+))?(?: overlap (\d+)/(\d+))?")


def read_schedule(program: Program, *, communication: bool = False) -> Schedule:
    """Return the schedule of a pipeline's program, with sends and receives where `communication` is set.

    Raises:
        ProgramError: the program has no stages.
    """
    stage_meshes = _stage_meshes(program)
    meshes = list(dict.fromkeys(stage_meshes))
    orders = tuple(tuple(_actions(program, mesh, communication)) for mesh in meshes)
    leaves = [leaf for order in orders for action in order for leaf in action.leaves]
    count = max((leaf.micro_batch for leaf in leaves if leaf.micro_batch is not None), default=0) + 1
    return Schedule(tuple(meshes.index(mesh) for mesh in stage_meshes), count, orders)


def _stage_meshes(program: Program) -> list[Mesh]:
    """Return the mesh of each stage: that of its parameters."""
    meshes: list[Mesh] = []
    while (buffer := program.buffer_of.get(f"w{len(meshes)}")) is not None:
        meshes.append(program.mesh_of[buffer.mesh])
    if not meshes:
        raise ProgramError(f"program {program.name} has no stages: no buffer is called 'w0'")
    return meshes


def _actions(program: Program, mesh: Mesh, communication: bool) -> Iterator[Action]:
    """Yield the actions of the ranks of one mesh: all ops of an action make one."""
    before: tuple[Action, str] | None = None
    last: Op | None = None
    parts: list[Action] = []
    for _, op in sorted(_labelled(program, mesh), key=lambda pair: pair[0]):
        match = _LABEL.fullmatch(op.name)
        assert match is not None
        stage, kind, peer, number, count = match.groups()
        action = Action(
            ActionKind(kind),
            int(stage),
            _micro_batch(op, ActionKind(kind)),
            None if peer is None else int(peer),
        )
        if action.kind.communicates and not communication:
            continue
        is_part = last is not None and before == (action, op.name) and _continues(op, last)
        before, last = (action, op.name), op
        if is_part:
            continue
        if number is None:
            yield action
            continue
        parts.append(action)
        if int(number) == int(count):
            yield Action(ActionKind.OVERLAP, -1, parts=tuple(parts))
            parts = []


def _continues(op: Op, before: Op) -> bool:
    """Return whether an op of the same action as the op before is a part of it, and no repetition."""
    if not isinstance(op, Call) or not isinstance(before, Call):
        return True
    order = "recompute", "input_grad", "weight_grad"
    return {op.part, before.part} <= set(order) and order.index(op.part) > order.index(before.part)


def _labelled(program: Program, mesh: Mesh) -> Iterator[tuple[Key, Op]]:
    """Yield (place, op) of ops that an action names, each place once whatever ranks have it."""
    places: dict[Key, Op] = {}
    for rank in mesh.ranks:
        for bound in program.ops_on_rank(rank):
            op = bound.op
            if _LABEL.fullmatch(op.name) and (isinstance(op, (Call, Send, Recv)) or not _is_transfer(op)):
                places.setdefault(bound.key, op)
    yield from places.items()


def _is_transfer(op: Op) -> bool:
    match = _LABEL.fullmatch(op.name)
    return match is not None and ActionKind(match.group(2)).communicates


def _micro_batch(op: Op, kind: ActionKind) -> int | None:
    if not kind.per_micro_batch:
        return None
    value = op.args[0] if isinstance(op, Call) else getattr(op, "tag", 0)
    assert isinstance(value, int)
    return value
