"""The skeleton of a block for any number of sequences: written once, with the work of each task left open.

Every task of a layer works on tokens, so that its sizes grow with the sequences that a rank has, and what waits
for what does not depend on them. A search over micro-batches so writes one skeleton for all of them. That holds
where the batch is in one chunk; included 2D products are filled in for a size and number of slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain
from typing import Literal, NamedTuple

from meshweave.algorithms.block.problem import BlockConfig, BlockProblem, Overlap
from meshweave.algorithms.block.products import product_skeleton
from meshweave.algorithms.block.roles import AxisDims, num_parts
from meshweave.algorithms.block.skeleton_writer import Pending, SkeletonWriter
from meshweave.algorithms.block.writer import Stored
from meshweave.algorithms.matmul2d import Matmul2dProblem
from meshweave.describe.layout.mesh import Mesh
from meshweave.ir.skeleton import Part, Skeleton, Task
from meshweave.ir.work import Work

ProductPart = Literal["forward", "dgrad", "wgrad"]
"""The three products of training: the result, the gradient of the operand, and that of the weight."""


class FlatTask(NamedTuple):
    """A task of rank 0, in a list of tasks.

    Attributes:
        lane: name of the queue of tasks that run one after another.
        after: positions, from 0, of the tasks in the list that it waits for, besides the one before it in its
            lane.
        times: number of equal ops, one after another in the lane, that the task stands for.
        part: which of the three products of training it belongs to: "forward", "dgrad" (gradient of the operand)
            or "wgrad" (gradient of the weight).
    """

    lane: str
    work: Work
    after: tuple[int, ...]
    times: int = 1
    part: ProductPart = "forward"


BackwardPart = Literal["", "input_grad", "weight_grad"]
"""Which part of the backward part: both, what leads to the gradient of the residual, or the rest of it."""


@dataclass(frozen=True, slots=True)
class TaskAccess:
    """The buffers that a task reads and writes, and which gradient it computes.

    Attributes:
        reads, writes: names of buffers.
        makes: "input_grad" for DX, the gradient of the residual before all layers, "weight_grad" for a weight's
            gradient, "" for any other result.
        is_backward: whether it computes any gradient.
        part: which of the three products of training it belongs to: "forward", "dgrad" or "wgrad".
    """

    reads: frozenset[str]
    writes: frozenset[str]
    makes: BackwardPart
    is_backward: bool
    part: ProductPart = "forward"

    @classmethod
    def of(cls, reads: Iterable[Stored], writes: Iterable[Stored]) -> TaskAccess:
        """Return the access of an op that reads and writes these tensors.

        A written tensor "D..." is a gradient: of activations if it has tokens, else of a weight. Buffers without a
        tensor, the scratch of 2D products, are left out of the result.
        """
        writes = tuple(writes)
        makes: BackwardPart = ""
        if any(each.tensor == "DX" for each in writes):
            makes = "input_grad"
        elif any(each.tensor.startswith("D") and not each.has_tokens for each in writes):
            makes = "weight_grad"
        read, written = (frozenset(each.buffer for each in views if each.tensor) for views in (reads, writes))
        gradients = [each for each in writes if each.tensor.startswith("D")]
        part: ProductPart = "forward"
        if gradients:
            part = "dgrad" if all(each.has_tokens for each in gradients) else "wgrad"
        return cls(read, written, makes, bool(gradients), part)


@dataclass(frozen=True, slots=True)
class SizedTask:
    """A task of a `SizedSkeleton`.

    Attributes:
        work_of: returns the task's work for a number of sequences per rank.
        after: indices of the tasks that it waits for, besides the one before it in its lane.
        times: number of equal ops, one after another in the lane, that the task stands for.
    """

    lane: str
    work_of: Callable[[int], Work]
    after: tuple[int, ...]
    times: int
    access: TaskAccess


@dataclass(frozen=True, slots=True)
class SizedProduct:
    """An included 2D product of a `SizedSkeleton`, which stands for many tasks.

    Attributes:
        name: name of the algorithm in `matmul2d`.
        problem: the product for one sequence per rank.
        after: for each lane the indices of the tasks of the skeleton that the product's first task there waits
            for.
    """

    name: str
    problem: Matmul2dProblem
    after: Mapping[str, tuple[int, ...]]
    access: TaskAccess

    def problem_of(self, sequences: int) -> Matmul2dProblem:
        """Return the product for a number of sequences per rank: its token dim grows with that number."""
        if self.problem.dataflow == "rs":
            return replace(self.problem, k=self.problem.k * sequences)
        return replace(self.problem, m=self.problem.m * sequences)


@dataclass(frozen=True)
class SizedSkeleton:
    """The tasks of rank 0 in a block, for any number of sequences per rank.

    Attributes:
        tasks: in an order in which each task comes after those that it waits for.
        batch_parts: number of parts into which the global batch is sharded.
    """

    tasks: tuple[SizedTask | SizedProduct, ...]
    batch_parts: int

    def sequences(self, batch: int) -> int:
        """Return ceil(batch / batch_parts): the most sequences that a rank has of a global batch."""
        return -(-batch // self.batch_parts)

    @cached_property
    def weight_gradient_tasks(self) -> frozenset[int]:
        """Return the indices of the backward tasks that only gradients of weights need, and not DX.

        DX is the gradient of the residual before all layers.
        """
        begin = next((at for at, task in enumerate(self.tasks) if task.access.is_backward), 0)
        numbers = self._leading_to("weight_grad") - self._leading_to("input_grad")
        return frozenset(number for number in numbers if number >= begin)

    def _leading_to(self, part: BackwardPart) -> frozenset[int]:
        needed, numbers = set[str](), set[int]()
        for number, task in reversed(list(enumerate(self.tasks))):
            if task.access.makes == part or task.access.writes & needed:
                needed |= task.access.reads
                numbers.add(number)
        return frozenset(numbers)

    def steps(self, sequences: int, config: BlockConfig, part: BackwardPart = "") -> list[FlatTask]:
        """Return the tasks for a number of sequences per rank, with the tasks of 2D products in their place.

        Args:
            sequences: sequences per rank.
            config: only its `slices` and `packets`, of 2D products, are read.
            part: "" for all tasks, "weight_grad" for those of `weight_gradient_tasks`, "input_grad" for all
                others.
        """
        steps: list[FlatTask] = []
        last: list[tuple[int, ...]] = []  # of each task of this skeleton, the steps that end it
        for number, task in enumerate(self.tasks):
            if part and (number in self.weight_gradient_tasks) != (part == "weight_grad"):
                last.append(())
                continue
            if isinstance(task, SizedTask):
                after = tuple(step for other in task.after for step in last[other])
                last.append((len(steps),))
                steps.append(
                    FlatTask(task.lane, task.work_of(sequences), after, task.times, task.access.part)
                )
                continue
            begin, ends = len(steps), {}
            product = _unrolled(task.name, task.problem_of(sequences), config.slices, config.packets)
            for lane, work, waits, times, _ in product:
                after = tuple(begin + other for other in waits)
                if lane not in ends:
                    after += tuple(step for other in task.after.get(lane, ()) for step in last[other])
                ends[lane] = len(steps)
                steps.append(FlatTask(lane, work, after, times, task.access.part))
            last.append(tuple(ends.values()))
        return steps


@lru_cache(maxsize=4096)
def _unrolled(name: str, problem: Matmul2dProblem, slices: int, packets: int) -> tuple[FlatTask, ...]:
    """Return the tasks of all turns of a product, one after another."""
    skeleton = product_skeleton(name, problem, slices, packets)
    steps: list[FlatTask] = []
    turns: list[dict[str, int]] = []
    for phase in skeleton.phases:
        for _ in range(phase.turns):
            turns.append({})
            for task in phase.tasks:
                assert isinstance(task, Task) and not task.roots
                waits = ((task_name, len(turns) - 1 - back) for task_name, back in task.after)
                after = (
                    turns[turn][task_name]
                    for task_name, turn in waits
                    if turn >= 0 and task_name in turns[turn]
                )
                turns[-1][task.name] = len(steps)
                steps.append(FlatTask(task.lane, task.work, tuple(after), task.times))
    return tuple(steps)


class SizedWriter(SkeletonWriter):
    """Writes tasks like `SkeletonWriter`, with work that is a function of the number of sequences per rank."""

    def __init__(
        self, problem: BlockProblem, mesh: Mesh, batch_dims: AxisDims, overlap: Overlap = "layers"
    ) -> None:
        self._batch_parts = num_parts(batch_dims, mesh.shape, ("batch",))
        super().__init__(
            replace(problem, batch=self._batch_parts), BlockConfig(overlap=overlap), mesh, batch_dims
        )
        self._sized: list[SizedTask | SizedProduct] = []

    def _add_task(self, op: Pending, work: Work, chunk: int) -> None:
        super()._add_task(op, work, chunk)
        after = tuple(int(name) for name, _ in self._tasks[-1].after)
        access = TaskAccess.of(op.reads, op.writes)
        self._sized.append(SizedTask(op.lane, op.work_of, after, op.times, access))

    def _add_product(self, name: str, problem: Matmul2dProblem, ops: Mapping[str, Pending]) -> None:
        self._add_part(Skeleton(()), ops)
        part = self._tasks[-1]
        assert isinstance(part, Part)
        after = {lane: tuple(map(int, names)) for lane, names in part.after}
        accesses = [(op.reads, op.writes) for op in ops.values()]
        reads, writes = (chain.from_iterable(views) for views in zip(*accesses, strict=True))
        self._sized.append(SizedProduct(name, problem, after, TaskAccess.of(reads, writes)))

    def sized(self) -> SizedSkeleton:
        """Return all tasks written so far as a `SizedSkeleton`."""
        self.cut()
        return SizedSkeleton(tuple(self._sized), self._batch_parts)
