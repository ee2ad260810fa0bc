"""The skeleton as a timeline: the spans that the max-plus recurrence gives to the tasks of every turn."""

from __future__ import annotations

from collections import deque

from meshweave.base.errors import UnsupportedError
from meshweave.cost.machine import Machine
from meshweave.cost.price import price
from meshweave.ir.skeleton import Skeleton
from meshweave.ir.work import Work
from meshweave.trace import Span, Trace

MAX_TASKS = 200_000
"""Of more tasks no picture can be made; `estimate` needs none."""


def timeline(skeleton: Skeleton, machine: Machine, name: str = "skeleton") -> Trace:
    """Return a trace of rank 0 whose duration equals `estimate_skeleton(skeleton, machine)`, to the picosecond.

    Every turn is followed: nothing is jumped over. Tasks that stand for several equal ops are one span, and a span
    begins when its task does, with no waiting for partners in it. `name` is that of the program.

    Raises:
        UnsupportedError: there are more than `MAX_TASKS` tasks, or `cost.price.price` raises it.
    """
    count = sum(phase.turns * len(phase.tasks) for phase in skeleton.phases)
    if count > MAX_TASKS:
        raise UnsupportedError(
            f"a timeline of {count} tasks is too long to draw; give a configuration of {MAX_TASKS} at most"
        )
    reach = max((back for phase in skeleton.phases for t in phase.tasks for _, back in t.after), default=0)
    past: deque[dict[str, int]] = deque(maxlen=reach)  # ends of tasks of earlier turns, the last turn first
    lanes: dict[str, int] = {}
    known: dict[Work, int] = {}
    spans: list[Span] = []
    turn = 0
    for phase in skeleton.phases:
        for _ in range(phase.turns):
            ends: dict[str, int] = {}
            for task in phase.tasks:
                work = task.work
                if work not in known:
                    known[work] = price(work, machine).total_ps
                start = lanes.get(task.lane, 0)
                for other, back in task.after:
                    if back <= len(past):
                        start = max(start, (past[back - 1] if back else ends).get(other, 0))
                end = lanes[task.lane] = ends[task.name] = start + task.times * known[work]
                spans.append(Span(0, len(spans), task.lane, work.kind, f"{task.name} {turn}", start, end))
            past.appendleft(ends)
            turn += 1
    return Trace(name, "estimate", tuple(spans))
