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
    """A transfer that occupies some NICs for its duration, all at once and without a break (eq. 3).

    Attributes:
        duration: above 0, in picoseconds or any other whole unit.
        routes: for each alternative the resources that the job would occupy, ascending. A route without resources
            means that nothing hinders the job, which starts at 0.
    """

    duration: int
    routes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class JobSet:
    """The jobs of one reshard, and for each resource the number of its class, such as the NICs of one host.

    Bounds use the classes: a job loads a class if each of its routes occupies some resource of that class.
    """

    jobs: tuple[TransferJob, ...]
    class_of: tuple[int, ...]


@dataclass(frozen=True)
class JobSchedule:
    """A route and a start for each job.

    Attributes:
        routes: number of the chosen route, by job.
        order: job numbers in the order in which every resource serves them.
        starts: start of each job, in the unit of durations.
        makespan: end of the last job.
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
    """Return the schedule in which each job starts once earlier ones that share a resource with it are over.

    With `serial` it waits for all before it. A job that occupies nothing starts at 0. `routes` has the number
    of each job's route, `order` the job numbers.
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
    """Return for each job and each of its routes the resources, as set bits of an integer.

    Jobs whose routes have a bit in common exclude each other.
    """
    return [[sum(1 << r for r in route) for route in job.routes] for job in jobs.jobs]


def by_start(starts: Sequence[int]) -> list[int]:
    """Return job numbers sorted by start.

    Scheduled in this order (`schedule_in_order`), no job of a valid schedule starts later than in `starts`.
    """
    return sorted(range(len(starts)), key=lambda j: (starts[j], j))
