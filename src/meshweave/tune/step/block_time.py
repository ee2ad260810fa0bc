"""Time the program of a block on the ranks of a layer, without the reductions of gradients of weights.

The tasks of most strategies are written once for all micro-batches (`BlockAlgorithm.sized_skeleton`), and the
recurrence of `estimate.skeletons` is followed for each size: a task begins when its lane is free and those that
it waits for have ended. Blocks that include 2D products have a skeleton for each size and number of slices.

What a chip computes costs the same wherever its ranks lie, so prices of it are kept for all layouts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshweave.algorithms.block import BlockConfig, BlockProblem
from meshweave.algorithms.block.layer import GRADIENTS
from meshweave.algorithms.block.sized import SizedSkeleton
from meshweave.algorithms.block.two_d import IncludedProducts
from meshweave.base.errors import LayoutError
from meshweave.base.units import to_s
from meshweave.cost.calls import with_counts
from meshweave.cost.price import price
from meshweave.cost.product_table import item_bytes
from meshweave.describe.model.workload import Workload
from meshweave.estimate import estimate_skeleton
from meshweave.ir.skeleton import Part, Phase, Skeleton, Task
from meshweave.ir.work import Compute, Transfer, Work
from meshweave.tune.step.placement import Axis, block_axes, machine_of
from meshweave.tune.step.problem import Parallelism, StepProblem
from meshweave.tune.step.strategies import strategy_of

_DROPPED = f"_{GRADIENTS}"
_CONTEXT_AXIS = ".depth"


@dataclass(frozen=True)
class PartTime:
    """Seconds of a piece of work: computing, and exposed communication of tensor and context parallelism."""

    compute_s: float = 0.0
    tensor_s: float = 0.0
    context_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Return the seconds of the whole."""
        return self.compute_s + self.tensor_s + self.context_s

    def __add__(self, other: PartTime) -> PartTime:
        return PartTime(
            self.compute_s + other.compute_s,
            self.tensor_s + other.tensor_s,
            self.context_s + other.context_s,
        )

    def __sub__(self, other: PartTime) -> PartTime:
        return self + -1.0 * other

    def __rmul__(self, factor: float) -> PartTime:
        return PartTime(factor * self.compute_s, factor * self.tensor_s, factor * self.context_s)


@dataclass(frozen=True)
class BlockTime:
    """The time of a block, and the number of its kernels."""

    part: PartTime
    kernels: int


def forward_and_whole(
    problem: StepProblem, parallelism: Parallelism, vocabulary: int = 0, product_dtype: str | None = None
) -> tuple[BlockTime, BlockTime]:
    """Return the time of the forward part of a block, and of both parts, with the best config of both.

    Raises:
        LayoutError: the strategy does not fit.
    """
    whole, config = whole_time(problem, parallelism, vocabulary, product_dtype)
    known = problem.cache("forwards")
    key = _key(parallelism), vocabulary, product_dtype
    if key not in known:
        known[key] = _config_time(problem, parallelism, (False, vocabulary, product_dtype), config)
    return known[key], whole


def whole_time(
    problem: StepProblem, parallelism: Parallelism, vocabulary: int = 0, product_dtype: str | None = None
) -> tuple[BlockTime, BlockConfig]:
    """Return the time of forward and backward part of a block, and the config that is best for them.

    Raises:
        LayoutError: the strategy does not fit.
    """
    known = problem.cache("wholes")
    key = _key(parallelism), vocabulary, product_dtype
    if key not in known:
        entry = strategy_of(problem, parallelism)
        block = block_of(problem, parallelism, True, vocabulary)
        if (reason := entry.refusal(block)) is not None:
            raise LayoutError(f"{entry.name} {reason}")
        includes = isinstance(entry, IncludedProducts)
        configs = entry.candidates(block) if includes else (BlockConfig(),)
        what = True, vocabulary, product_dtype
        timed = ((_config_time(problem, parallelism, what, config), config) for config in configs)
        known[key] = min(timed, key=lambda each: each[0].part.total_s)
    time, config = known[key]
    return time, config


_What = tuple[bool, int, str | None]
"""Whether there is a backward part, the size of the vocabulary or 0, and the dtype of products."""


