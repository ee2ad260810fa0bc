"""The skeleton as a timeline: the spans that the max-plus recurrence gives to the tasks of every turn.

With chains each time is an array over the ranks of a grid, and a task ends on each rank as its kind says. That is
the definition of what `csrc/skeleton.cpp` computes; without chains it is the recurrence of `base.recurrence`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshweave.base.errors import UnsupportedError
from meshweave.cost.machine import Machine
from meshweave.cost.price import price
from meshweave.estimate.chains import grid_of, has_chains, is_buffered, launch_and_packet_ps, link_burst_ps
from meshweave.ir.skeleton import Part, Skeleton, Task
from meshweave.ir.work import Transfer, Work
from meshweave.trace import Span, Trace

MAX_TASKS = 200_000
"""Of more tasks no picture can be made; `estimate` needs none."""

_Times = NDArray[np.int64]
"""Picoseconds by rank of the grid of axes that have chains; one rank where there are none."""


def timeline(skeleton: Skeleton, machine: Machine, name: str = "skeleton") -> Trace:
    """Return the trace of a skeleton, as long as `estimate_skeleton` says, to the picosecond.

    Its spans are those of one rank, as rank 0: where there are chains, so that ranks differ, of the rank that
    ends last. Every turn of every loop has spans of its own. A task that stands for several equal ops is one
    span, which begins when the task does, with no waiting for partners in it.

    Args:
        name: the name of the program in the trace.

    Raises:
        UnsupportedError: there are more than `MAX_TASKS` tasks, or an op has no price.
        LayoutError: a mesh does not fit the network, or no mesh has the axis of an op.
    """
    count = _num_spans(skeleton)
    if count > MAX_TASKS:
        raise UnsupportedError(
            f"a timeline of {count} tasks is too long to draw; give a configuration of {MAX_TASKS} at most"
        )
    follower = _Follower(skeleton, lambda work: price(work, machine).total_ps, machine)
    follower.run(skeleton)
    slowest = int(np.argmax(follower.ended()))
    spans = (run.span(number, slowest) for number, run in enumerate(follower.runs))
    return Trace(name, "estimate", tuple(spans))


@dataclass(frozen=True)
class TaskSpan:
    """One run of a task of a skeleton, from `begin_ps` to `end_ps` in picoseconds from the start.

    `part` has the names of the included programs (`ir.skeleton.Part`) that it is in, the outermost first.
    """

    task: Task
    begin_ps: int
    end_ps: int
    part: tuple[str, ...] = ()


def task_spans(skeleton: Skeleton, cost_ps: Callable[[Work], int]) -> tuple[TaskSpan, ...] | None:
    """Return a span for each run of each task: turn (iteration) by turn, in a turn in the order listed.

    An op takes `cost_ps(work)` picoseconds. The result is None where broadcasts or reduces are timed packet by
    packet, since their members are busy for a part of the time only.
    """
    if has_chains(skeleton):
        return None
    follower = _Follower(skeleton, cost_ps)
    follower.run(skeleton)
    return tuple(TaskSpan(run.task, int(run.start), int(run.end), run.part) for run in follower.runs)


def _num_spans(skeleton: Skeleton) -> int:
    return sum(
        phase.turns * (_num_spans(task.skeleton) if isinstance(task, Part) else 1)
        for phase in skeleton.phases
        for task in phase.tasks
    )


class _TaskRun(NamedTuple):
    """A run of a task on all ranks of the grid; `part` names the sub-programs around it."""

    task: Task
    turn: int
    part: tuple[str, ...]
    start: _Times
    end: _Times

    def span(self, number: int, rank: int) -> Span:
        """Return the run as op `number` of a trace, on one rank of the grid."""
        times = int(self.start.flat[rank]), int(self.end.flat[rank])
        return Span(0, number, self.task.lane, self.task.work.kind, f"{self.task.name} {self.turn}", *times)


class _Follower:
    """The times of every rank of the grid, task by task; the definition of what `csrc/skeleton.cpp` computes."""

    def __init__(
        self, skeleton: Skeleton, cost_ps: Callable[[Work], int], machine: Machine | None = None
    ) -> None:
        self.machine, self._cost_ps = machine, cost_ps
        self.grid = grid_of(skeleton)
        self.axes = {axis: number for number, axis in enumerate(self.grid)}
        self.lanes: dict[str, _Times] = {}
        self.runs: list[_TaskRun] = []
        self.known: dict[Work, int] = {}
        self.links: dict[int, _Times] = {}
        """By axis with buffered chains: when the link from each rank to the next one is free."""

    def cost_ps(self, work: Work) -> int:
        """Return the picoseconds of an op."""
        if work not in self.known:
            self.known[work] = self._cost_ps(work)
        return self.known[work]

    def run(self, skeleton: Skeleton, part: tuple[str, ...] = ()) -> None:
        """Follow all turns of a skeleton, from the times at which its lanes are free."""
        reach = max(
            (back for p in skeleton.phases for t in p.tasks if isinstance(t, Task) for _, back in t.after),
            default=0,
        )
        past: deque[dict[str, _Times]] = deque(
            maxlen=reach
        )  # ends of tasks of earlier turns, the last turn first
        turn = 0
        for phase in skeleton.phases:
            for of_phase in range(phase.turns):
                ends: dict[str, _Times] = {}
                for task in phase.tasks:
                    if isinstance(task, Part):
                        for lane, names in task.after:
                            self.lanes[lane] = self._latest(
                                [self._free(lane), *(ends[other] for other in names)]
                            )
                        self.run(task.skeleton, (*part, task.name))
                        ends[task.name] = self._latest(self._free(lane) for lane in task.skeleton.lanes)
                        continue
                    waits = [self._free(task.lane)]
                    for other, back in task.after:
                        turn_ends = ends if back == 0 else past[back - 1] if back <= len(past) else {}
                        if other in turn_ends:
                            waits.append(turn_ends[other])
                    start = self._latest(waits)
                    roots = task.roots[of_phase * task.times : (of_phase + 1) * task.times]
                    end = self.lanes[task.lane] = ends[task.name] = self._end(task, start, roots)
                    self.runs.append(_TaskRun(task, turn, part, start, end))
                past.appendleft(ends)
                turn += 1

    def ended(self) -> _Times:
        """Return the picoseconds at which each rank has ended."""
        return self._latest([np.zeros(tuple(self.grid.values()), np.int64), *self.lanes.values()])

    def _free(self, lane: str) -> _Times:
        return self.lanes.get(lane, np.zeros(tuple(self.grid.values()), np.int64))

    @staticmethod
    def _latest(times: Iterable[_Times]) -> _Times:
        latest: _Times = np.maximum.reduce(list(times))
        return latest

    def _end(self, task: Task, start: _Times, roots: Sequence[int]) -> _Times:
        """Return when the members end a task that they begin at `start`."""
        work, times = task.work, start
        duration = 0 if roots else self.cost_ps(work)
        if not isinstance(work, Transfer) or ("." in work.axis and work.axis not in self.axes):
            return times + task.times * duration
        if work.axis not in self.axes:
            return np.full_like(times, times.max()) + task.times * duration
        axis = self.axes[work.axis]
        if roots:
            for root in roots:
                times = self._chain_end(work, times, axis, root)
            return times
        if work.kind == "permute":
            for _ in range(task.times):
                times = self._latest([times, np.roll(times, 1, axis), np.roll(times, -1, axis)]) + duration
            return times
        return np.broadcast_to(times.max(axis=axis, keepdims=True), times.shape) + task.times * duration

    def _chain_end(self, work: Transfer, begun: _Times, axis: int, root: int) -> _Times:
        launch_ps, packet_ps = launch_and_packet_ps(work, self.cost_ps)
        if work.num_ranks == 1:
            return begun + launch_ps
        first = root + (work.kind == "reduce")
        places = np.roll(np.moveaxis(begun, axis, 0), -first, axis=0)
        ends = np.empty_like(places)
        if is_buffered(work, self.machine):
            ends = self._buffered_ends(work, places, axis, first)
        else:
            for hop in range(work.num_ranks - 1):
                ends[hop] = np.maximum(places[hop], places[hop + 1]) + work.packets * packet_ps
                ends[hop] = np.maximum(ends[hop], ends[hop - 1] + packet_ps) if hop else ends[hop] + launch_ps
            ends[-1] = ends[-2]
        return np.moveaxis(np.roll(ends, first, axis=0), 0, axis)

    def _buffered_ends(self, work: Transfer, begun: _Times, axis: int, first: int) -> _Times:
        """Return the ends of members, by place in the chain, where a send buffer takes its packets."""
        launch_ps, packet_ps = launch_and_packet_ps(work, self.cost_ps)
        assert self.machine is not None
        burst_ps = link_burst_ps(work, self.machine)
        shape = tuple(self.grid.values())
        links = self.links.setdefault(axis, np.full(shape, -(1 << 62), np.int64))
        free = np.roll(np.moveaxis(links, axis, 0), -first, axis=0)
        ends, firsts = np.zeros_like(begun), np.zeros_like(begun[0])
        for hop in range(work.num_ranks - 1):
            arrival = np.maximum(begun[hop], begun[hop + 1]) + (0 if hop else launch_ps)
            arrival = np.maximum(arrival, firsts) if hop else arrival
            flow = np.maximum(arrival - burst_ps, free[hop])
            firsts = np.maximum(flow + packet_ps, arrival)
            free[hop] = flow + work.packets * packet_ps
            ends[hop] = np.maximum(np.maximum(free[hop], firsts), ends[hop - 1] if hop else 0)
        ends[-1] = ends[-2]
        ends[:-1] = np.maximum(begun[:-1], ends[:-1] - packet_ps)
        self.links[axis] = np.moveaxis(np.roll(free, first, axis=0), 0, axis)
        return ends
