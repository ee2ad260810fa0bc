"""When each task of a skeleton runs, for pictures: the recurrence of `estimate.skeletons` without its jumps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from meshweave.estimate.chains import has_chains
from meshweave.estimate.skeletons import CostPs
from meshweave.ir.skeleton import Part, Phase, Skeleton, Task


@dataclass(frozen=True)
class TaskSpan:
    """One run of a task, from `begin_ps` to `end_ps` in picoseconds; `part` names the sub-programs around it."""

    task: Task
    begin_ps: int
    end_ps: int
    part: tuple[str, ...] = ()


def task_spans(skeleton: Skeleton, cost_ps: CostPs) -> tuple[TaskSpan, ...] | None:
    """Return when each task runs, in order of issue, where an op takes `cost_ps(work)`; see `skeleton_ps`.

    None where broadcasts are chains, whose members are busy for a part of the time only.
    """
    if has_chains(skeleton):
        return None
    clock = _Clock(cost_ps)
    return tuple(clock.run(skeleton, ()))


@dataclass
class _Clock:
    """The times at which lanes are free, while tasks are issued one after the other."""

    cost_ps: CostPs
    lanes: dict[str, int] = field(default_factory=dict)

    def run(self, skeleton: Skeleton, part: tuple[str, ...]) -> Iterator[TaskSpan]:
        """Yield the spans of a skeleton; `part` names the sub-programs around it."""
        turns: list[dict[str, int]] = []  # the ends of the tasks of each turn so far
        for phase in skeleton.phases:
            for _ in range(phase.turns):
                turns.append({})
                yield from self._turn(phase, turns, part)

    def _turn(self, phase: Phase, turns: list[dict[str, int]], part: tuple[str, ...]) -> Iterator[TaskSpan]:
        ends = turns[-1]
        for task in phase.tasks:
            if isinstance(task, Part):
                for lane, names in task.after:
                    self.lanes[lane] = max(self.lanes.get(lane, 0), *(ends[name] for name in names))
                yield from self.run(task.skeleton, (*part, task.name))
                used = {inner.lane for _, inner in task.skeleton.counted_tasks()}
                ends[task.name] = max((self.lanes[lane] for lane in used), default=0)
                continue
            waits = [turns[-1 - back].get(name, 0) for name, back in task.after if back < len(turns)]
            begin = max(self.lanes.get(task.lane, 0), *waits, 0)
            ends[task.name] = self.lanes[task.lane] = begin + task.times * self.cost_ps(task.work)
            yield TaskSpan(task, begin, ends[task.name], part)
