"""Writes the skeleton of a block: the work of rank 0, which has the largest shards, and what waits for what.

It has the tasks that `ir.skeleton.skeleton_of` reads off the program, at a small part of the time: ranking
hundreds of configs on hundreds of ranks writes no program.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from meshweave.algorithms.block.problem import BlockConfig, BlockProblem
from meshweave.algorithms.block.roles import Dims, Side
from meshweave.algorithms.block.sides import largest_extent
from meshweave.algorithms.block.writer import COMPUTE, BlockWriter, Kind, Part, Stored
from meshweave.base.units import dtype_bytes
from meshweave.cost.calls import call_flops
from meshweave.describe.layout.mesh import Mesh
from meshweave.ir.program.expressions import Index
from meshweave.ir.skeleton import Phase, Skeleton, Task
from meshweave.ir.work import Compute, Transfer, Work, matmul_work, move_work

Place = tuple[str, int, int]
"""A buffer, its slot, and the number of the chunk, or -1 for what has no tokens."""


@dataclass
class _Users:
    """The task that last wrote a place, and those that have read it since."""

    writer: int = -1
    readers: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class _Pending:
    """An op of the loop that is being written. `work_of` gives its work for a number of sequences."""

    lane: str
    work_of: Callable[[int], Work]
    reads: tuple[Stored, ...]
    writes: tuple[Stored, ...]


class SkeletonWriter(BlockWriter):
    """The tasks of rank 0, as they are written."""

    def __init__(self, problem: BlockProblem, config: BlockConfig, mesh: Mesh, batch_dims: Dims) -> None:
        super().__init__(problem, config, mesh, batch_dims)
        self._tasks: list[Task] = []
        self._body: list[_Pending] = []
        self._users: dict[Place, _Users] = {}
        self._extents: dict[tuple[Side, Dims], int] = {}

    def skeleton(self) -> Skeleton:
        """Return all tasks as one turn."""
        self.cut()
        return Skeleton((Phase(1, tuple(self._tasks)),))

    def _declare(self, stored: Stored, kind: Kind) -> None:
        pass

    def _declare_slots(self, stored: Stored, slots: int) -> None:
        pass

    # --- tasks --------------------------------------------------------------------------------------------------

    @property
    def is_between_loops(self) -> bool:
        return not self._body

    def cut(self) -> None:
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

    def _add_task(self, op: _Pending, work: Work, chunk: int) -> None:
        me = len(self._tasks)
        after: set[int] = set()
        for stored in op.reads:
            users = self._users_of(stored, chunk)
            after.add(users.writer)
            users.readers.append(me)
        for stored in op.writes:
            users = self._users_of(stored, chunk)
            after.add(users.writer)
            after.update(users.readers)
            users.writer, users.readers = me, []
        waits = tuple(
            (str(other), 0) for other in sorted(after - {-1, me}) if self._tasks[other].lane != op.lane
        )
        self._tasks.append(Task(str(me), op.lane, work, waits))

    def _users_of(self, stored: Stored, chunk: int) -> _Users:
        place = (stored.buffer, stored.slot, chunk if stored.has_tokens else -1)
        users = self._users.get(place)
        if users is None:
            users = self._users[place] = _Users()
        return users

    def _do(
        self,
        lane: str,
        work_of: Callable[[int], Work],
        reads: tuple[Stored, ...],
        writes: tuple[Stored, ...],
    ) -> None:
        self._body.append(_Pending(lane, work_of, reads, writes))

    def gather_once(self, kept: Stored, into: Stored | None, dims: Dims, lane: str) -> Stored:
        body, self._body = self._body, []
        out = self.move_once(kept, dims, lane, into)
        self._body = body
        return out

    # --- sizes --------------------------------------------------------------------------------------------------

    def extent(self, side: Side, dims: Dims) -> Index:
        return self.chunk if side.dim == "batch" and self.num_chunks > 1 else self._largest(side, dims)

    def _largest(self, side: Side, dims: Dims) -> int:
        key = side, dims
        known = self._extents.get(key)
        if known is None:
            known = self._extents[key] = largest_extent(self.mesh, side, dims)
        return known

    def _elements_per_sequence(self, stored: Stored) -> int:
        """Return the elements of a buffer for each sequence of the batch; all of them where it has no tokens."""
        sides = stored.sides[1:] if stored.has_tokens else stored.sides
        return math.prod(self._largest(side, stored.dims) for side in sides)

    def _bytes(self, stored: Stored, size: int) -> int:
        count = self._elements_per_sequence(stored) * (size if stored.has_tokens else 1)
        return count * dtype_bytes(stored.dtype)

    # --- compute ------------------------------------------------------------------------------------------------

    def call(
        self,
        fn: str,
        outs: tuple[Stored, ...],
        ins: tuple[Stored, ...],
        work: str,
        shape: tuple[Index, ...],
        part: Part = "",
    ) -> None:
        flops = call_flops(work, part, shape)
        assert isinstance(flops, int)
        per_sequence = flops // max(self.chunk, 1)

        def work_of(size: int) -> Work:
            moved = sum(self._bytes(stored, size) for stored in (*ins, *outs))
            return Compute("call", per_sequence * size, moved, dtype=outs[0].dtype, call=work, part=part)

        self._do(COMPUTE, work_of, ins, outs)

    def matmul(
        self,
        out: Stored,
        a: Stored,
        b: Stored,
        *,
        transpose_a: bool = False,
        transpose_b: bool = False,
        sums_chunks: bool = False,
    ) -> None:
        *_, rows, inner = (self._largest(side, a.dims) for side in a.sides)
        columns = self._largest(b.sides[0 if transpose_b else -1], b.dims)
        dtype = a.dtype

        def work_of(size: int) -> Work:
            if sums_chunks:
                return matmul_work(inner, columns, size * rows, dtype)
            return matmul_work(size * rows, columns, inner, dtype)

        self._do(COMPUTE, work_of, (a, b, out) if sums_chunks else (a, b), (out,))

    def add(self, out: Stored, term: Stored) -> None:
        per_sequence = self._elements_per_sequence(out)
        self._do(COMPUTE, lambda size: move_work(size * per_sequence, out.dtype, "add"), (term, out), (out,))

    def zero(self, out: Stored) -> None:
        op = _Pending(
            COMPUTE, lambda _: move_work(self._elements_per_sequence(out), out.dtype, "zero"), (), (out,)
        )
        self._add_task(op, op.work_of(0), 0)

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
        each = math.prod(sizes[1:] if whole.has_tokens else sizes) * dtype_bytes(whole.dtype)
        over, has_tokens = self._over(axis), whole.has_tokens
        src, out = ends
        self._do(
            lane,
            lambda size: Transfer(kind, over, parts, each * size if has_tokens else each),
            (src,),
            (out,),
        )

    def _all_reduce(self, stored: Stored, axis: int, lane: str) -> None:
        self._transfer("all_reduce", stored, stored, axis, lane, (stored, stored))

    def _reduce_scatter(self, out: Stored, src: Stored, axis: int, dim: int, lane: str) -> None:
        self._transfer("reduce_scatter", src, out, axis, lane, (src, out))

    def _all_gather(self, out: Stored, src: Stored, axis: int, dim: int, lane: str) -> None:
        self._transfer("all_gather", out, src, axis, lane, (src, out))

    def _all_to_all(self, out: Stored, src: Stored, axis: int, dims: tuple[int, int], lane: str) -> None:
        self._transfer("all_to_all", src, out, axis, lane, (src, out))

    def _take(self, out: Stored, src: Stored, axis: int, dim: int) -> None:
        per_sequence = self._elements_per_sequence(out)
        self._do(COMPUTE, lambda size: move_work(size * per_sequence, out.dtype), (src,), (out,))
