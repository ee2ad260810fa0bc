"""All-gather and reduce-scatter as rings of `permute`.

On a ring of P members an all-gather takes P - 1 steps: in step t member i passes on the part of member i - t. In
step t of a reduce-scatter member i sends its partial sum of part i - 1 - t and adds its own term to the one that
arrives, so that part i is complete at member i after P - 1 steps. A bidirectional ring cuts every part in two
halves that travel in opposite directions, each in a lane of its own.

The pass works on the template: parts are addressed by expressions in the member's mesh coordinate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal

from meshweave.base.errors import ProgramError
from meshweave.base.limits import RING_NUMBERS
from meshweave.ir.program import Buffer, Lane, Program, Statement
from meshweave.ir.program.expressions import Binary, Index, Select, Var, maximum, names_in, select, substitute
from meshweave.ir.program.ops import Add, AllGather, Copy, Op, Permute, ReduceScatter
from meshweave.ir.program.release import CollectiveStep
from meshweave.ir.program.renaming import fresh_name
from meshweave.ir.program.statements import bodies_of, rewrite
from meshweave.ir.program.views import FULL, Range, Selector, View
from meshweave.lower.boxes import sub_view, view_extent

BACK = "_back"
"""Suffix of the lane for the second direction."""

INBOX_SLOTS = 3
"""Slots for partial sums: one is passed on, one arrives, and the receive of the next can already be posted."""


_NUMBERS_OF_STEP = 16
"""What a step of a ring is counted as, beside the bounds of uneven parts."""


def lower_rings(
    program: Program,
    num_directions: Literal[1, 2] = 1,
    should_lower: Callable[[AllGather | ReduceScatter], bool] = lambda op: True,
) -> Program:
    """Return the program with its all-gathers and reduce-scatters over mesh axes as rings of `permute`.

    Reduce-scatters that are no sums stay as they are. Included sub-programs are lowered, too.

    Args:
        num_directions: 2 for bidirectional rings, where there are over two members and parts can be halved.
        should_lower: returns whether to lower a collective; the others stay.

    Raises:
        ProgramError: a collective has no `sizes`, and the sizes of its parts do not follow from its views; a
            view has no dim `dim`; a view that is cut selects blocks in a dim; or the rings are over
            `base.limits.RING_NUMBERS`.
    """
    program = program.with_parts(lambda part: lower_rings(part, num_directions, should_lower))
    lowering = _RingLowering(program, num_directions, should_lower)
    body = rewrite(program.body, lowering.replacement)
    lanes = program.lanes + tuple(lowering.new_lanes.values())
    kept = tuple(buffer for buffer in program.buffers if buffer.name not in lowering.dropped)
    return replace(program, body=body, lanes=lanes, buffers=kept + tuple(lowering.new_buffers.values()))


@dataclass(frozen=True)
class _DirectedPart:
    """The share of every member's part that travels in one of `num_directions` directions of the ring.

    It begins `skip` elements into the part and has `size` elements; both are expressions in the member number
    `peer`. `starts` says where each member's part begins in the gathered dim, `shift` is 1 or -1, the direction.
    """

    shift: int
    lane: str
    skip: Index
    size: Index
    starts: tuple[Index, ...]
    num_directions: int = 1

    @cached_property
    def sizes(self) -> tuple[Index, ...]:
        """Return the size of each member's share."""
        return tuple(substitute(self.size, "peer", p) for p in range(len(self.starts)))

    @cached_property
    def _begins(self) -> tuple[Index, ...]:
        return tuple(start + substitute(self.skip, "peer", p) for p, start in enumerate(self.starts))

    @cached_property
    def _ends(self) -> tuple[Index, ...]:
        return tuple(begin + size for begin, size in zip(self._begins, self.sizes, strict=True))

    @cached_property
    def _step(self) -> int | None:
        """Return what separates the shares of neighbours, where they all have one size; None elsewhere."""
        step = _stride(self._begins)
        return step if step == _stride(self._ends) else None

    @property
    def num_written(self) -> int:
        """Return how many integers and names the bounds of a view of a share have in the text of a program."""
        return 2 if self._step is not None else _numbers_in((*self._begins, *self._ends))

    def bounds(self, member: Index) -> tuple[Index, Index]:
        """Return [start, stop) of a member's share within the gathered dim."""
        if self._step is not None:
            return member * self._step + self._begins[0], member * self._step + self._ends[0]
        return select(self._begins, member), select(self._ends, member)

    def extent(self, member: Index) -> Index:
        """Return the size of a member's share."""
        return select(self.sizes, member)


