"""Time the program of a block on the ranks of a layer, without the reductions of gradients of weights.

The tasks of most strategies are written once for all micro-batches (`BlockAlgorithm.sized_skeleton`), and their
recurrence is followed for each size (`base.recurrence`): a task begins when its lane is free and those that it
waits for have ended. Blocks that include 2D products have a skeleton for each size and number of slices.

What a chip computes costs the same wherever its ranks lie, so prices of it are kept for all layouts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshweave.algorithms.block import BlockConfig, BlockProblem
from meshweave.algorithms.block.node_writer import GRADIENTS
from meshweave.algorithms.block.pieces import Piece
from meshweave.algorithms.block.sized import BackwardPart, FlatTask, SizedSkeleton
from meshweave.algorithms.step.placement import block_axes, machine_of
from meshweave.algorithms.step.problem import Parallelism, StepProblem
from meshweave.algorithms.step.strategies import strategy_of
from meshweave.base.errors import LayoutError
from meshweave.base.recurrence import follow
from meshweave.base.units import to_s
from meshweave.cost.calls import with_counts
from meshweave.cost.machine import Machine
from meshweave.cost.price import price
from meshweave.cost.product_table import item_bytes
from meshweave.describe.model.workload import Workload
from meshweave.estimate import estimate_skeleton
from meshweave.estimate.timeline import TaskSpan, task_spans
from meshweave.ir.skeleton import Part, Phase, Skeleton, Task
from meshweave.ir.work import Compute, Transfer

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
        configs = (BlockConfig(),) if entry.max_equal_slices == 1 else entry.candidates(block)
        placed = (replace(config, overlap=problem.overlap) for config in configs)
        what = True, vocabulary, product_dtype
        timed = ((_config_time(problem, parallelism, what, config), config) for config in placed)
        known[key] = min(timed, key=lambda each: each[0].part.total_s)
    time, config = known[key]
    return time, config


def split_time(
    problem: StepProblem, parallelism: Parallelism, vocabulary: int = 0, product_dtype: str | None = None
) -> tuple[PartTime, PartTime] | None:
    """Return the time of the backward part of a block in two, gradient of the residual and gradients of weights.

    None where broadcasts are chains, whose tasks are not told apart. Raises as `forward_and_whole`.
    """
    if _is_estimated(problem, parallelism):
        return None
    forward, _ = forward_and_whole(problem, parallelism, vocabulary, product_dtype)
    _, config = whole_time(problem, parallelism, vocabulary, product_dtype)
    what = True, vocabulary, product_dtype
    first = _config_time(problem, parallelism, what, config, "input_grad").part
    return first - forward.part, _config_time(problem, parallelism, what, config, "weight_grad").part


def piece_time(
    problem: StepProblem, parallelism: Parallelism, training: bool, config: BlockConfig, piece: Piece
) -> BlockTime:
    """Return the time of a piece of a block alone, forward or (`training`) forward and backward."""
    entry = strategy_of(problem, parallelism)
    block = block_of(problem, parallelism, training, problem.model.vocab_size or 0)
    skeleton = _without_gradients(entry.skeleton(block, config, piece))
    return _estimated(skeleton, machine_of(problem, block_axes(parallelism)), problem.stack.waits_for_tensor)


def block_spans(problem: StepProblem, parallelism: Parallelism) -> tuple[TaskSpan, ...] | None:
    """Return when the tasks of `whole_time` run, or None where broadcasts are chains. Raises as that does."""
    dtype = problem.product_dtype
    _, config = whole_time(problem, parallelism, 0, dtype)
    skeleton = _skeleton(problem, parallelism, (True, 0, dtype), config)
    machine = machine_of(problem, block_axes(parallelism))
    return task_spans(skeleton, lambda work: price(work, machine).total_ps)


def layer_skeleton(problem: StepProblem, parallelism: Parallelism, *, training: bool) -> Skeleton:
    """Return the tasks of a layer as they are priced, forward or (`training`) forward and backward."""
    _, config = whole_time(problem, parallelism, 0, problem.product_dtype)
    return _skeleton(problem, parallelism, (training, 0, problem.product_dtype), config)


_What = tuple[bool, int, str | None]
"""Whether there is a backward part, the size of the vocabulary or 0, and the dtype of products."""


def _key(parallelism: Parallelism) -> tuple[object, ...]:
    return parallelism.strategy, parallelism.micro_batch, block_axes(parallelism)


def block_of(
    problem: StepProblem, parallelism: Parallelism, training: bool = True, vocabulary: int = 0
) -> BlockProblem:
    """Return the block that the ranks of a layer compute."""
    shape = tuple(size for _, size, _ in block_axes(parallelism))
    work = Workload(parallelism.micro_batch, problem.sequence, problem.dtype)
    block = BlockProblem.of(problem.model, work, shape, training=training)
    return replace(block, vocabulary=vocabulary)


def _config_time(
    problem: StepProblem,
    parallelism: Parallelism,
    what: _What,
    config: BlockConfig,
    part: BackwardPart = "",
) -> BlockTime:
    axes = block_axes(parallelism)
    if _is_estimated(problem, parallelism):
        skeleton = _skeleton(problem, parallelism, what, config)
        return _estimated(skeleton, machine_of(problem, axes), problem.stack.waits_for_tensor)
    steps = _steps(problem, parallelism, what, config, part)
    known = problem.cache("transfers").setdefault(axes, {})
    return steps.time(machine_of(problem, axes), known, problem.stack.waits_for_tensor)


def _is_estimated(problem: StepProblem, parallelism: Parallelism) -> bool:
    """Return whether a block has products of chains, or products that fall back to others in an uneven batch."""
    entry = strategy_of(problem, parallelism)
    if entry.max_equal_slices is None:
        return True
    return entry.max_equal_slices > 1 and parallelism.micro_batch % parallelism.tensor_mesh[0] != 0


# --- one skeleton for all sizes ---------------------------------------------------------------------------------


class _PricedTasks:
    """The tasks of a block for a number of sequences: what each waits for, and what their computing takes."""

    def __init__(self, steps: list[FlatTask], product_dtype: str | None, problem: StepProblem) -> None:
        lanes: dict[str, int] = {}  # the last task in each lane
        number_of: dict[int, int] = {}
        self._waits: list[tuple[int, ...]] = []
        self._durations: list[int] = []
        self._transfers: list[tuple[int, Transfer, int]] = []
        self.kernels = 0
        for number, (lane, work, after, times) in enumerate(steps):
            if lane.endswith(_DROPPED):
                continue
            number_of[number] = place = len(self._waits)
            waits = [number_of[other] for other in after if other in number_of]
            waits += [lanes[lane]] if lane in lanes else []
            lanes[lane] = place
            self._waits.append(tuple(waits))
            if isinstance(work, Transfer):
                self._transfers.append((place, work, times))
                self._durations.append(0)
            else:
                self._durations.append(times * compute_ps(problem, adapted_compute(work, product_dtype)))
                self.kernels += times
        self.computing_ps = sum(self._durations)

    def time(self, machine: Machine, known: dict[Transfer, int], waits: bool) -> BlockTime:
        """Return the time on a machine; `known` keeps what transfers take there.

        Where the software waits for each transfer (`waits`), nothing of it is hidden.
        """
        durations = self._durations.copy()
        communication = context = 0
        for place, work, times in self._transfers:
            ticks = known.get(work)
            if ticks is None:
                ticks = known[work] = price(work, machine).total_ps
            durations[place] = ticks = times * ticks
            communication += ticks
            context += ticks if work.axis.endswith(_CONTEXT_AXIS) else 0
        ends = [0] * len(durations)
        follow(zip(range(len(ends)), durations, self._waits, strict=True), ends)
        total = max(ends, default=0)
        exposed_s = to_s(max(total - self.computing_ps, 0))
        share = context / communication if communication else 0.0
        computing_s = to_s(total) - exposed_s
        if waits:
            exposed_s = to_s(communication)
        part = PartTime(computing_s, exposed_s * (1 - share), exposed_s * share)
        return BlockTime(part, self.kernels)


def _steps(
    problem: StepProblem, parallelism: Parallelism, what: _What, config: BlockConfig, part: BackwardPart
) -> _PricedTasks:
    known = problem.cache("steps")
    training, vocabulary, product_dtype = what
    entry = strategy_of(problem, parallelism)
    family = entry.name, parallelism.tensor_mesh, parallelism.context, training, vocabulary
    key = family, product_dtype, parallelism.micro_batch, config, part
    if key not in known:
        sized = problem.cache("sized")
        if family not in sized:
            block = block_of(problem, parallelism, training, vocabulary)
            sized[family] = entry.sized_skeleton(block, config.overlap)
        of: SizedSkeleton = sized[family]
        steps = of.steps(of.sequences(parallelism.micro_batch), config, part)
        known[key] = _PricedTasks(steps, product_dtype, problem)
    made: _PricedTasks = known[key]
    return made


def compute_ps(problem: StepProblem, work: Compute) -> int:
    """Return the picoseconds of work on a chip."""
    known = problem.cache("computing")
    ticks: int | None = known.get(work)
    if ticks is None:
        ticks = known[work] = price(work, machine_of(problem, (("row", 1, 1),))).total_ps
    return ticks


def adapted_compute(work: Compute, product_dtype: str | None) -> Compute:
    """Return work with products in `product_dtype`, and with ring attention to half of the keys a turn."""
    if work.kind == "matmul" and product_dtype is not None:
        return replace(work, dtype=product_dtype, item_bytes=item_bytes(product_dtype))
    if work.call == "attention" and work.shape[3] == work.shape[2] > 1:
        shape = (*work.shape[:3], work.shape[3] // 2 + 1, work.shape[4])
        return with_counts(replace(work, flops=0, shape=shape))
    return work


# --- a skeleton for each size and config ------------------------------------------------------------------------


def _estimated(skeleton: Skeleton, machine: Machine, waits: bool) -> BlockTime:
    """Return the time of a block with included products; `waits` is that of `_PricedTasks.time`."""
    time = estimate_skeleton(skeleton, machine)
    exposed_s = max(time.total_s - time.compute_s - time.copy_s, 0.0)
    computing_s = time.total_s - exposed_s
    if waits:
        exposed_s = time.communication_s
    kernels = sum(count for count, task in skeleton.counted_tasks() if isinstance(task.work, Compute))
    return BlockTime(PartTime(computing_s, exposed_s), kernels)


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
            work = task.work
            return (
                replace(task, work=adapted_compute(work, product_dtype))
                if isinstance(work, Compute)
                else task
            )
        inner = task.skeleton if product_dtype is None else _adapted(task.skeleton, product_dtype)
        return replace(task, skeleton=inner)

    return Skeleton(
        tuple(replace(phase, tasks=tuple(changed(task) for task in phase.tasks)) for phase in skeleton.phases)
    )
