"""Small all-reduces as gathers of all terms, which each member adds up itself.

An all-reduce as a ring takes 2 (P - 1) steps on P members, whatever its size; of a few bytes it takes as long as
their latencies. A gather whose members send all that they have, to the member 1, 2, 4, ... places on, takes log2 P steps,
rounded up (Bruck et al., IEEE TPDS 8(11), 1997, section 4). It moves P / 2 times the bytes of the ring. All members
add the terms in one order, that of members, so that their sums have the same bits.
"""

from __future__ import annotations

import math
from dataclasses import replace

from meshweave.base.units import dtype_bytes
from meshweave.ir.program import Buffer, Program, Statement
from meshweave.ir.program.expressions import Index, Var
from meshweave.ir.program.ops import Add, AllReduce, Copy, Op, Permute
from meshweave.ir.program.release import CollectiveStep
from meshweave.ir.program.statements import rewrite
from meshweave.ir.program.views import Range, View
from meshweave.lower.boxes import view_extent

SMALL_SUM_BYTES = 64 << 10
"""The most bytes that arrive at a rank for a sum. They are worth the steps that a ring takes more on links whose step
lasts as long as 8 KB, as those of some Mbit/s do, and on all that are faster."""

TERMS = "_terms"
"""Suffix of the buffer in which terms arrive."""


def lower_small_sums(program: Program, most_bytes: int = SMALL_SUM_BYTES) -> Program:
    """Return the program with its small all-reduces over mesh axes as gathers by `permute`, and additions.

    Other reductions than sums stay, and those whose size differs between ranks or iterations. Included
    sub-programs are lowered, too.

    Args:
        most_bytes: an all-reduce stays where more would arrive at a rank.
    """
    program = program.with_parts(lambda part: lower_small_sums(part, most_bytes))
    lowering = _Lowering(program, most_bytes)
    body = rewrite(program.body, lowering.replacement)
    return replace(program, body=body, buffers=(*program.buffers, *lowering.new_buffers.values()))


class _Lowering:
    """The buffers that small sums of one program add, and the ops that replace them."""

    def __init__(self, program: Program, most_bytes: int) -> None:
        self.program, self.most_bytes = program, most_bytes
        self.new_buffers: dict[str, Buffer] = {}

    def replacement(self, op: Op) -> list[Statement]:
        """Return the ops that replace `op`."""
        if not isinstance(op, AllReduce) or op.op != "sum":
            return [op]
        if not isinstance(op.over, str) or "." not in op.over:
            return [op]
        mesh, _, axis = op.over.partition(".")
        count = self.program.mesh_of[mesh].size(axis)
        shape = self._shape(op.src)
        if count < 2 or not shape or (count - 1) * self._bytes(op.src, shape) > self.most_bytes:
            return [op]
        return self._gathered(op, count, shape)

    def _shape(self, view: View) -> tuple[int, ...] | None:
        """Return the shape of a view, None where it is not that of all ranks and iterations."""
        if not all(isinstance(selector, Range) for selector in view.selectors):
            return None
        extents = [view_extent(self.program, view, dim) for dim in range(len(view.selectors))]
        fixed = tuple(extent for extent in extents if isinstance(extent, int))
        return fixed if len(fixed) == len(extents) else None

    def _bytes(self, view: View, shape: tuple[int, ...]) -> int:
        return math.prod(shape) * dtype_bytes(self.program.buffer_of[view.buffer].dtype)

    def _gathered(self, op: AllReduce, count: int, shape: tuple[int, ...]) -> list[Statement]:
        """Return the gather and the sum. Part r of the buffer has the term of the member r places back."""
        assert isinstance(op.over, str)
        buffer, at, name = self._buffer(op, count, shape), Var(op.over), op.name or op.kind

        def terms(first: Index, end: Index) -> View:
            rows = Range(first * shape[0], end * shape[0])
            return View(buffer, (rows, *(Range(0, extent) for extent in shape[1:])))

        steps = (count - 1).bit_length()
        out: list[Statement] = [Copy(out=terms(0, 1), src=op.src, lane=op.lane, name=f"{name}_own")]
        for step in range(steps):
            known = 1 << step
            sent = min(known, count - known)
            out.append(
                Permute(
                    over=op.over,
                    out=terms(known, known + sent),
                    src=terms(0, sent),
                    shift=known,
                    step=CollectiveStep("all_gather", step, steps),
                    lane=op.lane,
                    name=f"{name}_step{step}",
                )
            )
        out.append(Copy(out=op.out, src=terms(at, at + 1), lane=op.lane, name=f"{name}_first"))
        for member in range(1, count):
            place = (at - member) % count
            out.append(Add(out=op.out, src=terms(place, place + 1), lane=op.lane, name=f"{name}_add{member}"))
        return out

    def _buffer(self, op: AllReduce, count: int, shape: tuple[int, ...]) -> str:
        """Return the name of a buffer for all terms; sums of one shape out of one buffer share it."""
        of = self.program.buffer_of[op.src.buffer]
        name = "_".join((f"{of.name}{TERMS}", *map(str, (count, *shape))))
        self.new_buffers[name] = Buffer(
            name, "scratch", of.mesh, of.dtype, shape=(count * shape[0], *shape[1:])
        )
        return name