def _numbers_in(indices: Iterable[Index]) -> int:
    """Return the numbers and names that indices have where they are written out; shared terms are met once."""
    known: dict[int, int] = {}

    def count(index: Index) -> int:
        if isinstance(index, Binary):
            terms: tuple[Index, ...] = (index.left, index.right)
        elif isinstance(index, Select):
            terms = (*index.entries, index.index)
        else:
            return 1
        if id(index) not in known:
            known[id(index)] = sum(map(count, terms))
        return known[id(index)]

    return sum(map(count, indices))


def _stride(values: Sequence[Index]) -> int | None:
    """Return the common difference of integers in arithmetic progression, or None."""
    if not all(isinstance(value, int) for value in values):
        return None
    gaps = {b - a for a, b in pairwise(values)}
    gap = gaps.pop() if len(gaps) == 1 else None
    return gap if isinstance(gap, int) else None


class _RingLowering:
    """The lanes and buffers that the rings of one program add, and the ops that replace its collectives."""

    def __init__(
        self, program: Program, num_directions: int, should_lower: Callable[[AllGather | ReduceScatter], bool]
    ) -> None:
        self.program, self.num_directions, self.should_lower = program, num_directions, should_lower
        self.new_lanes: dict[str, Lane] = {}
        self.new_buffers: dict[Hashable, Buffer] = {}
        self.dropped = self._buffers_only_gathered(program)
        self._pending_copy: Copy | None = None
        self._num_written = 0
        self._extents: dict[tuple[str, Selector, int], tuple[Index, int]] = {}

    def replacement(self, op: Op) -> list[Statement]:
        """Return the ops that replace `op`. A copy into a dropped buffer waits for the gather after it."""
        if isinstance(op, Copy) and op.out.buffer in self.dropped:
            self._pending_copy = op
            return []
        if isinstance(op, AllGather) and self._applies(op):
            pending, self._pending_copy = self._pending_copy, None
            return self._gather(op, pending)
        if isinstance(op, ReduceScatter) and self._applies(op):
            return self._scatter(op)
        return [op]

    def _buffers_only_gathered(self, program: Program) -> set[str]:
        """Return scratch whose only use is between a copy and the gather right after it, as its `src`.

        Such a copy can write the own part of the gathered dim directly, and the buffer is dropped.
        """
        uses = Counter(view.buffer for op in program.ops() for _, view in op.accesses())

        for body in bodies_of(program.body):
            for before, op in pairwise(body):
                is_copied = isinstance(before, Copy) and before.release is None
                if is_copied and isinstance(op, AllGather) and self._applies(op):
                    assert isinstance(before, Copy)
                    uses[before.out.buffer] -= 2 if before.out == op.src else 0
        return {
            buffer.name for buffer in program.buffers if buffer.kind == "scratch" and not uses[buffer.name]
        }

    def _applies(self, op: AllGather | ReduceScatter) -> bool:
        adds = not isinstance(op, ReduceScatter) or op.op == "sum"
        return adds and isinstance(op.over, str) and "." in op.over and self.should_lower(op)

    def _parts(self, op: AllGather | ReduceScatter, count: int) -> list[_DirectedPart]:
        for view in (op.src, op.out):
            dims = len(view.selectors)
            if not 0 <= op.dim < dims:
                said = f"{view} has {dims} dims, and no dim {op.dim}"
                raise ProgramError(said, op=op.name or op.kind, buffer=view.buffer)
        size = self._part_size(op, count)
        starts: list[Index] = [0]
        for peer in range(count - 1):
            starts.append(starts[-1] + substitute(size, "peer", peer))
        if (
            self.num_directions == 1 or count < 3 or size == 1
        ):  # on two members both directions are the same link
            return self._counted([_DirectedPart(1, op.lane, 0, size, tuple(starts))])
        half = (size + 1) // 2
        back = fresh_name(op.lane + BACK, self.program.names - {*self.program.lane_of})
        if back not in self.program.lane_of:
            self.new_lanes[back] = replace(self.program.lane_of[op.lane], name=back)
        return self._counted(
            [
                _DirectedPart(1, op.lane, 0, half, tuple(starts), 2),
                _DirectedPart(-1, back, half, size - half, tuple(starts), 2),
            ]
        )

    def _counted(self, parts: list[_DirectedPart]) -> list[_DirectedPart]:
        """Return the parts of a ring. Raises ProgramError where the rings so far are too much to write."""
        for part in parts:
            self._count(len(part.starts) * (_NUMBERS_OF_STEP + part.num_written))
        return parts

    def _count(self, numbers: int) -> None:
        self._num_written += numbers
        if self._num_written > RING_NUMBERS.most:
            raise ProgramError(f"as rings, the program {RING_NUMBERS.refusal()}; keep its collectives")

    def _part_size(self, op: AllGather | ReduceScatter, count: int) -> Index:
        """Return the size of member `peer`'s part along the dim."""
        if isinstance(op.sizes, tuple):
            return select(op.sizes, Var("peer"))
        if op.sizes is not None:
            return op.sizes
        view = op.src if isinstance(op, AllGather) else op.out
        extent = self._extent(view, op.dim)
        if not isinstance(extent, int):
            raise ProgramError(
                "needs sizes to be lowered to a ring: its parts may be uneven",
                op=op.name or op.kind,
                buffer=view.buffer,
            )
        return extent

    def _extent(self, view: View, dim: int) -> Index:
        """Return `view_extent`, looked at once for all steps of a ring: it asks every rank of the mesh."""
        key = (view.buffer, view.selectors[dim], dim)
        if key not in self._extents:
            extent = view_extent(self.program, view, dim)
            self._extents[key] = extent, _numbers_in((extent,))
        extent, numbers = self._extents[key]
        self._count(numbers)
        return extent

    # --- rings ----------------------------------------------------------------------------------------

    def _gather(self, op: AllGather, pending: Copy | None) -> list[Statement]:
        """Return the ring; `pending` is the copy of its `src` that can write the own part directly, or None."""
        count, at = self._ring(op)
        parts = self._parts(op, count)
        own = sub_view(op.out, op.dim, *_whole_part(parts, at))
        out: list[Statement] = []
        if pending is None:
            out.append(Copy(out=own, src=op.src, lane=op.lane, name=_name(op, "own")))
        else:
            out.append(replace(pending, out=own))
        for step in range(count - 1):
            for part in parts:
                sender: Index = (at - part.shift * step) % count if step else at
                sent = sub_view(op.out, op.dim, *part.bounds(sender))
                received = sub_view(op.out, op.dim, *part.bounds((at - part.shift * (step + 1)) % count))
                out.append(self._permute(op, part, step, count, received, sent))
        return out

    def _scatter(self, op: ReduceScatter) -> list[Statement]:
        count, at = self._ring(op)
        parts = self._parts(op, count)
        whole = sub_view(op.src, op.dim, *_whole_part(parts, at))
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
        received = self._box(op, inbox, part.extent(takes), step % INBOX_SLOTS)
        if step:
            sent = self._box(op, inbox, part.extent(sends), (step - 1) % INBOX_SLOTS)
        else:
            sent = sub_view(op.src, op.dim, *part.bounds(sends))
        permute = self._permute(op, part, step, count, received, sent)
        if step < count - 2:
            own_term = sub_view(op.src, op.dim, *part.bounds(takes))
            return [permute, Add(out=received, src=own_term, lane=part.lane, name=_name(op, "add"))]
        first = substitute(part.skip, "peer", at)
        last = first + substitute(part.size, "peer", at)
        target = sub_view(op.out, op.dim, first, last)
        return [permute, Add(out=target, src=received, lane=part.lane, name=_name(op, "add"))]

    def _ring(self, op: AllGather | ReduceScatter) -> tuple[int, Var]:
        assert isinstance(op.over, str)
        mesh, _, axis = op.over.partition(".")
        return self.program.mesh_of[mesh].size(axis), Var(op.over)

    def _permute(
        self,
        op: AllGather | ReduceScatter,
        part: _DirectedPart,
        step: int,
        count: int,
        received: View,
        sent: View,
    ) -> Op:
        return Permute(
            over=op.over,
            out=received,
            src=sent,
            shift=part.shift,
            step=CollectiveStep(op.kind, step, count - 1, num_directions=part.num_directions),
            lane=part.lane,
            name=_name(op, f"step{step}" + ("" if part.shift == 1 else BACK)),
        )

    def _inbox(self, op: ReduceScatter, part: _DirectedPart, count: int) -> Buffer:
        """Return the buffer for arriving partial sums: slots of the largest share, `dim` outermost in memory."""
        assert isinstance(op.over, str)
        of = self.program.buffer_of[op.src.buffer]
        shape = [
            0 if d == op.dim else extent if _is_fixed(extent) else self._whole_extent(op.src, d)
            for d, extent in enumerate(self._extent(op.src, d) for d in range(len(op.src.selectors)))
        ]
        pieces = part.sizes
        key = (op.src.buffer, part.shift, op.dim, *shape)
        known = self.new_buffers.get(key)
        if all(isinstance(piece, int) for piece in pieces):
            shape[op.dim] = max(piece for piece in pieces if isinstance(piece, int))
        else:  # depends on a loop index: as much as the whole dim is enough
            shape[op.dim] = self._whole_extent(op.src, op.dim)
        if known is not None:  # collectives of one buffer that differ in the cut dim alone share an inbox
            name, shape[op.dim] = known.name, maximum(known.shape[op.dim], shape[op.dim])
        else:
            taken = self.program.names | {lane.name for lane in self.new_lanes.values()}
            taken |= {other.name for other in self.new_buffers.values()}
            name = fresh_name(f"{op.src.buffer}_ring{'' if part.shift == 1 else BACK}", taken)
        order = (op.dim, *(d for d in range(len(shape)) if d != op.dim))
        buffer = Buffer(
            name, "scratch", of.mesh, of.dtype, shape=tuple(shape), slots=INBOX_SLOTS, order=order
        )
        self.new_buffers[key] = buffer
        return buffer

    def _whole_extent(self, view: View, dim: int) -> Index:
        return self._extent(View(view.buffer, (FULL,) * len(view.selectors)), dim)

    def _box(self, op: ReduceScatter, inbox: Buffer, size: Index, slot: int) -> View:
        """Return the first `size` elements of an inbox along the dim of the op, of other dims what the op has."""
        extents = [size if d == op.dim else self._extent(op.src, d) for d in range(len(inbox.shape))]
        selectors = (
            FULL if d != op.dim and _is_fixed(extent) else Range(0, extent)
            for d, extent in enumerate(extents)
        )
        return View(inbox.name, tuple(selectors), slot)


def _whole_part(parts: list[_DirectedPart], member: Index) -> tuple[Index, Index]:
    return parts[0].bounds(member)[0], parts[-1].bounds(member)[1]


def _is_fixed(extent: Index) -> bool:
    """Return whether an extent is the same in all iterations: one of coordinates alone."""
    return all("." in name or name == "rank" for name in names_in(extent))


def _name(op: Op, part: str) -> str:
    return f"{op.name or op.kind}_{part}"
