"""Checks what a program declares, and that its statements use declared names only."""

from __future__ import annotations

import keyword
from collections import Counter
from collections.abc import Collection

from meshweave.base.errors import ProgramError, did_you_mean
from meshweave.base.units import DTYPES
from meshweave.ir.program.check_includes import check_includes
from meshweave.ir.program.check_meanings import check_meanings
from meshweave.ir.program.counts import check_counts
from meshweave.ir.program.include import Include
from meshweave.ir.program.ops import Collective, Op
from meshweave.ir.program.program import Program
from meshweave.ir.program.statements import On, Repeat, Statement, statements_of
from meshweave.ir.program.written import Buffer


def check_header(program: Program) -> None:
    """Check the declarations of a program: names, sizes, layouts, counts, meanings and includes.

    Raises ProgramError at the first one that is wrong.
    """
    _check_names(program)
    for tensor in program.tensors:
        if any(size < 0 for size in tensor.shape):
            raise ProgramError(f"tensor {tensor.name} has shape {tensor.shape}")
    for lane in program.lanes:
        if lane.order not in ("fifo", "ready") or lane.width < 1:
            raise ProgramError(f"lane {lane.name} has order '{lane.order}' and width {lane.width}")
    for buffer in program.buffers:
        _check_buffer(program, buffer)
    check_counts(program, program.parts.values())
    check_meanings(program)
    check_includes(program)


def check_statements(program: Program) -> None:
    """Raise ProgramError where a statement names an undeclared mesh, lane or buffer, or ranks of no mesh.

    A loop index that `is_loop_index` refuses is an error, too. Names in expressions and axes of meshes are not
    looked at, nor includes, which `check_header` has checked.
    """
    ranks = frozenset(program.ranks)
    for statement in statements_of(program.body):
        if not isinstance(statement, Include):
            _check_statement(program, statement, ranks)


def is_loop_index(name: str) -> bool:
    """Return whether a loop index may have this name: an identifier that is no keyword, "rank" or "peer"."""
    return name.isidentifier() and not keyword.iskeyword(name) and name not in ("rank", "peer")


def _check_names(program: Program) -> None:
    tables = (program.meshes, program.counts, program.tensors, program.buffers, program.lanes)
    declared = Counter([item.name for table in tables for item in table] + list(program.indices))
    axes = {axis for mesh in program.meshes for axis in mesh.axes}
    for name in (*declared, *sorted(axes)):
        # The text form is Python syntax, whose parser also folds some letters outside ASCII into others.
        if not (name.isidentifier() and name.isascii()) or keyword.iskeyword(name):
            raise ProgramError(f"'{name}' is no name: letters, digits and _ only, and no word of Python")
    for name, count in declared.items():
        if count > 1:
            raise ProgramError(f"'{name}' is declared twice")


def _check_buffer(program: Program, buffer: Buffer) -> None:
    def require(condition: bool, message: str) -> None:
        if not condition:
            raise ProgramError(message, buffer=buffer.name)

    def require_known(name: str, known: Collection[str], message: str) -> None:
        if name not in known:
            raise ProgramError(f"{message} '{name}'{did_you_mean(name, known)}", buffer=buffer.name)

    require_known(buffer.mesh, program.mesh_of, "is on mesh")
    require_known(buffer.dtype, DTYPES, "unknown dtype")
    require(buffer.slots >= 1, f"has {buffer.slots} slots")
    require(buffer.slots == 1 or buffer.kind != "output", "is an output and has more than one slot")
    if buffer.tensor is None:
        require(buffer.kind == "scratch", f"is of kind {buffer.kind} and holds no tensor")
    else:
        require_known(buffer.tensor, program.tensor_of, "holds tensor")
        require(buffer.kind != "scratch", f"is scratch and holds tensor '{buffer.tensor}'")
        require(buffer.layout is not None, f"holds tensor '{buffer.tensor}' in no layout")
        assert buffer.layout is not None
        same = program.mesh_of[buffer.mesh] == buffer.layout.mesh
        require(same, f"is on mesh '{buffer.mesh}', its layout on '{buffer.layout.mesh.name}'")
    dims = buffer.num_dims(program.tensor_of)
    order = tuple(range(dims)) if buffer.order is None else buffer.order
    require(sorted(order) == list(range(dims)), f"order {order} does not name each of {dims} dims once")


def _check_statement(program: Program, statement: Statement, ranks: frozenset[int]) -> None:
    if isinstance(statement, On):
        if isinstance(statement.where, str):
            if statement.where not in program.mesh_of:
                known = did_you_mean(statement.where, program.mesh_of)
                raise ProgramError(f"'with {statement.where}': there is no such mesh{known}")
        elif strangers := sorted(set(statement.where) - ranks):
            raise ProgramError(f"'with ranks': no mesh has rank {strangers[0]}", rank=strangers[0])
    elif isinstance(statement, Repeat):
        if not is_loop_index(statement.var):
            raise ProgramError(f"'{statement.var}' cannot be a loop index")
    elif isinstance(statement, Op):
        label = statement.name or statement.kind
        if statement.lane not in program.lane_of:
            known = did_you_mean(statement.lane, program.lane_of)
            raise ProgramError(f"unknown lane '{statement.lane}'{known}", op=label)
        if isinstance(statement, Collective) and isinstance(statement.over, str):
            mesh_name = statement.over.partition(".")[0]
            if mesh_name not in program.mesh_of:
                known = did_you_mean(mesh_name, program.mesh_of)
                raise ProgramError(f"runs over unknown mesh '{mesh_name}'{known}", op=label)
        for _, view in statement.accesses():
            if view.buffer not in program.buffer_of:
                known = did_you_mean(view.buffer, program.buffer_of)
                raise ProgramError(f"unknown buffer '{view.buffer}'{known}", op=label, buffer=view.buffer)
