"""Checks that what an include gives fits what its sub-program declares, as far as no rank or turn matters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from meshweave.base.errors import ProgramError, did_you_mean, require_known
from meshweave.ir.program.expressions import Var, names_in
from meshweave.ir.program.include import Include, include_error
from meshweave.ir.program.include_text import RESERVED
from meshweave.ir.program.ops import Call, Op
from meshweave.ir.program.program import Program
from meshweave.ir.program.renaming import Renaming
from meshweave.ir.program.statements import Repeat, Statement, When, statements_of
from meshweave.ir.program.views import Range, View
from meshweave.ir.program.written import WrittenProgram


def check_includes(program: Program) -> None:
    """Check every include of a program as written, and the uses of the program's indices.

    Raises ProgramError, with the path of the include, where it does not give what its sub-program declares. Raises
    it also for names and slots that a sub-program may not have, and for an index outside of the args of calls.
    """
    for name, part in program.parts.items():
        if not name.isidentifier():
            raise ProgramError(f"'{name}' is no name for a program that is included")
        if any(buffer.slots > 1 for buffer in part.buffers if buffer.kind in ("input", "output")):
            raise ProgramError(f"{name}: an input or output of a program that is included has one slot")
    for op in program.includes:
        try:
            _check_include(program, op)
        except ProgramError as error:
            raise include_error(op.title, error) from None
    for statement in statements_of(program.body) if program.indices else ():
        _check_index_uses(program, statement)


def _check_include(program: Program, op: Include) -> None:
    part = op.program
    interface = [buffer.name for buffer in part.buffers if buffer.kind in ("input", "output")]
    _check_names("mesh", (name for name, _ in op.meshes), part.mesh_of, part.mesh_of)
    _check_names("buffer", (name for name, _ in op.buffers), interface, interface)
    _check_names("index", (name for name, _ in op.indices), part.indices, part.indices)
    _check_names("lane", (name for name, _ in op.lanes), part.lane_of)
    if op.stashes:
        stashes = {call.stash for call in part.expanded.ops() if isinstance(call, Call)} - {""}
        _check_names("stash", (name for name, _ in op.stashes), stashes)
    for _, lane in op.lanes:
        require_known(lane, program.lane_of, "unknown lane", ProgramError)
    if op.copies < 1:
        raise ProgramError(f"has {op.copies} copies of its scratch")
    for formal, view in op.buffers:
        _check_buffer(program, part, formal, view)


def _check_names(noun: str, given: Iterable[str], known: Iterable[str], needed: Iterable[str] = ()) -> None:
    counts = Counter(given)
    for name, count in counts.items():
        if name not in known:
            raise ProgramError(f"has no {noun} '{name}' to be given{did_you_mean(name, known)}")
        if count > 1:
            raise ProgramError(f"is given {noun} '{name}' {count} times")
        if name in RESERVED:
            raise ProgramError(
                f"has a {noun} called '{name}', which means something else in an include: rename it"
            )
    for name in needed:
        if name not in counts:
            raise ProgramError(f"is given nothing for {noun} '{name}'")


def _check_buffer(program: Program, part: WrittenProgram, formal: str, view: View) -> None:
    declared, actual = part.buffer_of[formal], program.buffer_of.get(view.buffer)
    if actual is None:
        raise ProgramError(f"unknown buffer '{view.buffer}'{did_you_mean(view.buffer, program.buffer_of)}")

    def require(condition: bool, message: str) -> None:
        if not condition:
            raise ProgramError(message, buffer=view.buffer)

    dims = declared.num_dims(part.tensor_of), actual.num_dims(program.tensor_of), len(view.selectors)
    require(
        len(set(dims)) == 1,
        f"{formal} has {dims[0]} dims, {view.buffer} has {dims[1]}, {view} names {dims[2]}",
    )
    require(declared.dtype == actual.dtype, f"{formal} is {declared.dtype}, {view.buffer} is {actual.dtype}")
    require(view.rank is None, f"{view} stands for {formal}, and is memory of another rank")
    boxes = all(isinstance(selector, Range) for selector in view.selectors)
    require(boxes, f"{view} stands for {formal}, and is no box")


def _check_index_uses(program: Program, statement: Statement) -> None:
    """Raise ProgramError for an index that anything but the args of a call depends on."""
    names = {name: Var(f"{name}'") for name in program.indices}
    used: set[str] = set()
    match statement:
        case Repeat(var=var, count=count):
            used = {var, *names_in(count)} & names.keys()
        case When(condition=condition):
            used = set(names_in(condition)) & names.keys()
        case Op():
            bare = statement
            if isinstance(bare, Call):
                bare = replace(bare, args=())
            elif isinstance(bare, Include):
                bare = replace(bare, indices=())
            used = set() if Renaming(names).op(bare) == bare else set(names)
    if used:
        raise ProgramError(
            f"index '{min(used)}' may stand in the args of calls only: one proof is for all values of it"
        )
