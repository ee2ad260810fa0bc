"""Two mesh axes that share one pool of bandwidth: the time of a skeleton, followed operation by operation.

A chip can move twice what the links of one axis carry. An operation of one axis that runs alone has the whole pool
and takes half its time; beside one of the other axis it takes its own. So two of a and b seconds that start
together end after (a + b) / 2, which the simulation branch of the paper's public code charges in place of the
longer one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from meshweave.cost.machine import Machine
from meshweave.cost.price import price
from meshweave.ir.skeleton import Skeleton, Task
from meshweave.ir.work import Transfer, Work


@dataclass
class PooledTask:
    """One task of one turn: the seconds of work left, its mesh axis if it communicates, and what it waits for."""

    left_s: float
    axis: str
    waits: list[PooledTask] = field(default_factory=list)
    done: bool = False


def pooled_s(skeleton: Skeleton, machine: Machine) -> float:
    """Return the seconds of a skeleton on a machine whose mesh axes share one pool of bandwidth."""
    lanes = _lanes(skeleton, machine)
    now = 0.0
    while True:
        for queue in lanes:
            while queue and queue[0].done:
                queue.popleft()
        heads = [queue[0] for queue in lanes if queue and all(task.done for task in queue[0].waits)]
        if not heads:
            assert not any(lanes), "a task waits for one that never ends"
            return now
        axes = {task.axis for task in heads if task.axis}
        speeds = [2.0 if task.axis and len(axes) == 1 else 1.0 for task in heads]
        step = min(task.left_s / speed for task, speed in zip(heads, speeds, strict=True))
        now += step
        for task, speed in zip(heads, speeds, strict=True):
            task.left_s -= step * speed
            task.done = task.left_s <= 1e-15


def _lanes(skeleton: Skeleton, machine: Machine) -> list[deque[PooledTask]]:
    """Return the tasks of every lane in order, all turns written out."""
    lanes: dict[str, deque[PooledTask]] = {}
    seconds: dict[Work, float] = {}
    turns: list[dict[str, PooledTask]] = []
    for phase in skeleton.phases:
        for _ in range(phase.turns):
            turn: dict[str, PooledTask] = {}
            turns.append(turn)
            for task in phase.tasks:
                assert isinstance(task, Task), "the skeleton of a product includes no other"
                if task.work not in seconds:
                    seconds[task.work] = price(task.work, machine).total_ps / 1e12
                axis = task.work.axis if isinstance(task.work, Transfer) else ""
                waits = list(_awaited(turns, task.after))
                turn[task.name] = PooledTask(task.times * seconds[task.work], axis, waits)
                lanes.setdefault(task.lane, deque()).append(turn[task.name])
    return list(lanes.values())


def _awaited(turns: list[dict[str, PooledTask]], after: tuple[tuple[str, int], ...]) -> Iterator[PooledTask]:
    for name, back in after:
        if back < len(turns) and name in turns[-1 - back]:
            yield turns[-1 - back][name]
