"""The order that a resharding uses unless told otherwise: both searches run and the better plan wins.

That is AlpaComm's rule (MLSys '23, section 3.2). On top of it, a plan that does not meet the bound is improved
step by step. Everything is limited by counts and not by time, as each rank works out the plan by itself.
"""

from __future__ import annotations

from dataclasses import replace

from meshweave.algorithms.reshard.order.baselines import balance, naive
from meshweave.algorithms.reshard.order.bounds import exclusive_bound
from meshweave.algorithms.reshard.order.depth_first import dfs
from meshweave.algorithms.reshard.order.improve import improve
from meshweave.algorithms.reshard.order.jobs import Jobs, Schedule
from meshweave.algorithms.reshard.order.list_greedy import greedy

MOST_FOR_DFS = 20
IMPROVE_WORK = 120_000
"""Ways of the jobs, and two more for each, times rounds of improvement; some 0.3 s."""


def best(jobs: Jobs, seed: int = 0) -> Schedule:
    """The best of all but `exact`; `how` says which found it. `proven` where it meets a bound, or where the
    depth-first search (up to 20 jobs) left nothing out."""
    goal = exclusive_bound(jobs)
    found = greedy(jobs, seed=seed, goal=goal)
    for other in (balance(jobs), naive(jobs)):
        if other.makespan < found.makespan:
            found = other
    if found.makespan <= goal:
        return replace(found, proven=True)
    if len(jobs.jobs) <= MOST_FOR_DFS:
        searched = dfs(jobs, known=found)
        if searched.proven or searched.makespan < found.makespan:
            found = searched
        if found.proven:
            return found
    rounds = max(10, IMPROVE_WORK // sum(len(job.ways) + 2 for job in jobs.jobs))
    better = improve(jobs, found, rounds, seed=seed, goal=goal)
    if better.makespan < found.makespan:
        found = replace(better, how=f"{found.how}+improve")
    return replace(found, proven=found.makespan <= goal)
