"""All-gather and reduce-scatter as rings of `permute`.

On a ring of P members an all-gather takes P - 1 steps: in step t member i passes on the part of member
i - t. A reduce-scatter runs the other way: in step t member i sends its partial sum of part i - 1 - t and
adds its own term to what arrives, so that part i is complete at member i after P - 1 steps. A two-way ring
cuts every part in two halves that travel in opposite directions, each in a lane of its own.

The pass works on the template: parts are addressed by expressions in the member's coordinate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from meshweave.base.errors import ProgramError
from meshweave.ir.program import Buffer, Lane, Program, Statement
from meshweave.ir.program.expressions import Index, Var, maximum, select, substitute
from meshweave.ir.program.ops import Add, AllGather, Copy, Op, Permute, ReduceScatter, CollectiveStep
from meshweave.ir.program.statements import bodies_of, rewrite
from meshweave.ir.program.views import FULL, Range, View

BACK = "_back"
"""Suffix of the lane for the second direction."""

INBOX_SLOTS = 3
"""One partial sum is added to and passed on, one arrives, and the receive of the next one can be posted."""


def lower_rings(
    program: Program,
    num_directions: Literal[1, 2] = 1,
    should_lower: Callable[[AllGather | ReduceScatter], bool] = lambda op: True,
) -> Program:
    """The program with its all-gathers and reduce-scatters over mesh axes (those that are `wanted`) as rings.

    Raises ProgramError for a collective without `sizes` whose parts cannot be told from its views.
    """
    pass_ = _RingLowering(program, num_directions, should_lower)
    body = rewrite(program.body, pass_.replacement)
    lanes = program.lanes + tuple(pass_.new_lanes.values())
    kept = tuple(buffer for buffer in program.buffers if buffer.name not in pass_.dropped)
    return replace(program, body=body, lanes=lanes, buffers=kept + tuple(pass_.new_buffers.values()))


@dataclass(frozen=True)
class _DirectedPart:
    """What travels in one direction: of each member's part, the piece from `skip` on, `size` long; both are
    expressions in the member number `peer`. The ring runs in `ways` directions at once."""

    shift: int
    lane: str
    skip: Index
    size: Index
    starts: tuple[Index, ...]
    num_directions: int = 1

    def bounds(self, member: Index, count: int) -> tuple[Index, Index]:
        """[start, stop) of a member's piece within the gathered dim."""
        begins = [self.starts[p] + substitute(self.skip, "peer", p) for p in range(count)]
        ends = [begins[p] + substitute(self.size, "peer", p) for p in range(count)]
        step = _stride(begins), _stride(ends)
        if step[0] is not None and step[0] == step[1]:
            return member * step[0] + begins[0], member * step[0] + ends[0]
        return select(begins, member), select(ends, member)

    def extent(self, member: Index, count: int) -> Index:
        """Size of a member's piece."""
        return select([substitute(self.size, "peer", p) for p in range(count)], member)


def _stride(values: list[Index]) -> int | None:
    """The common difference of integers in arithmetic progression, or None."""
    if not all(isinstance(value, int) for value in values):
        return None
    gaps = {b - a for a, b in pairwise(values)}
    gap = gaps.pop() if len(gaps) == 1 else None
    return gap if isinstance(gap, int) else None