def _key(parallelism: Parallelism) -> tuple[object, ...]:
    return parallelism.strategy, parallelism.micro_batch, block_axes(parallelism)


def block_of(
    problem: StepProblem, parallelism: Parallelism, training: bool = True, vocabulary: int = 0
) -> BlockProblem:
    """Return the block that the ranks of a layer compute."""
    shape = tuple(size for _, size, _ in block_axes(parallelism))
    work = Workload(parallelism.micro_batch, problem.seq, problem.dtype)
    block = BlockProblem.of(problem.model, work, shape, training=training)
    return replace(block, vocabulary=vocabulary)


def _config_time(
    problem: StepProblem, parallelism: Parallelism, what: _What, config: BlockConfig
) -> BlockTime:
    if isinstance(strategy_of(problem, parallelism), IncludedProducts):
        return _estimated(problem, parallelism, what, config)
    tasks = _tasks(problem, parallelism, what)
    return tasks.time(problem, block_axes(parallelism), tasks.sized.sequences(parallelism.micro_batch))


# --- one skeleton for all sizes ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _SizedWork:
    """The work of all tasks for a number of sequences.

    Attributes:
        durations_ps: of tasks that compute; 0 for those that communicate.
        transfers: the numbers of those that communicate, with their work.
    """

    durations_ps: list[int]
    transfers: list[tuple[int, Transfer]]


class _Tasks:
    """The tasks of a block without reductions of gradients of weights, with numbers for lanes."""

    def __init__(self, sized: SizedSkeleton, product_dtype: str | None) -> None:
        self.sized, self._product_dtype = sized, product_dtype
        lanes: dict[str, int] = {}
        number_of: dict[int, int] = {}
        self._kept = [
            (number, task) for number, task in enumerate(sized.tasks) if not task.lane.endswith(_DROPPED)
        ]
        self._steps: list[tuple[int, tuple[int, ...]]] = []
        for number, task in self._kept:
            waits = tuple(number_of[other] for other in task.after if other in number_of)
            number_of[number] = len(self._steps)
            self._steps.append((lanes.setdefault(task.lane, len(lanes)), waits))
        self._num_lanes = len(lanes)
        self._sizes: dict[int, _SizedWork] = {}
        self._kernels = 0

    def _work(self, problem: StepProblem, sequences: int) -> _SizedWork:
        if sequences not in self._sizes:
            durations, transfers = [0] * len(self._kept), []
            self._kernels = 0
            for place, (_, task) in enumerate(self._kept):
                work = adapted_work(task.work_of(sequences), self._product_dtype)
                if isinstance(work, Transfer):
                    transfers.append((place, work))
                else:
                    durations[place] = task.times * compute_ps(problem, work)
                    self._kernels += task.times
            self._sizes[sequences] = _SizedWork(durations, transfers)
        return self._sizes[sequences]

    def time(self, problem: StepProblem, axes: tuple[Axis, ...], sequences: int) -> BlockTime:
        """Return the time where each rank has so many sequences."""
        work = self._work(problem, sequences)
        durations = work.durations_ps.copy()
        prices = problem.cache("transfers").setdefault(axes, {})
        machine = machine_of(problem, axes)
        communication = context = 0
        for place, transfer in work.transfers:
            each = prices.get(transfer)
            if each is None:
                each = prices[transfer] = price(transfer, machine).total_ps
            durations[place] = each = each * self._kept[place][1].times
            communication += each
            context += each if transfer.axis.endswith(_CONTEXT_AXIS) else 0
        lanes, ends = [0] * self._num_lanes, []
        for (lane, waits), duration in zip(self._steps, durations, strict=True):
            begin = lanes[lane]
            for other in waits:
                if ends[other] > begin:
                    begin = ends[other]
            lanes[lane] = begin + duration
            ends.append(begin + duration)
        computing = sum(durations) - communication
        part = _part_time(max(lanes, default=0), computing, communication, context)
        return BlockTime(part, self._kernels)


def _tasks(problem: StepProblem, parallelism: Parallelism, what: _What) -> _Tasks:
    known = problem.cache("tasks")
    training, vocabulary, product_dtype = what
    entry = strategy_of(problem, parallelism)
    key = entry.name, parallelism.tensor_mesh, parallelism.context, what
    if key not in known:
        block = block_of(problem, parallelism, training, vocabulary)
        known[key] = _Tasks(entry.sized_skeleton(block), product_dtype)
    tasks: _Tasks = known[key]
    return tasks


