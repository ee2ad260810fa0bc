"""The baselines of AlpaComm (MLSys '23), section 3.2: no thought, and balanced senders without an order."""

from __future__ import annotations

from meshweave.algorithms.reshard.order.jobs import Jobs, Schedule, place


def naive(jobs: Jobs) -> Schedule:
    """Each job takes its first way, and they run one after another as given."""
    return place(jobs, [0] * len(jobs.jobs), range(len(jobs.jobs)), serial=True, how="naive")


def in_order(jobs: Jobs) -> Schedule:
    """Each job takes its first way, and each resource takes its jobs as given, as soon as it can."""
    return place(jobs, [0] * len(jobs.jobs), range(len(jobs.jobs)), how="in_order")


def balance(jobs: Jobs) -> Schedule:
    """Eq. 4 by its classical greedy: longest jobs first, each by the way whose most loaded resource (then all of
    them together) stays least loaded. That order is then the schedule's."""
    load = [0] * len(jobs.class_of)
    order = sorted(range(len(jobs.jobs)), key=lambda j: (-jobs.jobs[j].duration, j))
    ways = [0] * len(jobs.jobs)
    for j in order:
        job = jobs.jobs[j]

        def loaded(w: int, held: tuple[tuple[int, ...], ...] = job.ways) -> tuple[int, int, int]:
            now = [load[r] for r in held[w]]
            return max(now, default=0), sum(now), w

        ways[j] = min(range(len(job.ways)), key=loaded)
        for r in job.ways[ways[j]]:
            load[r] += job.duration
    return place(jobs, ways, order, how="balance")
