"""The max-plus recurrence that everything timed in closed form follows: a task begins when what it waits for ends.

    end(task) = max(0, end(other) for other in waits(task)) + duration(task)

Tasks come in an order in which each stands after those that it waits for. Ends lie in the places of a list. A
place may be a task, the time at which a lane is free, the end of a task of an earlier turn, or a transfer:
whatever has a time that others wait for.

Callers are layers of a step (`algorithms.step.block_time`) and the actions of schedules
(`algorithms.pipeline.progress`). Skeletons repeat turns, and where chains of packets make the ranks of a grid
differ, a time is an array over ranks and a task more than a duration: `csrc/skeleton.cpp` follows these, and
`estimate.timeline` is its definition.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def follow(tasks: Iterable[tuple[int, int, Sequence[int]]], ends: list[int]) -> None:
    """Write the end of each task to `ends`: max(0, the ends of what it waits for) + its duration.

    Args:
        tasks: (place, duration, places that it waits for) of each task, in an order in which a task comes after
            those that it waits for. A place is an index in `ends`.
        ends: the time at each place, in the unit of durations. Places of tasks are overwritten; others, such as
            the time at which a resource is free, are only read.
    """
    for place, duration, waits in tasks:
        begin = 0
        for other in waits:
            if ends[other] > begin:
                begin = ends[other]
        ends[place] = begin + duration