def compute_ps(problem: StepProblem, work: Compute) -> int:
    """Return the picoseconds of work on a chip."""
    known = problem.cache("computing")
    ticks: int | None = known.get(work)
    if ticks is None:
        ticks = known[work] = price(work, machine_of(problem, (("row", 1, 1),))).total_ps
    return ticks


def _part_time(total: int, computing: int, communication: int, context: int) -> PartTime:
    """Return the parts of a time, given in picoseconds with sums over tasks that compute and communicate."""
    exposed_s = to_s(max(total - computing, 0))
    share = context / communication if communication else 0.0
    return PartTime(to_s(total) - exposed_s, exposed_s * (1 - share), exposed_s * share)


def adapted_work(work: Work, product_dtype: str | None) -> Work:
    """Return work with products in `product_dtype`, and with ring attention to half of the keys a turn."""
    if not isinstance(work, Compute):
        return work
    if work.kind == "matmul" and product_dtype is not None:
        return replace(work, dtype=product_dtype, item_bytes=item_bytes(product_dtype))
    if work.call == "attention" and work.shape[3] == work.shape[2] > 1:
        shape = (*work.shape[:3], work.shape[3] // 2 + 1, work.shape[4])
        return with_counts(replace(work, flops=0, shape=shape))
    return work


# --- a skeleton for each size and config ------------------------------------------------------------------------


def _estimated(problem: StepProblem, parallelism: Parallelism, what: _What, config: BlockConfig) -> BlockTime:
    """Return the time of a block with included products."""
    skeleton = _skeleton(problem, parallelism, what, config)
    time = estimate_skeleton(skeleton, machine_of(problem, block_axes(parallelism)))
    exposed_s = max(time.total_s - time.compute_s - time.copy_s, 0.0)
    kernels = sum(count for count, task in skeleton.counted_tasks() if isinstance(task.work, Compute))
    return BlockTime(PartTime(time.total_s - exposed_s, exposed_s), kernels)


def _skeleton(problem: StepProblem, parallelism: Parallelism, what: _What, config: BlockConfig) -> Skeleton:
    """Return the skeleton that is priced of a block; it does not depend on where the ranks lie."""
    known = problem.cache("skeletons")
    entry = strategy_of(problem, parallelism)
    training, vocabulary, product_dtype = what
    block = block_of(problem, parallelism, training, vocabulary)
    key = entry.name, block, config, product_dtype
    if key not in known:
        known[key] = _adapted(_without_gradients(entry.skeleton(block, config)), product_dtype)
    skeleton: Skeleton = known[key]
    return skeleton


def _without_gradients(skeleton: Skeleton) -> Skeleton:
    """Return a skeleton without the tasks in the lanes of reductions of gradients of weights."""
    phases = []
    for phase in skeleton.phases:
        dropped = {
            task.name
            for task in phase.tasks
            if isinstance(task, Task) and task.lane.endswith(f"_{GRADIENTS}")
        }
        tasks: list[Task | Part] = []
        for task in phase.tasks:
            if task.name in dropped:
                continue
            if isinstance(task, Task):
                after = tuple(wait for wait in task.after if wait[0] not in dropped)
                task = replace(task, after=after)
            else:
                waits = ((lane, tuple(x for x in names if x not in dropped)) for lane, names in task.after)
                task = replace(task, after=tuple((lane, names) for lane, names in waits if names))
            tasks.append(task)
        phases.append(Phase(phase.turns, tuple(tasks)))
    return Skeleton(tuple(phases))


def _adapted(skeleton: Skeleton, product_dtype: str | None) -> Skeleton:
    """Return a skeleton whose work is that of `adapted_work`."""

    def changed(task: Task | Part) -> Task | Part:
        if isinstance(task, Task):
            return replace(task, work=adapted_work(task.work, product_dtype))
        inner = task.skeleton if product_dtype is None else _adapted(task.skeleton, product_dtype)
        return replace(task, skeleton=inner)

    return Skeleton(
        tuple(replace(phase, tasks=tuple(changed(task) for task in phase.tasks)) for phase in skeleton.phases)
    )
