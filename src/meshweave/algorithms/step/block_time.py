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
from meshweave.algorithms.block.sized import BackwardPart, FlatTask, ProductPart, SizedSkeleton
from meshweave.algorithms.step.host import IssuedKind, IssuedTask
from meshweave.algorithms.step.placement import Axis, block_axes, expert_axes, machine_of
from meshweave.algorithms.step.precision import ProductDtypes
from meshweave.algorithms.step.problem import Parallelism, StepProblem
from meshweave.algorithms.step.routing import expert_ranks
from meshweave.algorithms.step.strategies import strategy_of
from meshweave.base.errors import LayoutError, UnsupportedError
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
from meshweave.ir.work import Compute, Transfer, Work

_GRADIENTS = f"_{GRADIENTS}"
_MESSAGES = ("permute", "send", "recv", "get", "put", "accumulate")
_CONTEXT_AXIS = ".depth"


@dataclass(frozen=True)
class PartTime:
    """Seconds of a piece of work: computing, and exposed communication of tensor and context parallelism.

    Attributes:
        host_s: seconds in which the chip waits for its host, where that waits for collectives (`HostPace`).
    """

    compute_s: float = 0.0
    tensor_s: float = 0.0
    context_s: float = 0.0
    host_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Return the seconds of the whole."""
        return self.compute_s + self.tensor_s + self.context_s + self.host_s

    def __add__(self, other: PartTime) -> PartTime:
        return PartTime(
            self.compute_s + other.compute_s,
            self.tensor_s + other.tensor_s,
            self.context_s + other.context_s,
            self.host_s + other.host_s,
        )

    def __sub__(self, other: PartTime) -> PartTime:
        return self + -1.0 * other

    def __rmul__(self, factor: float) -> PartTime:
        return PartTime(
            factor * self.compute_s, factor * self.tensor_s, factor * self.context_s, factor * self.host_s
        )


@dataclass(frozen=True)
class BlockTime:
    """The time of a block, and what its host issues: kernels, collectives, and messages to one rank."""

    part: PartTime
    kernels: int
    collectives: int = 0
    messages: int = 0


def forward_and_whole(
    problem: StepProblem, parallelism: Parallelism, vocabulary: int = 0, products: ProductDtypes | None = None
) -> tuple[BlockTime, BlockTime]:
    """Return the time of the forward part of a block, and of both parts, with the best config of both.

    Raises:
        LayoutError: the strategy does not fit.
    """
    whole, config = whole_time(problem, parallelism, vocabulary, products)
    known = problem.cache("forwards")
    key = layer_key(parallelism), vocabulary, products
    if key not in known:
        known[key] = _config_time(problem, parallelism, (False, vocabulary, products), config)
    return known[key], whole


def whole_time(
    problem: StepProblem, parallelism: Parallelism, vocabulary: int = 0, products: ProductDtypes | None = None
) -> tuple[BlockTime, BlockConfig]:
    """Return the time of forward and backward part of a block, and the config that is best for them.

    Raises:
        LayoutError: the strategy does not fit.
    """
    known = problem.cache("wholes")
    key = layer_key(parallelism), vocabulary, products
    if key not in known:
        entry = strategy_of(problem, parallelism)
        block = block_of(problem, parallelism, True, vocabulary)
        if (reason := entry.refusal(block)) is not None:
            raise LayoutError(f"{entry.name} {reason}")
        configs = (BlockConfig(),) if entry.max_equal_slices == 1 else entry.candidates(block)
        placed = (replace(config, overlap=problem.overlap) for config in configs)
        what = True, vocabulary, products
        timed = ((_config_time(problem, parallelism, what, config), config) for config in placed)
        known[key] = min(timed, key=lambda each: each[0].part.total_s)
    time, config = known[key]
    return time, config


def split_time(
    problem: StepProblem, parallelism: Parallelism, vocabulary: int = 0, products: ProductDtypes | None = None
) -> tuple[PartTime, PartTime] | None:
    """Return the time of the backward part of a block in two, gradient of the residual and gradients of weights.

    None where broadcasts are chains, whose tasks are not told apart. Raises as `forward_and_whole`.
    """
    if _is_estimated(problem, parallelism):
        return None
    forward, _ = forward_and_whole(problem, parallelism, vocabulary, products)
    _, config = whole_time(problem, parallelism, vocabulary, products)
    what = True, vocabulary, products
    first = _config_time(problem, parallelism, what, config, "input_grad").part
    return first - forward.part, _config_time(problem, parallelism, what, config, "weight_grad").part


def issued_parts(
    problem: StepProblem, parallelism: Parallelism
) -> tuple[list[IssuedTask], list[IssuedTask]] | None:
    """Return the tasks of the forward and of the backward part of a layer as its host issues them.

    None where broadcasts are chains, whose tasks are not told apart. Raises as `forward_and_whole`.
    """
    if _is_estimated(problem, parallelism):
        return None
    _, config = whole_time(problem, parallelism, 0, problem.products)
    forward, whole = (
        _steps(problem, parallelism, (training, 0, problem.products), config, "")
        for training in (False, True)
    )
    axes = block_axes(parallelism)
    machine, known = machine_of(problem, axes), problem.cache("transfers").setdefault(axes, {})
    return forward.issued(machine, known), whole.issued(machine, known, len(forward))


def ring_time(problem: StepProblem, parallelism: Parallelism) -> PartTime | None:
    """Return the time of ring attention in the forward part of a layer, for recomputation that repeats it alone.

    It begins with the last element-wise call before attention and ends with the first one after it. None without
    context parallelism, and where a layer is estimated as a whole and has no tasks.
    """
    if parallelism.context == 1 or _is_estimated(problem, parallelism):
        return None
    known, key = problem.cache("rings"), layer_key(parallelism)
    if key not in known:
        _, config = whole_time(problem, parallelism, 0, problem.products)
        flat = _flat(problem, parallelism, (False, 0, problem.products), config, "")
        turns = [number for number, task in enumerate(flat) if is_call(task, "attention")]
        calls = [number for number, task in enumerate(flat) if is_call(task, "elementwise")]
        first = max((number for number in calls if number < turns[0]), default=turns[0])
        last = min((number for number in calls if number > turns[-1]), default=turns[-1])
        ring = [
            task._replace(after=tuple(other - first for other in task.after if other >= first))
            for task in flat[first : last + 1]
        ]
        axes = block_axes(parallelism)
        transfers = problem.cache("transfers").setdefault(axes, {})
        priced = _PricedTasks(ring, problem.products, problem)
        known[key] = priced.time(machine_of(problem, axes), transfers, problem.stack.waits_for_tensor).part
    time: PartTime = known[key]
    return time


def is_call(task: FlatTask, work: str) -> bool:
    """Return whether a task is a call of a kind of work."""
    return isinstance(task.work, Compute) and task.work.call == work


def piece_time(
    problem: StepProblem, parallelism: Parallelism, training: bool, config: BlockConfig, piece: Piece
) -> BlockTime:
    """Return the time of a piece of a block alone, forward or (`training`) forward and backward."""
    entry = strategy_of(problem, parallelism)
    block = block_of(problem, parallelism, training, problem.model.vocab_size or 0)
    skeleton = _without_gradients(entry.skeleton(block, config, piece))
    return _estimated(
        skeleton, machine_of(problem, *axes_of(problem, parallelism)), problem.stack.waits_for_tensor
    )


def block_spans(problem: StepProblem, parallelism: Parallelism) -> tuple[TaskSpan, ...] | None:
    """Return when the tasks of `whole_time` run, or None where broadcasts are chains. Raises as that does."""
    dtype = problem.products
    _, config = whole_time(problem, parallelism, 0, dtype)
    skeleton = _skeleton(problem, parallelism, (True, 0, dtype), config)
    machine = machine_of(problem, *axes_of(problem, parallelism))
    return task_spans(skeleton, lambda work: price(work, machine).total_ps)


_What = tuple[bool, int, ProductDtypes | None]
"""Whether there is a backward part, the size of the vocabulary or 0, and the dtypes of products."""


def layer_key(parallelism: Parallelism) -> tuple[object, ...]:
    """Return what the time of a layer depends on."""
    p = parallelism
    experts = (p.expert, p.expert_tensor, expert_axes(p)) if p.expert * p.expert_tensor > 1 else ()
    return p.strategy, p.micro_batch, block_axes(p), experts


def axes_of(problem: StepProblem, parallelism: Parallelism) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
    """Return the axes of a layer's mesh, and of that of its experts where it has some."""
    return block_axes(parallelism), expert_axes(parallelism) if problem.model.layer.num_experts > 1 else ()


