"""AlpaComm's greedy search with randomisation (MLSys '23, section 3.2), for jobs of uneven durations, too.

The paper starts jobs in rounds: a set without overlap that involves the most devices, of several that random
orders yield. Rounds fit equal durations only. Here jobs start whenever resources get free (list scheduling; of
equal jobs it makes rounds by itself): of several orders of those that could start, the one is taken that puts the
most resources to work. Orders favour jobs on the resources with the most work ahead, as a critical resource that
idles is time lost, and a job takes the route on which the least work is waiting.
"""

from __future__ import annotations

import functools
import heapq
import random
from dataclasses import replace

from meshweave.algorithms.reshard.order.bounds import exclusive_bound
from meshweave.algorithms.reshard.order.jobs import JobSchedule, JobSet, by_start, schedule_in_order

MAX_PASSES = 32
PASS_WORK = 3_000
"""Routes that all passes together consider by default; with many jobs there is one pass, to save time."""


def greedy(jobs: JobSet, passes: int | None = None, seed: int = 0, bound: int | None = None) -> JobSchedule:
    """Return the shortest schedule of at most `passes` passes of list scheduling; all but the first are random.

    Args:
        passes: None for up to 32, fewer the more routes the jobs have (`PASS_WORK`).
        seed: seed of the random choices.
        bound: a lower bound of the schedule's length, in the unit of durations; None for `exclusive_bound(jobs)`.
            A schedule that is no longer than this ends the search and is `proven`.
    """
    bound = exclusive_bound(jobs) if bound is None else bound
    if passes is None:
        passes = max(1, min(MAX_PASSES, PASS_WORK // max(1, sum(len(job.routes) for job in jobs.jobs))))
    rng = random.Random(seed)
    lists = ListScheduler(jobs)
    best = lists.run(None)
    for _ in range(passes - 1):
        if best.makespan <= bound:
            break
        best = min(best, lists.run(rng), key=lambda schedule: schedule.makespan)
    return replace(best, proven=best.makespan <= bound, algorithm="greedy")


class ListScheduler:
    """List scheduling: when resources become free, jobs that wait are started until none fits.

    Jobs with equal routes are considered together, the one of the longest duration first.
    """

    def __init__(self, jobs: JobSet) -> None:
        self.jobs = jobs
        self.durations = [job.duration for job in jobs.jobs]
        queues: dict[tuple[tuple[int, ...], ...], list[int]] = {}
        for j in sorted(range(len(jobs.jobs)), key=lambda j: (-self.durations[j], j)):
            queues.setdefault(jobs.jobs[j].routes, []).append(j)
        queues.pop(((),), None)  # nothing to wait for
        self.routes, self.queues = list(queues), list(queues.values())
        self.masks = [[sum(1 << r for r in route) for route in routes] for routes in self.routes]
        self.always = [functools.reduce(int.__and__, masks) for masks in self.masks]
        self.options = [list(zip(*both, strict=True)) for both in zip(self.masks, self.routes, strict=True)]
        self.users: list[list[int]] = [[] for _ in jobs.class_of]
        self.shares: list[list[tuple[int, float]]] = []
        self.pressure = [0.0] * len(jobs.class_of)
        for k, routes in enumerate(self.routes):
            share: dict[int, float] = {}
            for route in routes:
                for r in route:
                    share[r] = share.get(r, 0.0) + 1 / len(routes)
            work = sum(self.durations[j] for j in self.queues[k])
            for r in share:
                self.users[r].append(k)
                self.pressure[r] += work * share[r]
            self.shares.append(list(share.items()))

    def run(self, rng: random.Random | None) -> JobSchedule:
        """Return the schedule of one pass over time.

        At each moment jobs are started in the order of the work that still waits for their busiest resource, most
        first. If `rng` is not None, three random variations of that order are compared, and the best is used.
        """
        starts, chosen = [0] * len(self.durations), [0] * len(self.durations)
        waiting = [len(queue) for queue in self.queues]
        pressure, busy, now = self.pressure[:], 0, 0
        noise = 0.0 if rng is None else 0.02 + rng.random() * rng.random()
        running: list[tuple[int, int, int]] = []
        looked_at = list(range(len(self.queues)))
        while looked_at or running:
            picked: list[tuple[int, int]] = []
            most = 0.0
            ready = self._ready(looked_at, busy, pressure)
            for _ in range(1 if rng is None or len(ready) < 2 else 3):
                if rng is not None:
                    order = sorted((need * (1 + noise * rng.random()), k) for need, k in ready)
                else:
                    order = sorted(ready)
                trial, value = self._fill([k for _, k in reversed(order)], waiting, busy, pressure)
                if not picked or value > most:
                    picked, most = trial, value
            for k, w in picked:
                j = self.queues[k][len(self.queues[k]) - waiting[k]]
                waiting[k] -= 1
                starts[j], chosen[j] = now, w
                busy |= self.masks[k][w]
                for r, share in self.shares[k]:
                    pressure[r] -= share * self.durations[j]
                heapq.heappush(running, (now + self.durations[j], j, self.masks[k][w]))
            if not running:
                break
            now, freed = running[0][0], 0
            while running and running[0][0] == now:
                mask = heapq.heappop(running)[2]
                busy &= ~mask
                freed |= mask
            used = [r for r in range(freed.bit_length()) if freed >> r & 1]
            always = self.always
            looked_at = list(
                dict.fromkeys([k for r in used for k in self.users[r] if not always[k] & busy and waiting[k]])
            )
        return schedule_in_order(self.jobs, chosen, by_start(starts))

    def _ready(self, looked_at: list[int], busy: int, pressure: list[float]) -> list[tuple[float, int]]:
        """Return the kinds that could start a job now, each with the work ahead on its most loaded resource."""
        ready = []
        for k in looked_at:
            least = -1.0
            for mask, route in self.options[k]:
                if not mask & busy:
                    ahead = 0.0
                    for r in route:
                        if pressure[r] > ahead:
                            ahead = pressure[r]
                    if ahead < least or least < 0:
                        least = ahead
            if least >= 0:
                ready.append((least, k))
        return ready

    def _fill(
        self, order: list[int], waiting: list[int], busy: int, pressure: list[float]
    ) -> tuple[list[tuple[int, int]], float]:
        """Start what can start, in that order; return it and the work ahead on the resources that it occupies."""
        picked, value = [], 0.0
        for k in order:
            if self.always[k] & busy:
                continue
            for _ in range(waiting[k]):
                least, route = 0.0, -1
                for w, (mask, occupied) in enumerate(self.options[k]):
                    if not mask & busy:
                        ahead = sum([pressure[r] for r in occupied])
                        if route < 0 or ahead < least:
                            least, route = ahead, w
                if route < 0:
                    break
                picked.append((k, route))
                value += least
                busy |= self.masks[k][route]
        return picked, value
