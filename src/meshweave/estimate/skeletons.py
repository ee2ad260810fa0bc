"""The closed-form reading: time of a skeleton as a max-plus recurrence, jumped over once it is periodic.

A software pipeline costs prologue + (n - 1) steady + epilogue (MeshSlice, section 3.2.2). Instead of
writing that down per algorithm, the recurrence of its tasks is followed for a few turns; max-plus
recurrences are linear, so as soon as one turn shifts every finish time by the same amount, all further
turns of that phase do, and they are skipped in one step. All in integers, so the result is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshweave.cost.machine import Machine
from meshweave.cost.price import Price, price
from meshweave.ir.skeleton import Phase, Skeleton
from meshweave.ir.work import Compute, Work
from meshweave.units import to_s


@dataclass(frozen=True)
class Estimate:
    """Seconds of a program by its skeleton. The parts are sums over ops, overlapped or not."""

    total_s: float
    compute_s: float
    copy_s: float
    launch_s: float
    sync_s: float
    transfer_s: float

    @property
    def communication_s(self) -> float:
        return self.launch_s + self.sync_s + self.transfer_s

    @property
    def exposed_s(self) -> float:
        """Time in which the products do not run: what communication, copies and waiting add."""
        return self.total_s - self.compute_s


def skeleton_ps(skeleton: Skeleton, cost_ps: Callable[[Work], int]) -> int:
    """Makespan in picoseconds, each task taking `cost_ps(work)`; exact."""
    depth = skeleton.max_distance + 1
    history: list[dict[str, int]] = []
    lanes: dict[str, int] = {}
    end = 0
    for phase in skeleton.phases:
        end = max(end, _run_phase(phase, cost_ps, depth, history, lanes))
    return end


def _run_phase(
    phase: Phase,
    cost_ps: Callable[[Work], int],
    depth: int,
    history: list[dict[str, int]],
    lanes: dict[str, int],
) -> int:
    tasks = [(task.name, task.lane, task.times * cost_ps(task.work), task.after) for task in phase.tasks]
    turn, end = 0, 0
    while turn < phase.turns:
        finish: dict[str, int] = {}
        for name, lane, duration, after in tasks:
            start = lanes.get(lane, 0)
            for other, distance in after:
                if distance == 0:
                    start = max(start, finish[other])
                elif distance <= len(history):
                    start = max(start, history[-distance].get(other, 0))
            finish[name] = lanes[lane] = start + duration
        history.append(finish)
        del history[: -2 * depth - 1]
        turn += 1
        end = max(end, *finish.values())
        shift = _steady_shift(history, depth, phase)
        if shift is not None:
            ahead = (phase.turns - turn) * shift
            for past in history:
                for name in past:
                    past[name] += ahead
            for _, lane, _, _ in tasks:
                lanes[lane] = max(finish[name] for name, of, _, _ in tasks if of == lane)
            return end + ahead
    return end


def _steady_shift(history: list[dict[str, int]], depth: int, phase: Phase) -> int | None:
    """By how much each of the last `depth` turns lies behind the turn before it, if by one amount."""
    if len(history) < depth + 1:
        return None
    names = [task.name for task in phase.tasks]
    shift: int | None = None
    for older, newer in zip(history[-depth - 1 : -1], history[-depth:], strict=True):
        for name in names:
            if name not in older or name not in newer:
                return None
            gap = newer[name] - older[name]
            if shift is not None and gap != shift:
                return None
            shift = gap
    return shift


def estimate(skeleton: Skeleton, machine: Machine) -> Estimate:
    """Prices every task on `machine` and follows the skeleton. Raises UnsupportedError as `price` does."""
    prices: dict[Work, Price] = {}

    def priced(work: Work) -> Price:
        found = prices.get(work)
        if found is None:
            found = prices[work] = price(work, machine)
        return found

    total = skeleton_ps(skeleton, lambda work: priced(work).total_ps)
    compute = copy = launch = sync = transfer = 0
    for phase in skeleton.phases:
        for task in phase.tasks:
            cost = priced(task.work)
            count = phase.turns * task.times
            if isinstance(task.work, Compute):
                if task.work.flops:
                    compute += count * cost.total_ps
                else:
                    copy += count * cost.total_ps
            else:
                launch += count * cost.launch_ps
                sync += count * cost.sync_ps
                transfer += count * cost.flow_ps
    return Estimate(to_s(total), to_s(compute), to_s(copy), to_s(launch), to_s(sync), to_s(transfer))