def block_of(
    problem: StepProblem, parallelism: Parallelism, training: bool = True, vocabulary: int = 0
) -> BlockProblem:
    """Return the block that the ranks of a layer compute."""
    shape = tuple(size for _, size, _ in block_axes(parallelism))
    work = Workload(parallelism.micro_batch, problem.sequence, problem.dtype)
    block = BlockProblem.of(problem.model, work, shape, training=training)
    return replace(block, vocabulary=vocabulary, experts=expert_ranks(problem, parallelism))


def _config_time(
    problem: StepProblem,
    parallelism: Parallelism,
    what: _What,
    config: BlockConfig,
    part: BackwardPart = "",
) -> BlockTime:
    axes = axes_of(problem, parallelism)
    if _is_estimated(problem, parallelism):
        skeleton = _skeleton(problem, parallelism, what, config)
        return _estimated(skeleton, machine_of(problem, *axes), problem.stack.waits_for_tensor)
    steps = _steps(problem, parallelism, what, config, part)
    known = problem.cache("transfers").setdefault(axes, {})
    return steps.time(machine_of(problem, *axes), known, problem.stack.waits_for_tensor)


def _is_estimated(problem: StepProblem, parallelism: Parallelism) -> bool:
    """Return whether a block has products of chains, or products that fall back to others in an uneven batch."""
    entry = strategy_of(problem, parallelism)
    if entry.max_equal_slices is None:
        return True
    return entry.max_equal_slices > 1 and parallelism.micro_batch % parallelism.tensor_mesh[0] != 0


