"""The closed-form reading: time of a skeleton as a max-plus recurrence, jumped over once it is periodic.

A software pipeline costs prologue + (n - 1) steady + epilogue (MeshSlice, section 3.2.2). Instead of
writing that down per algorithm, the recurrence of its tasks is followed for a few turns. Max-plus
recurrences are linear: as soon as one turn shifts all that the next one depends on by the same amount,
all further turns of that phase do, and they are skipped in one step. All in integers, so the result is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshweave.base.units import to_s
from meshweave.cost.calls import with_counts
from meshweave.cost.machine import Machine
from meshweave.cost.price import Price, price
from meshweave.ir.skeleton import Skeleton, Task
from meshweave.ir.work import Compute, Work

CostPs = Callable[[Work], int]
"""Picoseconds of one op."""


@dataclass(frozen=True)
class Estimate:
    """Seconds of a program. The parts are sums over ops, whether they overlap or not."""

    total_s: float
    compute_s: float
    copy_s: float
    launch_s: float
    sync_s: float
    transfer_s: float

    @property
    def communication_s(self) -> float:
        """Return the seconds of launches, synchronisations and transfers."""
        return self.launch_s + self.sync_s + self.transfer_s

    @property
    def exposed_s(self) -> float:
        """Return the seconds in which neither products nor calls run: what the rest adds."""
        return self.total_s - self.compute_s


_Step = tuple[int, int, int, list[int], list[tuple[int, int]]]
"""A task with numbers for names: (task, lane, picoseconds, after tasks of this turn, after (task, distance))."""


class TimedSkeleton:
    """A skeleton with the durations of its tasks."""

    __slots__ = ("_phases",)

    def __init__(self, skeleton: Skeleton, cost_ps: CostPs) -> None:
        self._phases = [
            (phase.turns, phase.tasks, [task.times * cost_ps(task.work) for task in phase.tasks])
            for phase in skeleton.phases
        ]

    def lower_bound_ps(self) -> int:
        """Return the largest sum of durations in one lane: a cheap lower bound on `total_ps`."""
        lanes: dict[str, int] = {}
        for turns, tasks, durations in self._phases:
            for task, duration in zip(tasks, durations, strict=True):
                lanes[task.lane] = lanes.get(task.lane, 0) + turns * duration
        return max(lanes.values(), default=0)

    def total_ps(self) -> int:
        """Return the makespan in picoseconds; exact."""
        if not any(task.after for _, tasks, _ in self._phases for task in tasks):
            return self.lower_bound_ps()
        numbers: dict[str, int] = {}
        lane_numbers: dict[str, int] = {}
        compiled = [
            (turns, _compile(tasks, durations, numbers, lane_numbers))
            for turns, tasks, durations in self._phases
        ]
        depth = max((reach for _, (_, reach) in compiled), default=0)
        lanes = [0] * len(lane_numbers)
        blank = [-1] * len(numbers)
        history = [blank] * depth  # finish times of the last turns by task; -1 where it did not run
        for turns, (steps, reach) in compiled:
            _run_phase(turns, steps, reach, depth, blank, history, lanes)
        return max(lanes, default=0)


def _compile(
    tasks: tuple[Task, ...], durations: list[int], numbers: dict[str, int], lane_numbers: dict[str, int]
) -> tuple[list[_Step], int]:
    """Return the steps of a turn, and the number of turns over which their dependences reach back."""
    steps: list[_Step] = []
    seen: set[str] = set()
    reach = 0
    for task, duration in zip(tasks, durations, strict=True):
        now: list[int] = []
        back: list[tuple[int, int]] = []
        for name, distance in task.after:
            number = numbers.setdefault(name, len(numbers))
            if distance:
                back.append((number, distance))
                if distance > reach:
                    reach = distance
            else:
                assert name in seen, f"{task.name} waits for {name}, which comes later in its turn"
                now.append(number)
        seen.add(task.name)
        number = numbers.setdefault(task.name, len(numbers))
        lane = lane_numbers.setdefault(task.lane, len(lane_numbers))
        steps.append((number, lane, duration, now, back))
    return steps, reach


def _run_phase(
    turns: int,
    steps: list[_Step],
    reach: int,
    depth: int,
    blank: list[int],
    history: list[list[int]],
    lanes: list[int],
) -> None:
    """Advance `history` and `lanes` by the turns of a phase, jumping over turns once they are periodic."""
    used = {lane for _, lane, _, _, _ in steps}
    watched = {number for _, _, _, _, back in steps for number, _ in back}
    for turn in range(1, turns + 1):
        before = lanes.copy()
        finish = blank.copy()
        for number, lane, duration, now, back in steps:
            start = lanes[lane]
            for task in now:
                if finish[task] > start:
                    start = finish[task]
            for task, distance in back:
                end = history[-distance][task]
                if end > start:
                    start = end
            finish[number] = lanes[lane] = start + duration
        history.append(finish)
        if turn > reach and turn < turns:
            shift = _steady_shift(before, lanes, used, history, watched, reach)
            if shift is not None:
                left = turns - turn
                for lane in used:
                    lanes[lane] += left * shift
                for ahead in range(max(left - depth, 0) + 1, left + 1):
                    history.append([end + ahead * shift if end >= 0 else -1 for end in finish])
                break
            rates = _steady_rates(steps, lanes, history, reach) if turn & (turn - 1) == 0 else None
            if rates is not None:
                left = turns - turn
                for number, lane, _, _, _ in steps:  # the last task in a lane decides
                    lanes[lane] = finish[number] + left * rates[number]
                for ahead in range(max(left - depth, 0) + 1, left + 1):
                    history.append([end + ahead * rate for end, rate in zip(finish, rates, strict=True)])
                break
        if len(history) > 4 * depth + 64:
            del history[: -depth - 1]


def _steady_shift(
    before: list[int],
    lanes: list[int],
    used: set[int],
    history: list[list[int]],
    watched: set[int],
    reach: int,
) -> int | None:
    """Return the picoseconds by which the last turn shifted all inputs of the next turn; None if not equal."""
    shift: int | None = None
    for lane in used:
        gap = lanes[lane] - before[lane]
        if shift is None:
            shift = gap
        elif gap != shift:
            return None
    for distance in range(1, reach + 1):
        newer, older = history[-distance], history[-distance - 1]
        for number in watched:
            if newer[number] >= 0 and newer[number] - older[number] != shift:
                return None
    return shift


def _steady_rates(
    steps: list[_Step], lanes: list[int], history: list[list[int]], reach: int
) -> list[int] | None:
    """Return the picoseconds by which each task's end shifts per turn, if these stay constant; else None.

    Lanes that do not block each other, such as a ring that is faster than the products, shift by different
    amounts. All later ends are linear if two conditions hold. The ends that the next turn depends on were linear
    so far. And in the next turn the input that each task waits for last is also the one with the largest shift,
    so that the task waits for the same input in all later turns.
    """
    if len(history) < reach + 2:
        return None
    last, older = history[-1], history[-2]
    rates = [end - before if end >= 0 else 0 for end, before in zip(last, older, strict=True)]
    lane_ends: dict[int, tuple[int, int]] = {}
    for number, lane, _, _, back in steps:
        if older[number] < 0:
            return None
        lane_ends[lane] = lanes[lane], rates[number]
        for task, distance in back:
            if last[task] >= 0 and any(
                history[-ago][task] - history[-ago - 1][task] != rates[task] for ago in range(1, distance + 1)
            ):
                return None
    ends: dict[int, int] = {}
    for number, lane, duration, now, back in steps:
        waits = [lane_ends[lane], *((ends[task], rates[task]) for task in now)]
        waits += [(history[-d][task], rates[task]) for task, d in back if last[task] >= 0]
        start, rate = max(waits)
        end = start + duration
        if rate < max(waits, key=_rate)[1] or rate != rates[number] or end != last[number] + rate:
            return None
        ends[number] = end
        lane_ends[lane] = end, rate
    return rates


def _rate(wait: tuple[int, int]) -> int:
    return wait[1]


def skeleton_ps(skeleton: Skeleton, cost_ps: CostPs) -> int:
    """Return the makespan in picoseconds where each op of a task takes `cost_ps(work)`; exact."""
    return TimedSkeleton(skeleton, cost_ps).total_ps()


def estimate_skeleton(skeleton: Skeleton, machine: Machine) -> Estimate:
    """Return the time of a skeleton on a machine. Raises UnsupportedError as `cost.price.price` does."""
    prices: dict[Work, Price] = {}

    def priced(work: Work) -> Price:
        known = prices.get(work)
        if known is None:
            known = prices[work] = price(work, machine)
        return known

    total = skeleton_ps(skeleton, lambda work: priced(work).total_ps)
    compute = copy = launch = sync = transfer = 0
    for phase in skeleton.phases:
        for task in phase.tasks:
            cost = priced(task.work)
            count = phase.turns * task.times
            if isinstance(task.work, Compute):
                if with_counts(task.work).flops:
                    compute += count * cost.total_ps
                else:
                    copy += count * cost.total_ps
            else:
                launch += count * cost.launch_ps
                sync += count * cost.sync_ps
                transfer += count * cost.flow_ps
    return Estimate(to_s(total), to_s(compute), to_s(copy), to_s(launch), to_s(sync), to_s(transfer))
