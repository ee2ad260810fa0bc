"""What an order of unit tasks is about: jobs that hold NICs, and when each of them runs.

AlpaComm (MLSys '23), section 3.2, eq. 1-3. A unit task holds the NIC of its sender and those of its receivers
for its whole duration, so tasks that share a NIC exclude each other. Still open are the sender, here a job's
*way*, and the order in which each NIC takes its tasks. The paper's remark after eq. 4: given both, each task best
starts as soon as the earlier ones on its NICs are over, so an order says all. One order of all jobs gives each NIC
its own.

A resource is one direction of one NIC: sending and receiving do not hinder each other (full duplex).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """A unit task as the order sees it: it holds some NICs for its duration, all at once, without a break (eq. 3).

    `duration` is over 0, in picoseconds or any other whole unit. Each way lists the resources that the job would
    hold, in ascending order. A way without any means that nothing hinders the job: it starts at 0.
    """

    duration: int
    ways: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Jobs:
    """The jobs of one resharding, and for each resource its class ("a sending NIC", "a NIC of receiving host 3").

    Classes matter to bounds: where every way of a job holds some resource of a class, the job loads that class.
    """

    jobs: tuple[Job, ...]
    class_of: tuple[int, ...]


@dataclass(frozen=True)
class Schedule:
    """For each job its way and its start, and the order in which every resource takes its jobs.

    `proven` where no schedule can end sooner; `how` names the algorithm; `serial` where each job waits for the one
    before it in the order, whatever they hold.
    """

    ways: tuple[int, ...]
    order: tuple[int, ...]
    starts: tuple[int, ...]
    makespan: int
    proven: bool = False
    how: str = ""
    serial: bool = False


def place(
    jobs: Jobs, ways: Sequence[int], order: Sequence[int], serial: bool = False, how: str = ""
) -> Schedule:
    """Starts each job once those before it in `order` that share a resource with it are over; with `serial` once
    all before it are. A job that holds nothing starts at 0."""
    free = [0] * len(jobs.class_of)
    starts, makespan = [0] * len(jobs.jobs), 0
    for j in order:
        held = jobs.jobs[j].ways[ways[j]]
        if held:
            starts[j] = makespan if serial else max(free[r] for r in held)
        end = starts[j] + jobs.jobs[j].duration
        for r in held:
            free[r] = end
        makespan = max(makespan, end)
    return Schedule(tuple(ways), tuple(order), tuple(starts), makespan, how=how, serial=serial)


def way_masks(jobs: Jobs) -> list[list[int]]:
    """For each job and way the held resources as bits: ways with a bit in common exclude each other."""
    return [[sum(1 << r for r in way) for way in job.ways] for job in jobs.jobs]


def by_start(starts: Sequence[int]) -> list[int]:
    """The jobs by start. Placed in this order, no job of a valid schedule starts later than it did."""
    return sorted(range(len(starts)), key=lambda j: (starts[j], j))