# --- one skeleton for all sizes ---------------------------------------------------------------------------------


class _PricedTasks:
    """The tasks of a block for a number of sequences: what each waits for, and what their computing takes."""

    def __init__(self, steps: list[FlatTask], products: ProductDtypes | None, problem: StepProblem) -> None:
        lanes: dict[str, int] = {}  # the last task in each lane
        number_of: dict[int, int] = {}
        self._waits: list[tuple[int, ...]] = []
        self._durations: list[int] = []
        self._transfers: list[tuple[int, Transfer, int]] = []
        self.kernels = self.collectives = self.messages = 0
        for number, (lane, work, after, times, part) in enumerate(steps):
            if is_summed_later(lane, work):
                continue
            number_of[number] = place = len(self._waits)
            waits = [number_of[other] for other in after if other in number_of]
            waits += [lanes[lane]] if lane in lanes else []
            lanes[lane] = place
            self._waits.append(tuple(waits))
            if isinstance(work, Transfer):
                self._transfers.append((place, work, times))
                self._durations.append(0)
                if work.kind in _MESSAGES:
                    self.messages += times
                elif work.num_ranks > 1:
                    self.collectives += times
            else:
                self._durations.append(times * compute_ps(problem, adapted_compute(work, products, part)))
                self.kernels += times
        self.computing_ps = sum(self._durations)

    def time(self, machine: Machine, known: dict[Transfer, int], waits: bool) -> BlockTime:
        """Return the time on a machine; `known` keeps what transfers take there.

        Where the software waits for each transfer (`waits`), nothing of it is hidden.
        """
        durations = self._priced(machine, known)
        communication = context = 0
        for place, work, _ in self._transfers:
            communication += durations[place]
            context += durations[place] if work.axis.endswith(_CONTEXT_AXIS) else 0
        ends = [0] * len(durations)
        follow(zip(range(len(ends)), durations, self._waits, strict=True), ends)
        total = max(ends, default=0)
        exposed_s = to_s(max(total - self.computing_ps, 0))
        share = context / communication if communication else 0.0
        computing_s = to_s(total) - exposed_s
        if waits:
            exposed_s = to_s(communication)
        part = PartTime(computing_s, exposed_s * (1 - share), exposed_s * share)
        return BlockTime(part, self.kernels, self.collectives, self.messages)

    def _priced(self, machine: Machine, known: dict[Transfer, int]) -> list[int]:
        """Return what each task takes on a machine."""
        durations = self._durations.copy()
        for place, work, times in self._transfers:
            ticks = known.get(work)
            if ticks is None:
                ticks = known[work] = price(work, machine).total_ps
            durations[place] = times * ticks
        return durations

    def issued(self, machine: Machine, known: dict[Transfer, int], start: int = 0) -> list[IssuedTask]:
        """Return the tasks from a place on as a host issues them; what comes before has ended."""
        durations = self._priced(machine, known)
        transfers = {place: work for place, work, _ in self._transfers}
        out = []
        for place in range(start, len(durations)):
            work = transfers.get(place)
            kind: IssuedKind = (
                "kernel" if work is None else "transfer" if work.kind in _MESSAGES else "collective"
            )
            waits = tuple(other - start for other in self._waits[place] if other >= start)
            out.append(IssuedTask(kind, durations[place], waits))
        return out

    def __len__(self) -> int:
        return len(self._durations)


