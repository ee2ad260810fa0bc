"""The jobs that an order schedules: transfers that occupy NICs, and when each of them runs.

AlpaComm (MLSys '23), section 3.2, eq. 1-3. A unit task occupies the NIC of its sender and those of its receivers
for its whole duration, so tasks that share a NIC exclude each other. Still to be chosen are the sender, here a
job's *route*, and the order in which each NIC serves its tasks. Given both, each task best starts as soon as
the earlier ones on its NICs are over (the paper's remark after eq. 4). So one order of all jobs is a whole
schedule.

A resource is one direction of one NIC: sending and receiving do not hinder each other (full duplex).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TransferJob:
    """A transfer that occupies some NICs for its duration, all at once and without a break (AlpaComm, eq. 3).

    A resource is one direction (sending or receiving) of one NIC; resources have numbers.

    Attributes:
        duration: above 0, a whole number of picoseconds, or of another unit that all jobs share.
        routes: for each route that the job could take, the numbers of the resources that it occupies, ascending. A
            job whose route has no resources starts at 0.
    """

    duration: int
    routes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class JobSet:
    """The jobs of one reshard, numbered from 0, and the classes of resources.

    Attributes:
        class_of: for each resource the number of its class, such as the receiving NICs of one host. Lower bounds
            use that a job occupies a resource of a class if each of its routes does.
    """

    jobs: tuple[TransferJob, ...]
    class_of: tuple[int, ...]


@dataclass(frozen=True)
class JobSchedule:
    """A route and a start for each job.

    Attributes:
        routes: for each job the position of the chosen route in its `routes`.
        order: job numbers in the order in which every resource serves them.
        starts: for each job its start, in the unit of durations; 0 is the start of the reshard.
        makespan: the time at which the last job ends, in the unit of durations.
        proven: whether it is known that no schedule ends sooner.
        algorithm: name of the search that made it.
        serial: whether each job waits for the one before it in the order, whatever resources they occupy.
    """

    routes: tuple[int, ...]
    order: tuple[int, ...]
    starts: tuple[int, ...]
    makespan: int
    proven: bool = False
    algorithm: str = ""
    serial: bool = False


def schedule_in_order(
    jobs: JobSet, routes: Sequence[int], order: Sequence[int], serial: bool = False, algorithm: str = ""
) -> JobSchedule:
    """Return the schedule in which each job starts when all earlier jobs that share a resource with it are over.

    A job that occupies no resource starts at 0.

    Args:
        routes: for each job the position of its route in its `routes`.
        order: the job numbers, first to last.
        serial: whether a job waits for all jobs before it instead.
        algorithm: the schedule's `algorithm`, the name of the search.
    """
    free = [0] * len(jobs.class_of)
    starts, makespan = [0] * len(jobs.jobs), 0
    for j in order:
        occupied = jobs.jobs[j].routes[routes[j]]
        if occupied:
            starts[j] = makespan if serial else max(free[r] for r in occupied)
        end = starts[j] + jobs.jobs[j].duration
        for r in occupied:
            free[r] = end
        makespan = max(makespan, end)
    return JobSchedule(
        tuple(routes), tuple(order), tuple(starts), makespan, algorithm=algorithm, serial=serial
    )


def route_masks(jobs: JobSet) -> list[list[int]]:
    """Return for each job and each of its routes an integer in which the bits of its resources are set.

    Two jobs cannot run at the same time if their routes have a bit in common.
    """
    return [[sum(1 << r for r in route) for route in job.routes] for job in jobs.jobs]


def by_start(starts: Sequence[int]) -> list[int]:
    """Return the job numbers sorted by `starts`, the start of each job.

    If `starts` is of a valid schedule, `schedule_in_order` in this order starts no job later.
    """
    return sorted(range(len(starts)), key=lambda j: (starts[j], j))
