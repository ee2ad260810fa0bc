"""Small all-reduces as gathers of all terms, which each member adds up itself.

An all-reduce as a ring takes 2 (P - 1) steps on P members, whatever its size; of a few bytes it takes as long as
their latencies. A gather whose members send all that they have, to the member 1, 2, 4, ... places on, takes log2 P
steps, rounded up (Bruck et al., IEEE TPDS 8(11), 1997, section 4). It moves P / 2 times the bytes of the ring.
All members add the terms in one order, that of members, so that their sums have the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import replace

from meshweave.base.units import dtype_bytes
from meshweave.ir.program import Buffer, Program, Statement
from meshweave.ir.program.expressions import Index, Var
from meshweave.ir.program.ops import Add, AllReduce, Copy, Op, Permute
from meshweave.ir.program.release import CollectiveStep
from meshweave.ir.program.renaming import fresh_name
from meshweave.ir.program.statements import rewrite
from meshweave.ir.program.views import Range, View
from meshweave.lower.boxes import view_extent

SMALL_SUM_BYTES = 64 << 10
"""The most bytes that arrive at a rank for a sum. A ring moves fewer bytes in more steps, which is slower where
the latency of a step is that of 8 KB or more: on links of some Mbit/s, and on all that are faster."""

EXCHANGED_BYTES = 1 << 20
"""The most bytes of a sum of two members, which moves no more than a ring; of more a ring adds what has arrived
while the rest is on its way."""

TERMS = "_terms"
"""Suffix of the buffer in which terms arrive."""


def lower_small_sums(
    program: Program, most_bytes: int = SMALL_SUM_BYTES, most_exchanged: int = EXCHANGED_BYTES
) -> Program:
    """Return the program with its small all-reduces over mesh axes as gathers by `permute`, and additions.

    Other reductions than sums stay, and those of views whose size differs between ranks or iterations, or that
    have strided blocks. Included sub-programs are lowered, too.

    Args:
        most_bytes: an all-reduce stays where more bytes of terms would arrive at a rank.
        most_exchanged: the same for a group of two members, in place of `most_bytes`.
    """
    program = program.with_parts(lambda part: lower_small_sums(part, most_bytes, most_exchanged))
    lowering = _SmallSumLowering(program, most_bytes, most_exchanged)
    body = rewrite(program.body, lowering.replacement)
    return replace(program, body=body, buffers=(*program.buffers, *lowering.new_buffers.values()))


class _SmallSumLowering:
    """The buffers that small sums of one program add, and the ops that replace them."""

    def __init__(self, program: Program, most_bytes: int, most_exchanged: int) -> None:
        self.program, self.most_bytes, self.most_exchanged = program, most_bytes, most_exchanged
        self.new_buffers: dict[Hashable, Buffer] = {}

    def replacement(self, op: Op) -> list[Statement]:
        """Return the ops that replace `op`."""
        if not isinstance(op, AllReduce) or op.op != "sum":
            return [op]
        if not isinstance(op.over, str) or "." not in op.over:
            return [op]
        mesh, _, axis = op.over.partition(".")
        count = self.program.mesh_of[mesh].size(axis)
        shape = self._shape(op.src)
        if count < 2 or not shape:
            return [op]
        arriving = (count - 1) * self._bytes(op.src, shape)
        if count == 2:
            return self._exchanged(op, shape) if arriving <= self.most_exchanged else [op]
        return self._gathered(op, count, shape) if arriving <= self.most_bytes else [op]

    def _shape(self, view: View) -> tuple[int, ...] | None:
        """Return the shape of a view, None where it is not that of all ranks and iterations."""
        if not all(isinstance(selector, Range) for selector in view.selectors):
            return None
        extents = [view_extent(self.program, view, dim) for dim in range(len(view.selectors))]
        fixed = tuple(extent for extent in extents if isinstance(extent, int))
        return fixed if len(fixed) == len(extents) else None

    def _bytes(self, view: View, shape: tuple[int, ...]) -> int:
        return math.prod(shape) * dtype_bytes(self.program.buffer_of[view.buffer].dtype)

    def _exchanged(self, op: AllReduce, shape: tuple[int, ...]) -> list[Statement]:
        """Return the sum of two members: each adds the other's term to its own, which has the same bits."""
        term = View(self._buffer(op, 1, shape), tuple(Range(0, extent) for extent in shape))
        out: list[Statement] = [self._step(op, term, op.src, 1, CollectiveStep("all_gather", 0, 1))]
        if op.out != op.src:
            out.append(Copy(out=op.out, src=op.src, lane=op.lane, name=f"{_name(op)}_own"))
        return [*out, Add(out=op.out, src=term, lane=op.lane, name=f"{_name(op)}_add")]

    def _gathered(self, op: AllReduce, count: int, shape: tuple[int, ...]) -> list[Statement]:
        """Return the gather and the sum. Part r of the buffer has the term of the member r places back."""
        assert isinstance(op.over, str)
        buffer, at, name = self._buffer(op, count, shape), Var(op.over), _name(op)

        def terms(first: Index, end: Index) -> View:
            rows = Range(first * shape[0], end * shape[0])
            return View(buffer, (rows, *(Range(0, extent) for extent in shape[1:])))

        steps = (count - 1).bit_length()
        out: list[Statement] = [Copy(out=terms(0, 1), src=op.src, lane=op.lane, name=f"{name}_own")]
        for number in range(steps):
            known = 1 << number
            sent = min(known, count - known)
            step = CollectiveStep("all_gather", number, steps)
            out.append(self._step(op, terms(known, known + sent), terms(0, sent), known, step))
        out.append(Copy(out=op.out, src=terms(at, at + 1), lane=op.lane, name=f"{name}_first"))
        for member in range(1, count):
            place = (at - member) % count
            term = terms(place, place + 1)
            out.append(Add(out=op.out, src=term, lane=op.lane, name=f"{name}_add{member}"))
        return out

    def _step(self, op: AllReduce, out: View, src: View, shift: int, step: CollectiveStep) -> Permute:
        name = f"{_name(op)}_step{step.index}"
        return Permute(over=op.over, out=out, src=src, shift=shift, step=step, lane=op.lane, name=name)

    def _buffer(self, op: AllReduce, count: int, shape: tuple[int, ...]) -> str:
        """Return the name of a buffer for `count` terms; sums of one lane and shape out of one buffer share it."""
        of, key = self.program.buffer_of[op.src.buffer], (op.lane, op.src.buffer, count, *shape)
        if key not in self.new_buffers:
            taken = self.program.names | {buffer.name for buffer in self.new_buffers.values()}
            name, own = fresh_name(f"{of.name}{TERMS}", taken), (count * shape[0], *shape[1:])
            self.new_buffers[key] = Buffer(name, "scratch", of.mesh, of.dtype, shape=own)
        return self.new_buffers[key].name


def _name(op: AllReduce) -> str:
    return op.name or op.kind
