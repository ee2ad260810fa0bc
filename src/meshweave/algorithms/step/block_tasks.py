"""Price the tasks of a block: one by one (`PricedTasks`), or as a skeleton with 2D products inside (`estimated`).

A task begins when its lane is free and those that it waits for have ended (`base.recurrence`). What a chip
computes costs the same wherever its ranks lie, so prices of it are kept for all layouts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from meshweave.algorithms.block.node_writer import GRADIENTS
from meshweave.algorithms.block.sized import FlatTask, ProductPart
from meshweave.algorithms.step.host import IssuedKind, IssuedTask
from meshweave.algorithms.step.placement import machine_of
from meshweave.algorithms.step.precision import ProductDtypes
from meshweave.algorithms.step.problem import StepProblem
from meshweave.base.errors import UnsupportedError
from meshweave.base.recurrence import follow
from meshweave.base.units import to_s
from meshweave.cost.calls import with_counts
from meshweave.cost.machine import Machine
from meshweave.cost.price import price
from meshweave.cost.product_table import item_bytes
from meshweave.estimate import estimate_skeleton
from meshweave.ir.skeleton import Part, Phase, Skeleton, Task
from meshweave.ir.work import Compute, CopyExchange, Transfer, Work

_GRADIENTS = f"_{GRADIENTS}"
_MESSAGES = ("permute", "send", "recv", "get", "put", "accumulate")
_CONTEXT_AXIS = ".depth"


@dataclass(frozen=True)
class PartTime:
    """Seconds of a piece of work, in four parts that add up.

    Attributes:
        compute_s: computing.
        tensor_s, context_s: exposed communication of tensor-parallel and of context-parallel ranks.
        host_s: seconds in which the chip waits for a host that itself waits for collectives (`stalls_s`).
    """

    compute_s: float = 0.0
    tensor_s: float = 0.0
    context_s: float = 0.0
    host_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Return the sum of the four parts in seconds."""
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
    """The time of a block for one micro-batch, and what its host issues for it.

    Attributes:
        part: its seconds.
        kernels, collectives: how many of these the host issues.
        messages: how many point-to-point transfers it issues.
        exchange_s: seconds in which tokens travel to experts and back, hidden or not; 0 by `estimated`.
    """

    part: PartTime
    kernels: int
    collectives: int = 0
    messages: int = 0
    exchange_s: float = 0.0


class PricedTasks:
    """The tasks of a block for a number of sequences: what each waits for, and what their computing takes.

    Args:
        steps: the tasks in order of issue. Reductions of weight gradients are left out (`is_summed_later`).
        products: the dtypes by which the three products of training are priced; None for the problem's dtype.
        problem: whose chip prices the computing.

    Attributes:
        kernels, collectives, messages: how many kernels, collectives and point-to-point transfers these are.
        computing_ps: picoseconds of all computing together.
    """

    def __init__(self, steps: list[FlatTask], products: ProductDtypes | None, problem: StepProblem) -> None:
        lanes: dict[str, int] = {}  # the last task in each lane
        number_of: dict[int, int] = {}
        self._waits: list[tuple[int, ...]] = []
        self._durations: list[int] = []
        self._transfers: list[tuple[int, Transfer, int]] = []
        self._products: set[int] = set()
        self._hides = problem.hides_tensor
        gathered: dict[tuple[object, ...], int] = {}  # by what is gathered: where it is, if it is kept
        self.kernels = self.collectives = self.messages = 0
        for number, (lane, work, after, times, part) in enumerate(steps):
            if is_summed_later(lane, work):
                continue
            if (
                problem.stack.keeps_gathered
                and isinstance(work, Transfer)
                and work.kind == "all_gather"
                and after
            ):
                of = work, *(number_of[other] for other in after if other in number_of)
                number_of[number] = gathered.setdefault(of, len(self._waits))
                if number_of[number] < len(self._waits):
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
                self._durations.append(times * compute_ps(problem, priced_work(work, products, part)))
                self._products |= {place} if work.kind == "matmul" else set()
                self.kernels += times
        self.computing_ps = sum(self._durations)

    def time(self, machine: Machine, known: dict[Transfer, int], waits: bool) -> BlockTime:
        """Return the time of all tasks, run once on `machine`, without waits for the host.

        Args:
            known: a cache of the picoseconds of each transfer on this machine, which grows.
            waits: whether the software waits for each transfer, so that all communication is exposed.
        """
        durations = self._priced(machine, known)
        communication = context = exchanges = 0
        for place, work, _ in self._transfers:
            communication += durations[place]
            exchanges += durations[place] if isinstance(work, CopyExchange) else 0
            context += durations[place] if work.axis.endswith(_CONTEXT_AXIS) else 0
        total = self._makespan(durations)
        exposed_s = to_s(max(total - self.computing_ps, 0))
        share = context / communication if communication else 0.0
        computing_s = to_s(total) - exposed_s
        if waits:
            exposed_s = to_s(communication)
        part = PartTime(computing_s, exposed_s * (1 - share), exposed_s * share)
        return BlockTime(part, self.kernels, self.collectives, self.messages, to_s(exchanges))

    def _makespan(self, durations: list[int]) -> int:
        """Return the picoseconds in which tasks of these durations end."""
        ends = [0] * len(durations)
        alone = self._outside_products(durations) if self._hides else durations
        follow(zip(range(len(ends)), alone, self._waits, strict=True), ends)
        return max(ends, default=0)

    @property
    def axes(self) -> set[str]:
        """Return the mesh axes ("mesh.axis") along which several ranks communicate."""
        return {work.axis for _, work, _ in self._transfers if work.num_ranks > 1}

    def delays_ps(
        self,
        machine: Machine,
        known: dict[Transfer, int],
        waits: bool,
        shared: Callable[[Transfer], tuple[int, int]],
    ) -> tuple[int, int]:
        """Return how long tasks and other traffic delay each other on shared links, in picoseconds.

        Args:
            machine, known, waits: as of `time`.
            shared: returns the two picoseconds below for one transfer of the tasks.

        Returns:
            (picoseconds that all tasks together take longer, picoseconds by which the other traffic falls behind).
        """
        durations = self._priced(machine, known)
        slowed, lost = durations.copy(), 0
        for place, work, times in self._transfers:
            more, less = shared(work)
            slowed[place] += times * more
            lost += times * less
        if waits:
            return sum(slowed) - sum(durations), lost
        return self._makespan(slowed) - self._makespan(durations) if slowed != durations else 0, lost

    def _outside_products(self, durations: list[int]) -> list[int]:
        """Return what tasks take where the transfers of a product's parts run beside the other parts of it.

        Of n ranks each has one part: of a gathered operand it multiplies its own first, and its own of a scattered
        result last. So n - 1 of n parts of the product run while the n - 1 transfers do.
        """
        alone = durations.copy()
        after = {
            other: place
            for place in reversed(range(len(alone)))
            for other in self._waits[place]
            if place in self._products
        }
        before = {
            place: other
            for place, waits in enumerate(self._waits)
            for other in waits
            if other in self._products
        }
        for place, work, _ in self._transfers:
            of = {"all_gather": after, "reduce_scatter": before}.get(work.kind, {})
            if place in of and not work.axis.endswith(_CONTEXT_AXIS):
                hidden = durations[of[place]] * (work.num_ranks - 1) // work.num_ranks
                alone[place] = max(durations[place] - hidden, 0)
        return alone

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
        """Return the tasks from number `start` on, in the order in which a host issues them.

        Their `waits` are numbered from 0 for task `start`; tasks before it are taken to have ended. `known` is a
        cache of the picoseconds of transfers on `machine`, which grows.
        """
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


