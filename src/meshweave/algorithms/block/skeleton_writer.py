"""Writes the skeleton of a block: the work of rank 0, which has the largest shards, and what waits for what.

It has the tasks that `ir.skeleton.skeleton_of` reads off the program, at a small part of the time: ranking
hundreds of configs on hundreds of ranks writes no program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from meshweave.algorithms.block.problem import BlockConfig, BlockProblem
from meshweave.algorithms.block.products import product_skeleton
from meshweave.algorithms.block.roles import AxisDims, Side
from meshweave.algorithms.block.sides import largest_extent
from meshweave.algorithms.block.writer import (
    COMPUTE,
    BlockWriter,
    Kind,
    Part,
    SequenceWindow,
    Stored,
    Tensors,
    TimedWork,
    WeightTensors,
)
from meshweave.algorithms.matmul2d import Matmul2dProblem
from meshweave.base.units import dtype_bytes
from meshweave.cost.calls import call_flops
from meshweave.describe.layout.mesh import Mesh
from meshweave.ir.program.call_dims import ATTENTION_CALLS
from meshweave.ir.program.expressions import Index
from meshweave.ir.skeleton import Part as SkeletonPart
from meshweave.ir.skeleton import Phase, Skeleton, Task
from meshweave.ir.work import Compute, Transfer, Work, matmul_work, move_work

_MOST_TURNS = 32
"""Of longer rings, turns are taken together."""

Place = tuple[str, int, int]
"""A buffer, its slot, and the number of the chunk, or -1 for what has no tokens."""


@dataclass
class _Users:
    """The tasks that last wrote a place, and those that have read it since."""

    writers: list[int] = field(default_factory=list)
    readers: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Pending:
    """An op of the loop over chunks that is being written.

    Attributes:
        work_of: returns the op's work for a number of sequences per rank.
        times: number of equal ops, one after another in the lane, that it stands for.
    """

    lane: str
    work_of: Callable[[int], Work]
    reads: Tensors
    writes: Tensors
    times: int = 1


def _no_work(_: int) -> Work:
    raise AssertionError("an include has tasks of its own")


class SkeletonWriter(BlockWriter):
    """Writes a block as a skeleton: the tasks of rank 0, the lane of each, and what it waits for."""

    def __init__(self, problem: BlockProblem, config: BlockConfig, mesh: Mesh, batch_dims: AxisDims) -> None:
        super().__init__(problem, config, mesh, batch_dims)
        self._site_begin = 0
        self._site_before: frozenset[int] = frozenset()
        self._tasks: list[Task | SkeletonPart] = []
        self._times = 1
        self._users: dict[Place, _Users] = {}
        self._extents: dict[tuple[Side, AxisDims], int] = {}

    def skeleton(self) -> Skeleton:
        """Return the skeleton of all tasks written so far, one phase of one turn; end an open loop over chunks."""
        self.cut()
        return Skeleton((Phase(1, tuple(self._tasks)),))

    def _declare(self, stored: Stored, kind: Kind) -> None:
        pass

    def _declare_slots(self, stored: Stored, slots: int) -> None:
        pass

    # --- tasks --------------------------------------------------------------------------------------------------

    def _end_loop(self) -> None:
        sizes = [self.chunk] * self.num_chunks
        if self.num_chunks > 1:
            sizes[-1] = self.largest_batch - self.chunk * (self.num_chunks - 1)
        works: dict[int, list[Work]] = {}
        for number, size in enumerate(sizes):
            if size not in works:
                works[size] = [op.work_of(size) for op in self._body]
            for op, work in zip(self._body, works[size], strict=True):
                self._add_task(op, work, number)
        self._body = []

    def _add_task(self, op: Pending, work: Work, chunk: int) -> None:
        me = len(self._tasks)
        waits = self._conflicts(op, chunk)
        self._tasks.append(Task(str(me), op.lane, work, self._waits(waits, op.lane), op.times))
        self._note(op, chunk, [me])

    def end_site(self) -> None:
        """Let all later tasks wait for all tasks so far; to be called only if `is_by_sites`."""
        self.cut()
        last: dict[str, int] = {}
        for number in range(self._site_begin, len(self._tasks)):
            task = self._tasks[number]
            last[f"part {number}" if isinstance(task, SkeletonPart) else task.lane] = number
        if last:
            self._site_begin, self._site_before = len(self._tasks), frozenset(last.values())

    def _conflicts(self, op: Pending, chunk: int) -> set[int]:
        """Return the tasks whose accesses conflict with those of an op, and those of the site before."""
        after = set(self._site_before)
        for stored in op.reads:
            after.update(self._users_of(stored, chunk).writers)
        for stored in op.writes:
            users = self._users_of(stored, chunk)
            after.update(users.writers, users.readers)
        return after

    def _waits(self, after: set[int], lane: str) -> tuple[tuple[str, int], ...]:
        """Return what a task waits for; tasks of its own lane are before it anyway."""
        out = []
        for other in sorted(after):
            task = self._tasks[other]
            if isinstance(task, SkeletonPart) or task.lane != lane:
                out.append((str(other), 0))
        return tuple(out)

    def _note(self, op: Pending, chunk: int, tasks: list[int]) -> None:
        """Note that tasks are the last that access what an op reads and writes."""
        for stored in op.reads:
            self._users_of(stored, chunk).readers.extend(tasks)
        for stored in op.writes:
            users = self._users_of(stored, chunk)
            users.writers, users.readers = tasks, []

    def _add_product(self, name: str, problem: Matmul2dProblem, ops: Mapping[str, Pending]) -> None:
        """Add a product, of which the tasks of a lane read and write what the op of that lane does.

        A ring in both directions has a second lane, `row_back` or `col_back`. The first task of a lane waits for
        what the op conflicts with.
        """
        self._add_part(product_skeleton(name, problem, self.config.slices, self.config.packets), ops)

    def _add_part(self, skeleton: Skeleton, ops: Mapping[str, Pending]) -> None:
        before = {lane: self._conflicts(op, 0) for lane, op in ops.items()}
        lanes = skeleton.lanes or tuple(ops)
        after = (
            (lane, tuple(name for name, _ in self._waits(before[lane.removesuffix("_back")], lane)))
            for lane in lanes
        )
        me = len(self._tasks)
        waits = tuple((lane, names) for lane, names in after if names)
        self._tasks.append(SkeletonPart(str(me), skeleton, waits))
        for op in ops.values():
            self._note(op, 0, [me])

    def _users_of(self, stored: Stored, chunk: int) -> _Users:
        assert isinstance(stored.slot, int)
        place = (stored.buffer, stored.slot, chunk if stored.has_tokens else -1)
        users = self._users.get(place)
        if users is None:
            users = self._users[place] = _Users()
        return users

    def _do(
        self,
        lane: str,
        work_of: Callable[[int], Work],
        reads: Tensors,
        writes: Tensors,
    ) -> None:
        self._body.append(Pending(lane, work_of, reads, writes, self._times))

    # --- sizes --------------------------------------------------------------------------------------------------

    def extent(self, side: Side, dims: AxisDims) -> Index:
        """Return how many elements of a side rank 0 has in layout `dims`; of the batch, those of a full chunk."""
        if side.dim == "batch" and self.num_chunks > 1:
            return self.chunk * side.unit
        return self._largest(side, dims)

    def _extent_in(self, side: Side, window: SequenceWindow) -> int:
        """Return the most positions of any rank, since each turn takes as long as that of the slowest."""
        return self._largest(side, window.dims)

    def _largest(self, side: Side, dims: AxisDims) -> int:
        key = side, dims
        known = self._extents.get(key)
        if known is None:
            known = self._extents[key] = largest_extent(self.mesh, side, dims)
        return known

    def _elements_per_sequence(self, stored: Stored) -> int:
        """Return the elements of a buffer for each sequence of the batch; all of them where it has no tokens."""
        sizes = [self._size(stored, number) for number in range(len(stored.sides))]
        return math.prod([stored.sides[0].unit, *sizes[1:]] if stored.has_tokens else sizes)

    def _size(self, stored: Stored, number: int) -> int:
        """Return the elements of a dim of rank 0, of the batch all that it has."""
        side, window = stored.sides[number], stored.window
        if window is not None and side.dim == "sequence":
            return self._extent_in(side, window)
        return self._largest(side, stored.dims)

    # --- compute ------------------------------------------------------------------------------------------------

    def call(
        self, fn: str, outs: Tensors, ins: Tensors, work: str, shape: tuple[Index, ...], part: Part = ""
    ) -> None:
        """Add the task of a call for each chunk, priced as `work` (a key of `CALL_DIMS`) with sizes `shape`.

        `shape` is that of a full chunk. `part` is "" or the gradient that is computed, "input_grad" or
        "weight_grad".
        """
        flops = call_flops(work, part, shape)
        assert isinstance(flops, int) and all(isinstance(size, int) for size in shape)
        per_sequence, chunk = flops // max(self.chunk, 1), max(self.chunk, 1)
        first, *others = (int(size) for size in shape)  # type: ignore[arg-type]

        fixed = growing = 0
        for stored in (*ins, *outs):
            moved = self._elements_per_sequence(stored) * dtype_bytes(stored.dtype)
            fixed, growing = (fixed, growing + moved) if stored.has_tokens else (fixed + moved, growing)
        dtype = (ins if work in ATTENTION_CALLS else outs)[0].dtype

        def work_of(size: int) -> Work:
            sizes = (first * size // chunk, *others)  # the first one grows with the number of sequences
            moved = fixed + growing * size
            return Compute("call", per_sequence * size, moved, dtype=dtype, call=work, shape=sizes, part=part)

        self._do(COMPUTE, work_of, ins, outs)

    def timed(
        self, lane: str, work_of: TimedWork, outs: Tensors, ins: Tensors, beside: WeightTensors
    ) -> None:
        """Add a task that costs `work_of(tokens)`, with rank 0's tokens of `ins[0]`; `beside` is not read."""
        del beside
        per_sequence = self._elements_per_sequence(ins[0]) // self._size(ins[0], len(ins[0].sides) - 1)
        self._do(lane, lambda size: work_of(size * per_sequence), ins, outs)

    def _matmul(
        self, out: Stored, a: Stored, b: Stored, transposed: tuple[bool, bool], sums_chunks: bool
    ) -> None:
        inner = self._largest(a.sides[-1], a.dims)
        rows = self._elements_per_sequence(a) // max(inner, 1)
        columns = self._largest(b.sides[0 if transposed[1] else -1], b.dims)
        dtype = a.dtype

        def work_of(size: int) -> Work:
            if sums_chunks:
                return matmul_work(inner, columns, size * rows, dtype)
            return matmul_work(size * rows, columns, inner, dtype)

        self._do(COMPUTE, work_of, (a, b, out) if sums_chunks else (a, b), (out,))

    def _include(self, name: str, problem: Matmul2dProblem, out: Stored, a: Stored, b: Stored) -> None:
        """Add the tasks of a product. Its lanes are `COMPUTE` and one per axis, in which one matrix moves."""
        self.cut()
        scratch = Stored(
            f"{name} {problem}", "", (Side("", 1),), (), out.dtype
        )  # includes of a product share it
        row, col = self.mesh.axes[-2:]
        reads = {COMPUTE: (a, b), row: (b,), col: (a,)}
        for operand, lane in ((problem.vertical, row), (problem.horizontal, col)):
            if operand.scattered:
                reads[lane] = ()
        ops = {lane: Pending(lane, _no_work, (*ins, scratch), (out, scratch)) for lane, ins in reads.items()}
        self._add_product(name, problem, ops)

    def add(self, out: Stored, term: Stored) -> None:
        """Add the task of out += term for each chunk."""
        per_sequence = self._elements_per_sequence(out)
        self._do(COMPUTE, lambda size: move_work(size * per_sequence, out.dtype, "add"), (term, out), (out,))

    def zero(self, out: Stored) -> None:
        """Add the task that zeroes a buffer: for each chunk, or once before the loop if it has no tokens."""
        count, has_tokens = self._elements_per_sequence(out), out.has_tokens
        op = Pending(
            COMPUTE,
            lambda size: move_work(count * (size if has_tokens else 1), out.dtype, "zero"),
            (),
            (out,),
        )
        if has_tokens:
            self._body.append(op)
        else:
            self._add_task(op, op.work_of(1), 0)

    def copy(self, out: Stored, src: Stored) -> None:
        """Add the task of out = src for each chunk."""
        per_sequence = self._elements_per_sequence(out)
        self._do(COMPUTE, lambda size: move_work(size * per_sequence, out.dtype), (src,), (out,))

    def turns(self, count: int) -> Iterator[Index]:
        """Yield the number of each of `count` turns (steps of ring attention), from 0, to add its tasks.

        If there are more than 32 turns, all but the first are grouped, and one number is yielded for each group. A
        task that is added for a group counts once for each of its turns. A group waits for all of the group
        before, which changes the time little. The number of values yielded is even if `count` is, because turns
        alternate between two slots.
        """
        groups = count if count <= _MOST_TURNS else _MOST_TURNS - count % 2
        for number in range(groups):
            others, rest = divmod(count - 1, max(groups - 1, 1))
            self._times = others + (number <= rest) if number else 1
            yield number
        self._times = 1

    def pass_on(self, out: Stored, src: Stored, axis: int, lane: str = "", *, when: Index = 1) -> None:
        """Add the task of a shift round mesh axis number `axis`: `src` goes to the rank before.

        `out` comes from the rank after. `lane` ends the name of the lane. No task is added if `when`, a condition
        on the turn of `turns`, is 0.
        """
        if not when:
            return
        per_sequence, parts = self._elements_per_sequence(src), self.mesh.shape[axis]
        over, item = self._over(axis), dtype_bytes(out.dtype)
        self._do(
            self._lane(axis, lane),
            lambda size: Transfer("permute", over, parts, size * per_sequence * item),
            (src,),
            (out,),
        )

    # --- moving -------------------------------------------------------------------------------------------------

    def _transfer(
        self, kind: str, whole: Stored, part: Stored, axis: int, lane: str, ends: tuple[Stored, Stored]
    ) -> None:
        """Add a collective whose largest part is what `part` has of the buffer `whole`."""
        parts = self.mesh.shape[axis]
        sizes = [
            self._largest(side, part.dims if side.dim == part.dims[axis] else whole.dims)
            for side in whole.sides
        ]
        sizes = [whole.sides[0].unit, *sizes[1:]] if whole.has_tokens else sizes
        each = math.prod(sizes) * dtype_bytes(whole.dtype)
        over, has_tokens = self._over(axis), whole.has_tokens
        src, out = ends
        self._do(
            lane,
            lambda size: Transfer(kind, over, parts, each * size if has_tokens else each),
            (src,),
            (out,),
        )

    def _all_reduce(self, stored: Stored, axis: int, lane: str, op: str = "sum") -> None:
        self._transfer("all_reduce", stored, stored, axis, lane, (stored, stored))

    def _reduce_scatter(
        self, out: Stored, src: Stored, axis: int, dim: int, lane: str, op: str = "sum"
    ) -> None:
        self._transfer("reduce_scatter", src, out, axis, lane, (src, out))

    def _all_gather(self, out: Stored, src: Stored, axis: int, dim: int, lane: str) -> None:
        self._transfer("all_gather", out, src, axis, lane, (src, out))

    def _all_to_all(self, out: Stored, src: Stored, axis: int, dims: tuple[int, int], lane: str) -> None:
        self._transfer("all_to_all", src, out, axis, lane, (src, out))

    def _take(self, out: Stored, src: Stored, axis: int, dim: int) -> None:
        self.copy(out, src)
