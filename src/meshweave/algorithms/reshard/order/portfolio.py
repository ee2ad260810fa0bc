"""The order that a resharding uses by default: several searches run and the best schedule wins.

That is AlpaComm's rule (MLSys '23, section 3.2). On top of it, a plan that does not meet the bound is improved
step by step. Everything is limited by counts and not by time, as each rank works out the plan by itself.
"""

from __future__ import annotations

import random
from dataclasses import replace

from meshweave.algorithms.reshard.order.baselines import balance, naive
from meshweave.algorithms.reshard.order.bounds import exclusive_bound
from meshweave.algorithms.reshard.order.depth_first import dfs
from meshweave.algorithms.reshard.order.jobs import (
    JobSchedule,
    JobSet,
    by_start,
    route_masks,
    schedule_in_order,
)
from meshweave.algorithms.reshard.order.list_greedy import greedy

# --- improving a sequence ---------------------------------------------------------------------------------

# Improve a schedule by taking a few jobs out and putting each back where it costs least (iterated greedy).
#
# Ruiz and Stuetzle (2007) for flow shops; the price of a place is that of Mastrolilli and Gambardella (2000)
# for flexible job shops: the longest path through the job there, from what must come before it (its head) and
# what must come after it (its tail), which needs no new placement of all the others.


def improve(jobs: JobSet, schedule: JobSchedule, rounds: int, seed: int = 0, goal: int = 0) -> JobSchedule:
    """Return a schedule that ends no later than `schedule`, by local search.

    Args:
        rounds: the most rounds, in each of which a few jobs are taken out and put back.
        seed: seed of the random choices.
        goal: a length, in the unit of durations; the search stops when the best schedule is no longer.
    """
    rng = random.Random(seed)
    line = _JobSequence(jobs, schedule)
    best, best_routes, best_order = line.makespan, line.routes[:], line.order[:]
    now, routes, order = best, best_routes, best_order
    # A little worse is accepted now and then, or the search would stay where no small step helps.
    slack = sum(job.duration for job in jobs.jobs) / max(1, len(jobs.jobs)) / 8
    for _ in range(rounds):
        if best <= goal or len(order) < 2:
            break
        line.take_out(rng)
        line.put_back(rng)
        luck = rng.random()
        if line.makespan <= now + slack * luck * luck * luck * luck:
            now, routes, order = line.makespan, line.routes[:], line.order[:]
            if now < best:
                best, best_routes, best_order = now, routes, order
        else:
            line.reset(routes, order)
    if best >= schedule.makespan:
        return schedule
    first = schedule_in_order(jobs, best_routes, best_order)
    return schedule_in_order(jobs, best_routes, by_start(first.starts), algorithm=schedule.algorithm)


class _JobSequence:
    """Jobs in order with their routes, and for each job its end and the longest path from its start to the end."""

    def __init__(self, jobs: JobSet, schedule: JobSchedule) -> None:
        self.durations = [job.duration for job in jobs.jobs]
        self.routes_of = [job.routes for job in jobs.jobs]
        self.masks = route_masks(jobs)
        self.resources = len(jobs.class_of)
        self.ends, self.rests = [0] * len(self.durations), [0] * len(self.durations)
        self.out: list[int] = []
        self.reset(list(schedule.routes), list(schedule.order))

    def reset(self, routes: list[int], order: list[int]) -> None:
        """Take other routes, by job, and another order of jobs."""
        self.routes, self.order = routes[:], order[:]
        self.measure()

    def measure(self) -> None:
        """Compute the makespan, and for each job the longest paths up to its end and from its start."""
        occupied = [self.routes_of[j][self.routes[j]] for j in self.order]
        self.makespan = 0
        for order, result in (
            (zip(self.order, occupied, strict=True), self.ends),
            (zip(reversed(self.order), reversed(occupied), strict=True), self.rests),
        ):
            free = [0] * self.resources
            for j, route in order:
                t = 0
                for r in route:
                    if free[r] > t:
                        t = free[r]
                t += self.durations[j]
                for r in route:
                    free[r] = t
                result[j] = t
        self.makespan = max([self.ends[j] for j in self.order], default=0)

    def take_out(self, rng: random.Random) -> None:
        """Take out one job of a longest path, and up to three more, mostly of such a path, too."""
        ends, rests, durations = self.ends, self.rests, self.durations
        critical = [j for j in self.order if ends[j] + rests[j] - durations[j] == self.makespan]
        self.out = []
        for n in range(1 + int(rng.random() * 4)):
            pool = critical if n == 0 or rng.random() < 0.5 else self.order
            j = pool[int(rng.random() * len(pool))]
            if j not in self.out:
                self.out.append(j)
        self.order = [j for j in self.order if j not in self.out]

    def put_back(self, rng: random.Random) -> None:
        """Insert the jobs that were taken out, one after the other, each where it costs least."""
        for j in self.out:
            self.measure()
            self.insert(j, rng)
        self.measure()

    def insert(self, j: int, rng: random.Random) -> None:
        """Insert a job by the route and at the place with the shortest longest path; ties are broken at random."""
        least = -1
        choices: list[tuple[int, int]] = []
        order, ends, rests = self.order, self.ends, self.rests
        in_use = [(n, i, self.masks[i][self.routes[i]]) for n, i in enumerate(order)]
        for w, mask in enumerate(self.masks[j]):
            rivals = [(n, i) for n, i, other in in_use if other & mask]
            tails, tail = [0], 0
            for _, i in reversed(rivals):
                if rests[i] > tail:
                    tail = rests[i]
                tails.append(tail)
            head, at = 0, 0
            for n, i in rivals:
                path = head + tails.pop()
                if path <= least or least < 0:
                    if path != least:
                        least, choices = path, []
                    choices.append((w, at))
                if ends[i] > head:
                    head = ends[i]
                at = n + 1
            path = head
            if path <= least or least < 0:
                if path != least:
                    least, choices = path, []
                choices.append((w, at))
        route, at = choices[int(rng.random() * len(choices))]
        self.routes[j] = route
        order.insert(at, j)


# --- portfolio --------------------------------------------------------------------------------------------

MAX_JOBS_FOR_DFS = 20
IMPROVE_WORK = 120_000
"""Routes of the jobs, and two more for each job, times rounds of improvement; some 0.3 s."""


def best(jobs: JobSet, seed: int = 0) -> JobSchedule:
    """Return the best schedule of `greedy`, `balance`, `naive` and `dfs`, improved by local search.

    The result's `algorithm` names the search that found it. It is `proven` if its length equals a lower bound,
    which also ends the search, or if the depth-first search (`dfs`, for up to 20 jobs) was complete. `seed` is the
    seed of the random choices.
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
