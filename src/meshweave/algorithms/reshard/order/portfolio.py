"""The order that a resharding uses by default: several searches run and the best schedule wins.

That is AlpaComm's rule (MLSys '23, section 3.2). On top of it, a plan that does not meet the bound is improved
step by step. Everything is limited by counts and not by time, as each rank works out the plan by itself.
"""

from __future__ import annotations

from dataclasses import replace

from meshweave.algorithms.reshard.order.baselines import balance, naive
from meshweave.algorithms.reshard.order.bounds import exclusive_bound
from meshweave.algorithms.reshard.order.depth_first import dfs
from meshweave.algorithms.reshard.order.improve import improve
from meshweave.algorithms.reshard.order.jobs import JobSchedule, JobSet
from meshweave.algorithms.reshard.order.list_greedy import greedy

MAX_JOBS_FOR_DFS = 20
IMPROVE_WORK = 120_000
"""Routes of the jobs, and two more for each job, times rounds of improvement; some 0.3 s."""


def best(jobs: JobSet, seed: int = 0) -> JobSchedule:
    """Return the best schedule of `greedy`, `balance`, `naive` and `dfs`, improved by local search.

    Its `algorithm` names the search that found it. It is `proven` if it meets a lower bound, which also ends the
    search, or if the depth-first search (`dfs`, for up to 20 jobs) was complete. `seed` is that of the random
    choices.
    """
    goal = exclusive_bound(jobs)
    schedule = greedy(jobs, seed=seed, bound=goal)
    for other in (balance(jobs), naive(jobs)):
        if other.makespan < schedule.makespan:
            schedule = other
    if schedule.makespan <= goal:
        return replace(schedule, proven=True)
    if len(jobs.jobs) <= MAX_JOBS_FOR_DFS:
        searched = dfs(jobs, known=schedule)
        if searched.proven or searched.makespan < schedule.makespan:
            schedule = searched
        if schedule.proven:
            return schedule
    rounds = max(10, IMPROVE_WORK // sum(len(job.routes) + 2 for job in jobs.jobs))
    better = improve(jobs, schedule, rounds, seed=seed, goal=goal)
    if better.makespan < schedule.makespan:
        schedule = replace(better, algorithm=f"{schedule.algorithm}+improve")
    return replace(schedule, proven=schedule.makespan <= goal)
