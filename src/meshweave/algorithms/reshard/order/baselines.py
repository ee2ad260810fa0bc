"""The baselines of AlpaComm (MLSys '23), section 3.2: first senders, and balanced senders without an order."""

from __future__ import annotations

from meshweave.algorithms.reshard.order.jobs import JobSchedule, JobSet, schedule_in_order


def naive(jobs: JobSet) -> JobSchedule:
    """Return the schedule that runs the jobs one after another in the order of `jobs`, each by its first route."""
    return schedule_in_order(
        jobs, [0] * len(jobs.jobs), range(len(jobs.jobs)), serial=True, algorithm="naive"
    )


def in_order(jobs: JobSet) -> JobSchedule:
    """Return the schedule in which each resource serves its jobs in the order of `jobs`, by their first routes."""
    return schedule_in_order(jobs, [0] * len(jobs.jobs), range(len(jobs.jobs)), algorithm="in_order")


def balance(jobs: JobSet) -> JobSchedule:
    """Return the schedule that balances the load of resources greedily, longest jobs first (AlpaComm, eq. 4).

    Each job takes the route whose busiest resource has the least work so far; ties go to the least work in all.
    """
    load = [0] * len(jobs.class_of)
    order = sorted(range(len(jobs.jobs)), key=lambda j: (-jobs.jobs[j].duration, j))
    routes = [0] * len(jobs.jobs)
    for j in order:
        job = jobs.jobs[j]

        def loads_after(
            w: int, routes_of_job: tuple[tuple[int, ...], ...] = job.routes
        ) -> tuple[int, int, int]:
            now = [load[r] for r in routes_of_job[w]]
            return max(now, default=0), sum(now), w

        routes[j] = min(range(len(job.routes)), key=loads_after)
        for r in job.routes[routes[j]]:
            load[r] += job.duration
    return schedule_in_order(jobs, routes, order, algorithm="balance")