class _RingLowering:
    def __init__(
        self, program: Program, ways: int, wanted: Callable[[AllGather | ReduceScatter], bool]
    ) -> None:
        self.program, self.ways, self.wanted = program, ways, wanted
        self.new_lanes: dict[str, Lane] = {}
        self.new_buffers: dict[str, Buffer] = {}
        self.dropped = self._passed_through(program)
        self._pending_copy: Copy | None = None

    def replacement(self, op: Op) -> list[Statement]:
        """Return what stands in the place of `op`. A copy into a dropped buffer waits for the gather after it."""
        if isinstance(op, Copy) and op.out.buffer in self.dropped:
            self._pending_copy = op
            return []
        if isinstance(op, AllGather) and self._applies(op):
            pending, self._pending_copy = self._pending_copy, None
            return self._gather(op, pending)
        if isinstance(op, ReduceScatter) and self._applies(op):
            return self._scatter(op)
        return [op]

    def _passed_through(self, program: Program) -> set[str]:
        """Scratch in which a copy makes the `src` of the gather right after it, and that has no other use.

        Such a copy can go to the own part of the gathered dim at once, and the buffer is dropped.
        """
        uses = Counter(view.buffer for op in program.ops() for _, view in op.accesses())

        for body in bodies_of(program.body):
            for before, op in pairwise(body):
                is_made = isinstance(before, Copy) and before.release is None
                if is_made and isinstance(op, AllGather) and self._applies(op):
                    assert isinstance(before, Copy)
                    uses[before.out.buffer] -= 2 if before.out == op.src else 0
        return {
            buffer.name for buffer in program.buffers if buffer.kind == "scratch" and not uses[buffer.name]
        }

    def _applies(self, op: AllGather | ReduceScatter) -> bool:
        return isinstance(op.over, str) and "." in op.over and self.wanted(op)

    def _parts(self, op: AllGather | ReduceScatter, count: int) -> list[_DirectedPart]:
        size = self._part_size(op, count)
        starts: list[Index] = [0]
        for peer in range(count - 1):
            starts.append(starts[-1] + substitute(size, "peer", peer))
        if self.ways == 1 or count < 3 or size == 1:  # on two members both directions are the same link
            return [_DirectedPart(1, op.lane, 0, size, tuple(starts))]
        half = (size + 1) // 2
        back = op.lane + BACK
        if back not in self.program.lane_of:
            self.new_lanes[back] = replace(self.program.lane_of[op.lane], name=back)
        return [
            _DirectedPart(1, op.lane, 0, half, tuple(starts), 2),
            _DirectedPart(-1, back, half, size - half, tuple(starts), 2),
        ]

    def _part_size(self, op: AllGather | ReduceScatter, count: int) -> Index:
        """Size of member `peer`'s part along the dim."""
        if isinstance(op.sizes, tuple):
            return select(op.sizes, Var("peer"))
        if op.sizes is not None:
            return op.sizes
        view = op.src if isinstance(op, AllGather) else op.out
        extent = self._extent(view, op.dim)
        if not isinstance(extent, int):
            raise ProgramError(
                "needs sizes to be lowered to a ring", op=op.name or op.kind, buffer=view.buffer
            )
        return extent

    def _extent(self, view: View, dim: int) -> Index:
        selector = view.selectors[dim]
        if not isinstance(selector, Range):
            raise ProgramError(f"a ring moves boxes, not {view}", buffer=view.buffer)
        if selector.stop is not None:
            return selector.stop - selector.start
        buffer = self.program.buffer_of[view.buffer]
        if buffer.tensor is None:
            return buffer.shape[dim] - selector.start
        ranks = self.program.mesh_of[buffer.mesh].ranks
        extents = {self.program.local_shape(buffer.name, rank)[dim] for rank in ranks}
        if len(extents) > 1:
            raise ProgramError("needs sizes: its shards are uneven", buffer=view.buffer)
        return extents.pop() - selector.start

    # --- rings ----------------------------------------------------------------------------------------

    def _gather(self, op: AllGather, made: Copy | None) -> list[Statement]:
        """The ring; `made` is the copy that makes its `src`, where that goes straight to its place."""
        count, at = self._ring(op)
        parts = self._parts(op, count)
        own = _sub(op.out, op.dim, *_whole_part(parts, at, count))
        out: list[Statement] = []
        if made is None:
            out.append(Copy(out=own, src=op.src, lane=op.lane, name=_name(op, "own")))
        else:
            out.append(replace(made, out=own))
        for step in range(count - 1):
            for part in parts:
                sender: Index = (at - part.shift * step) % count if step else at
                sent = _sub(op.out, op.dim, *part.bounds(sender, count))
                got = _sub(op.out, op.dim, *part.bounds((at - part.shift * (step + 1)) % count, count))
                out.append(self._permute(op, part, step, count, got, sent))
        return out

    def _scatter(self, op: ReduceScatter) -> list[Statement]:
        count, at = self._ring(op)
        parts = self._parts(op, count)
        whole = _sub(op.src, op.dim, *_whole_part(parts, at, count))
        out: list[Statement] = [Copy(out=op.out, src=whole, lane=op.lane, name=_name(op, "own"))]
        for step in range(count - 1):
            for part in parts:
                out += self._scatter_step(op, part, step, count, at)
        return out

    def _scatter_step(
        self, op: ReduceScatter, part: _DirectedPart, step: int, count: int, at: Var
    ) -> list[Op]:
        inbox = self._inbox(op, part, count)
        sends, takes = (at - part.shift * (1 + step)) % count, (at - part.shift * (2 + step)) % count
        got = _box(inbox, op.dim, part.extent(takes, count), step % INBOX_SLOTS)
        if step:
            sent = _box(inbox, op.dim, part.extent(sends, count), (step - 1) % INBOX_SLOTS)
        else:
            sent = _sub(op.src, op.dim, *part.bounds(sends, count))
        permute = self._permute(op, part, step, count, got, sent)
        if step < count - 2:
            mine = _sub(op.src, op.dim, *part.bounds(takes, count))
            return [permute, Add(out=got, src=mine, lane=part.lane, name=_name(op, "add"))]
        first = substitute(part.skip, "peer", at)
        last = first + substitute(part.size, "peer", at)
        target = _sub(op.out, op.dim, first, last)
        return [permute, Add(out=target, src=got, lane=part.lane, name=_name(op, "add"))]

    def _ring(self, op: AllGather | ReduceScatter) -> tuple[int, Var]:
        assert isinstance(op.over, str)
        mesh, _, axis = op.over.partition(".")
        return self.program.mesh_of[mesh].size(axis), Var(op.over)

    def _permute(
        self, op: AllGather | ReduceScatter, part: _DirectedPart, step: int, count: int, got: View, sent: View
    ) -> Op:
        return Permute(
            over=op.over,
            out=got,
            src=sent,
            shift=part.shift,
            step=CollectiveStep(op.kind, step, count - 1, num_directions=part.num_directions),
            lane=part.lane,
            name=_name(op, f"step{step}" + ("" if part.shift == 1 else BACK)),
        )

    def _inbox(self, op: ReduceScatter, part: _DirectedPart, count: int) -> Buffer:
        """Where partial sums arrive: slots of the largest piece, with `dim` outermost in memory."""
        assert isinstance(op.over, str)
        of = self.program.buffer_of[op.src.buffer]
        name = f"{op.src.buffer}_ring{'' if part.shift == 1 else BACK}"
        shape = [0 if d == op.dim else self._extent(op.src, d) for d in range(len(op.src.selectors))]
        pieces = [substitute(part.size, "peer", p) for p in range(count)]
        known = self.new_buffers.get(name)
        if all(isinstance(piece, int) for piece in pieces):
            shape[op.dim] = max(piece for piece in pieces if isinstance(piece, int))
        else:  # depends on a loop index: as much as the whole dim is enough
            shape[op.dim] = self._extent(View(op.src.buffer, (FULL,) * len(shape)), op.dim)
        if known is not None:  # several collectives of one buffer share an inbox
            shape[op.dim] = maximum(known.shape[op.dim], shape[op.dim])
        order = (op.dim, *(d for d in range(len(shape)) if d != op.dim))
        buffer = Buffer(
            name, "scratch", of.mesh, of.dtype, shape=tuple(shape), slots=INBOX_SLOTS, order=order
        )
        self.new_buffers[name] = buffer
        return buffer


def _whole_part(parts: list[_DirectedPart], member: Index, count: int) -> tuple[Index, Index]:
    return parts[0].bounds(member, count)[0], parts[-1].bounds(member, count)[1]


def _sub(view: View, dim: int, start: Index, stop: Index) -> View:
    """[start, stop) of a view along a dim in which it is a box."""
    selector = view.selectors[dim]
    assert isinstance(selector, Range)
    selectors = list(view.selectors)
    selectors[dim] = Range(selector.start + start, selector.start + stop)
    return replace(view, selectors=tuple(selectors))


def _box(buffer: Buffer, dim: int, size: Index, slot: int) -> View:
    selectors = [Range(0, size) if d == dim else FULL for d in range(len(buffer.shape))]
    return View(buffer.name, tuple(selectors), slot)


def _name(op: Op, part: str) -> str:
    return f"{op.name or op.kind}_{part}"