def compute_ps(problem: StepProblem, work: Compute) -> int:
    """Return the picoseconds of one computing op on one chip of the problem's cluster; cached by `work`."""
    known = problem.cache("computing")
    ticks: int | None = known.get(work)
    if ticks is None:
        ticks = known[work] = price(work, machine_of(problem, (("row", 1, 1),))).total_ps
    return ticks


def priced_work(work: Compute, products: ProductDtypes | None, part: ProductPart = "forward") -> Compute:
    """Return the work of an op as a step prices it.

    Products, and calls of experts, get the dtype that `products` has for their part, if it has one. Attention
    with n keys and n queries, a step of ring attention, is written without the causal mask: its keys become
    n // 2 + 1.

    Args:
        part: which of the three products of training the op is; calls of experts say it themselves.
    """
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


def is_call(task: FlatTask, work: str) -> bool:
    """Return whether a task is a call whose kind of work is `work`, such as "attention"."""
    return isinstance(task.work, Compute) and task.work.call == work


def estimated(skeleton: Skeleton, machine: Machine, waits: bool) -> BlockTime:
    """Return the time of a block on `machine` by the estimate of its skeleton (its tasks as repeated phases).

    All exposed communication counts as `tensor_s`. `waits` says whether the software waits for each transfer, so
    that all communication is exposed.
    """
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


def is_summed_later(lane: str, work: Work) -> bool:
    """Return whether a task reduces gradients of weights, which `data_parallel` prices and a block leaves out.

    That is any task in a lane for gradients, except a reduce-scatter, which is inside a 2D product.
    """
    return lane.endswith(_GRADIENTS) and not (isinstance(work, Transfer) and work.kind == "reduce_scatter")


def without_gradients(skeleton: Skeleton) -> Skeleton:
    """Return a skeleton without its reductions of weight gradients (`is_summed_later`), and waits for them."""
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


def adapted_skeleton(skeleton: Skeleton, products: ProductDtypes | None) -> Skeleton:
    """Return a skeleton with the work of each computing op replaced by what `priced_work` returns for it.

    Without `products` (None) the work inside of 2D products is not changed.

    Raises:
        UnsupportedError: the three products of training have different dtypes.
    """
    if products is not None and len(set(products)) > 1:
        raise UnsupportedError(
            "tasks of such a layer are not told apart by what they make, and its precision is"
        )

    def changed(task: Task | Part) -> Task | Part:
        if isinstance(task, Task):
            work = task.work
            return replace(task, work=priced_work(work, products)) if isinstance(work, Compute) else task
        inner = task.skeleton if products is None else adapted_skeleton(task.skeleton, products)
        return replace(task, skeleton=inner)

    return Skeleton(
        tuple(replace(phase, tasks=tuple(changed(task) for task in phase.tasks)) for phase in skeleton.phases)
    )
