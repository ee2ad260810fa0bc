"""The skeleton of a block for any number of sequences: written once, with the work of each task left open.

Every task of a layer works on tokens, so that its sizes grow with the sequences that a rank has, and what waits
for what does not depend on them. A search over micro-batches so writes one skeleton for all of them. That holds
where the batch is in one chunk and no product is an include of `matmul2d`, whose slices depend on sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from meshweave.algorithms.block.problem import BlockConfig, BlockProblem
from meshweave.algorithms.block.roles import AxisDims
from meshweave.algorithms.block.skeleton_writer import Pending, SkeletonWriter
from meshweave.describe.layout.mesh import Mesh
from meshweave.ir.work import Work


@dataclass(frozen=True, slots=True)
class SizedTask:
    """A task of a `SizedSkeleton`.

    Attributes:
        work_of: returns its work for a number of sequences on a rank.
        after: the numbers of the tasks in other lanes that it waits for.
        times: as of `ir.skeleton.Task`.
    """

    lane: str
    work_of: Callable[[int], Work]
    after: tuple[int, ...]
    times: int


@dataclass(frozen=True, slots=True)
class SizedSkeleton:
    """The tasks of rank 0, in an order in which each comes after those that it waits for.

    Attributes:
        batch_parts: the ranks over which the batch lies.
    """

    tasks: tuple[SizedTask, ...]
    batch_parts: int

    def sequences(self, batch: int) -> int:
        """Return the most sequences that a rank has of a batch."""
        return -(-batch // self.batch_parts)


class SizedWriter(SkeletonWriter):
    """Writes tasks as `SkeletonWriter` does for one sequence a rank, and keeps what gives their work."""

    def __init__(self, problem: BlockProblem, mesh: Mesh, batch_dims: AxisDims) -> None:
        sizes = zip(batch_dims, mesh.shape, strict=True)
        self._batch_parts = math.prod(size for dim, size in sizes if dim == "batch")
        super().__init__(replace(problem, batch=self._batch_parts), BlockConfig(), mesh, batch_dims)
        self._sized: list[SizedTask] = []

    def _add_task(self, op: Pending, work: Work, chunk: int) -> None:
        super()._add_task(op, work, chunk)
        after = tuple(int(name) for name, _ in self._tasks[-1].after)
        self._sized.append(SizedTask(op.lane, op.work_of, after, op.times))

    def sized(self) -> SizedSkeleton:
        """Return all tasks."""
        self.cut()
        return SizedSkeleton(tuple(self._sized), self._batch_parts)
