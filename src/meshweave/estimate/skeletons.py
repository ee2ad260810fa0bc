"""The closed-form reading: time of a skeleton as a max-plus recurrence, jumped over once it is periodic.

A software pipeline costs prologue + (n - 1) steady + epilogue (MeshSlice, section 3.2.2). Instead of writing that
down per algorithm, the recurrence of its tasks (`estimate.recurrence`) is followed for a few turns. Max-plus
recurrences are linear: as soon as one turn shifts all that the next one depends on by the same amount, all further
turns of that phase do, and they are skipped in one step. All in integers, so the result is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from meshweave.base.units import to_s
from meshweave.cost.calls import with_counts
from meshweave.cost.machine import Machine
from meshweave.cost.price import Price, price
from meshweave.estimate.chains import chained_ps, has_chains, hop_ps, is_buffered
from meshweave.estimate.recurrence import follow
from meshweave.ir.skeleton import Part, Phase, Skeleton, Task
from meshweave.ir.work import Compute, Transfer, Work

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

    __slots__ = ("_cost_ps", "_has_chains", "_machine", "_skeleton")

    def __init__(self, skeleton: Skeleton, cost_ps: CostPs, machine: Machine | None = None) -> None:
        self._skeleton, self._cost_ps, self._machine = skeleton, cost_ps, machine
        self._has_chains = has_chains(skeleton)

    def lower_bound_ps(self) -> int:
        """Return the largest sum of durations in one lane: a cheap lower bound on `total_ps`.

        A chain keeps its members for its launch and its packets at least; for its launch alone where a send buffer
        takes the packets.
        """
        lanes: dict[str, int] = {}
        for count, task in self._skeleton.counted_tasks():
            if task.roots and isinstance(task.work, Transfer):
                launch_ps, packet_ps = hop_ps(task.work, self._cost_ps)
                kept = 0 if is_buffered(task.work, self._machine) else task.work.packets
                duration = launch_ps + packet_ps * kept
            else:
                duration = self._cost_ps(task.work)
            lanes[task.lane] = lanes.get(task.lane, 0) + count * duration
        return max(lanes.values(), default=0)

    def total_ps(self) -> int:
        """Return the makespan in picoseconds; exact."""
        if self._has_chains:
            return chained_ps(self._skeleton, self._cost_ps, self._machine)
        if not any(task.after for phase in self._skeleton.phases for task in phase.tasks):
            return self.lower_bound_ps()
        compiler = _Compiler(self._cost_ps)
        compiled = compiler.skeleton(self._skeleton)
        lanes = [0] * len(compiler.lanes)
        compiled.run(lanes)
        return max(lanes, default=0)


class _Segment(NamedTuple):
    """Tasks of a turn up to a part, for `follow`, and the part; None after the last one.

    Places are the tasks by number, then those of earlier turns, the last turn first, then the lanes.
    """

    tasks: list[tuple[int, int, Sequence[int]]]
    part: _Compiled | None


class _CompiledPhase(NamedTuple):
    """The steps of a turn, its segments, and the turns that waits reach back."""

    turns: int
    steps: list[_Step]
    segments: list[_Segment]
    reach: int


@dataclass(frozen=True)
class _Compiled:
    """A skeleton with numbers for names."""

    num_tasks: int
    lanes: list[int]
    phases: list[_CompiledPhase]

    def run(self, lanes: list[int]) -> None:
        """Advance the times at which lanes are free."""
        depth = max((phase.reach for phase in self.phases), default=0)
        blank = [-1] * self.num_tasks
        history = [blank] * depth  # finish times of the last turns by task; -1 where it did not run
        for phase in self.phases:
            _run_phase(phase, depth, blank, history, lanes)


class _Compiler:
    """Numbers for the names of a skeleton and its parts; each distinct part is compiled once."""

    def __init__(self, cost_ps: CostPs) -> None:
        self.cost_ps = cost_ps
        self.lanes: dict[str, int] = {}
        self.known: dict[int, _Compiled] = {}

    def skeleton(self, skeleton: Skeleton) -> _Compiled:
        """Return a skeleton with numbers for names."""
        known = self.known.get(id(skeleton))
        if known is None:
            numbers: dict[str, int] = {}
            for phase in skeleton.phases:
                for task in phase.tasks:
                    numbers.setdefault(task.name, len(numbers))
                    if isinstance(task, Task):
                        for name, _ in task.after:
                            numbers.setdefault(name, len(numbers))
            phases = [self._phase(phase, numbers) for phase in skeleton.phases]
            lanes = sorted({self._lane(task.lane) for _, task in skeleton.counted_tasks()})
            known = self.known[id(skeleton)] = _Compiled(len(numbers), lanes, phases)
        return known

    def _lane(self, lane: str) -> int:
        return self.lanes.setdefault(lane, len(self.lanes))

    def _phase(self, phase: Phase, numbers: dict[str, int]) -> _CompiledPhase:
        reach = max(
            (back for task in phase.tasks if isinstance(task, Task) for _, back in task.after), default=0
        )
        first_lane = len(numbers) * (reach + 1)
        steps: list[_Step] = []
        segments = [_Segment([], None)]
        last: dict[int, int] = {}  # the task of the segment that had each lane last
        seen: set[str] = set()
        for task in phase.tasks:
            seen.add(task.name)
            number = numbers[task.name]
            tasks = segments[-1].tasks
            if isinstance(task, Part):
                assert phase.turns == 1, f"{task.name} stands in a phase of several turns"
                tasks += [(first_lane + lane, 0, (other,)) for lane, other in last.items()]
                for name, waits in task.after:
                    place = first_lane + self._lane(name)
                    tasks.append((place, 0, (place, *(numbers[other] for other in waits))))
                part = self.skeleton(task.skeleton)
                segments[-1] = _Segment(tasks, part)
                last = {}
                ended = number, 0, [first_lane + lane for lane in part.lanes]
                segments.append(_Segment([ended], None))
                continue
            step = self._step(task, number, numbers)
            steps.append(step)
            _, lane, duration, now, back = step
            assert seen.issuperset(name for name, distance in task.after if not distance), (
                f"{task.name} waits for what comes later in its turn"
            )
            earlier = (distance * len(numbers) + other for other, distance in back)
            tasks.append((number, duration, (last.get(lane, first_lane + lane), *now, *earlier)))
            last[lane] = number
        segments[-1].tasks.extend((first_lane + lane, 0, (other,)) for lane, other in last.items())
        return _CompiledPhase(phase.turns, steps, segments, reach)

    def _step(self, task: Task, number: int, numbers: dict[str, int]) -> _Step:
        now = [numbers[name] for name, back in task.after if not back]
        earlier = [(numbers[name], back) for name, back in task.after if back]
        return number, self._lane(task.lane), task.times * self.cost_ps(task.work), now, earlier


def _run_phase(
    phase: _CompiledPhase, depth: int, blank: list[int], history: list[list[int]], lanes: list[int]
) -> None:
    """Advance `history` and `lanes` by the turns of a phase, jumping over turns once they are periodic."""
    turns, steps, segments, reach = phase
    used = {lane for _, lane, _, _, _ in steps}
    watched = {number for _, _, _, _, back in steps for number, _ in back}
    size = len(blank)
    first_lane = size * (reach + 1)
    for turn in range(1, turns + 1):
        before = lanes.copy()
        ends = blank.copy()
        for distance in range(1, reach + 1):
            ends += history[-distance]
        ends += lanes
        for tasks, part in segments:
            follow(tasks, ends)
            lanes[:] = ends[first_lane:]
            if part is not None:
                part.run(lanes)
                ends[first_lane:] = lanes
        finish = ends[:size]
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


def skeleton_ps(skeleton: Skeleton, cost_ps: CostPs, machine: Machine | None = None) -> int:
    """Return the makespan in picoseconds where each op of a task takes `cost_ps(work)`; exact."""
    return TimedSkeleton(skeleton, cost_ps, machine).total_ps()


def estimate_skeleton(skeleton: Skeleton, machine: Machine) -> Estimate:
    """Return the time of a skeleton on a machine. Raises UnsupportedError as `cost.price.price` does."""
    prices: dict[Work, Price] = {}
    totals: dict[Work, int] = {}

    def cost_ps(work: Work) -> int:
        known = totals.get(work)
        if known is None:
            cost = prices[work] = price(work, machine)
            known = totals[work] = cost.total_ps
        return known

    total = skeleton_ps(skeleton, cost_ps, machine)
    compute = copy = launch = sync = transfer = 0
    counts: dict[Work, int] = {}
    for count, task in skeleton.counted_tasks():
        counts[task.work] = counts.get(task.work, 0) + count
    for work, count in counts.items():
        total_ps = count * cost_ps(work)
        if not isinstance(work, Compute):
            cost = prices[work]
            launch += count * cost.launch_ps
            sync += count * cost.sync_ps
            transfer += count * cost.flow_ps
        elif with_counts(work).flops:
            compute += total_ps
        else:
            copy += total_ps
    return Estimate(to_s(total), to_s(compute), to_s(copy), to_s(launch), to_s(sync), to_s(transfer))