def _steps(
    problem: StepProblem, parallelism: Parallelism, what: _What, config: BlockConfig, part: BackwardPart
) -> _PricedTasks:
    known = problem.cache("steps")
    training, vocabulary, products = what
    entry = strategy_of(problem, parallelism)
    experts = expert_ranks(problem, parallelism)
    family = entry.name, parallelism.tensor_mesh, parallelism.context, training, vocabulary, experts
    key = family, products, parallelism.micro_batch, config, part
    if key not in known:
        flat = _flat(problem, parallelism, what, config, part)
        known[key] = _PricedTasks(flat, products, problem)
    made: _PricedTasks = known[key]
    return made


def _flat(
    problem: StepProblem, parallelism: Parallelism, what: _What, config: BlockConfig, part: BackwardPart
) -> list[FlatTask]:
    """Return the tasks of a block for the sequences of a micro-batch."""
    sized, (training, vocabulary, _) = problem.cache("sized"), what
    entry, experts = strategy_of(problem, parallelism), expert_ranks(problem, parallelism)
    family = entry.name, parallelism.tensor_mesh, parallelism.context, training, vocabulary, experts
    if family not in sized:
        block = block_of(problem, parallelism, training, vocabulary)
        sized[family] = entry.sized_skeleton(block, config.overlap)
    of: SizedSkeleton = sized[family]
    return of.steps(of.sequences(parallelism.micro_batch), config, part)


def compute_ps(problem: StepProblem, work: Compute) -> int:
    """Return the picoseconds of work on a chip."""
    known = problem.cache("computing")
    ticks: int | None = known.get(work)
    if ticks is None:
        ticks = known[work] = price(work, machine_of(problem, (("row", 1, 1),))).total_ps
    return ticks


def adapted_compute(work: Compute, products: ProductDtypes | None, part: ProductPart = "forward") -> Compute:
    """Return work with products in the dtype of their part, and with ring attention to half of the keys a turn."""
    if work.kind == "matmul" and products is not None:
        dtype = getattr(products, part)
        return work if dtype is None else replace(work, dtype=dtype, item_bytes=item_bytes(dtype))
    if work.call == "experts" and products is not None:
        named: dict[str, ProductPart] = {"input_grad": "dgrad", "weight_grad": "wgrad"}
        dtype = getattr(products, named.get(work.part, "forward"))
        return work if dtype is None else replace(work, dtype=dtype)
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
    counts = {"kernels": 0, "collectives": 0, "messages": 0}
    for count, task in skeleton.counted_tasks():
        if isinstance(task.work, Compute):
            counts["kernels"] += count
        elif task.work.num_ranks > 1:
            counts["messages" if task.work.kind in _MESSAGES else "collectives"] += count
    return BlockTime(PartTime(computing_s, exposed_s), **counts)


def _skeleton(problem: StepProblem, parallelism: Parallelism, what: _What, config: BlockConfig) -> Skeleton:
    """Return the skeleton that is priced of a block; it does not depend on where the ranks lie."""
    known = problem.cache("skeletons")
    entry = strategy_of(problem, parallelism)
    training, vocabulary, products = what
    block = block_of(problem, parallelism, training, vocabulary)
    key = entry.name, block, config, products
    if key not in known:
        known[key] = _adapted(_without_gradients(entry.skeleton(block, config)), products)
    skeleton: Skeleton = known[key]
    return skeleton


def is_summed_later(lane: str, work: Work) -> bool:
    """Return whether a task is a sum of gradients that a step makes once, and not in each backward part.

    Those that are scattered over the ranks of a 2D product are made in it.
    """
    return lane.endswith(_GRADIENTS) and not (isinstance(work, Transfer) and work.kind == "reduce_scatter")


def _without_gradients(skeleton: Skeleton) -> Skeleton:
    """Return a skeleton without the sums of gradients of weights that a step makes once."""
    phases = []
    for phase in skeleton.phases:
        dropped = {
            task.name
            for task in phase.tasks
            if isinstance(task, Task) and is_summed_later(task.lane, task.work)
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


def _adapted(skeleton: Skeleton, products: ProductDtypes | None) -> Skeleton:
    """Return a skeleton whose work is that of `adapted_compute`. Raises UnsupportedError for several dtypes."""
    if products is not None and len(set(products)) > 1:
        raise UnsupportedError(
            "tasks of such a layer are not told apart by what they make, and its precision is"
        )

    def changed(task: Task | Part) -> Task | Part:
        if isinstance(task, Task):
            work = task.work
            return replace(task, work=adapted_compute(work, products)) if isinstance(work, Compute) else task
        inner = task.skeleton if products is None else _adapted(task.skeleton, products)
        return replace(task, skeleton=inner)

    return Skeleton(
        tuple(replace(phase, tasks=tuple(changed(task) for task in phase.tasks)) for phase in skeleton.phases)
    )
