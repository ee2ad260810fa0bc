"""AlpaComm's greedy search with randomisation (MLSys '23, section 3.2), for jobs of uneven durations, too.

The paper starts jobs in rounds: a set without overlap that involves the most devices, of several that random
orders yield. Rounds fit equal durations only. Here jobs start whenever resources get free (list scheduling; of
equal jobs it makes rounds by itself): of several orders of those that could start, the one is taken that puts the
most resources to work. Orders favour jobs on the resources with the most work ahead, as a critical resource that
idles is time lost, and a job takes the way on which the least work is waiting.
"""

from __future__ import annotations

import functools
import heapq
import random
from dataclasses import replace

from meshweave.algorithms.reshard.order.bounds import exclusive_bound
from meshweave.algorithms.reshard.order.jobs import Jobs, Schedule, by_start, place

MOST_PASSES = 32
PASS_WORK = 3_000
"""Ways of the jobs that all passes look at by default: with many jobs there is one pass, for time's sake."""


def greedy(jobs: Jobs, rounds: int | None = None, seed: int = 0, goal: int | None = None) -> Schedule:
    """The best of some passes, the first without chance. It ends early where a pass meets `goal`, by default a
    bound that no schedule beats."""
    goal = exclusive_bound(jobs) if goal is None else goal
    if rounds is None:
        rounds = max(1, min(MOST_PASSES, PASS_WORK // max(1, sum(len(job.ways) for job in jobs.jobs))))
    rng = random.Random(seed)
    lists = Lists(jobs)
    best = lists.run(None)
    for _ in range(rounds - 1):
        if best.makespan <= goal:
            break
        found = lists.run(rng)
        if found.makespan < best.makespan:
            best = found
    return replace(best, proven=best.makespan <= goal, how="greedy")


class Lists:
    """Jobs with the same ways form a kind, of which the longest that waits comes first: what is looked at when a
    resource gets free are the kinds that could use it."""

    def __init__(self, jobs: Jobs) -> None:
        self.jobs = jobs
        self.durations = [job.duration for job in jobs.jobs]
        queues: dict[tuple[tuple[int, ...], ...], list[int]] = {}
        for j in sorted(range(len(jobs.jobs)), key=lambda j: (-self.durations[j], j)):
            queues.setdefault(jobs.jobs[j].ways, []).append(j)
        queues.pop(((),), None)  # nothing to wait for
        self.ways, self.queues = list(queues), list(queues.values())
        self.masks = [[sum(1 << r for r in way) for way in ways] for ways in self.ways]
        self.always = [functools.reduce(int.__and__, masks) for masks in self.masks]
        self.options = [list(zip(*both, strict=True)) for both in zip(self.masks, self.ways, strict=True)]
        self.users: list[list[int]] = [[] for _ in jobs.class_of]
        self.shares: list[list[tuple[int, float]]] = []
        self.pressure = [0.0] * len(jobs.class_of)
        for k, ways in enumerate(self.ways):
            share: dict[int, float] = {}
            for way in ways:
                for r in way:
                    share[r] = share.get(r, 0.0) + 1 / len(ways)
            work = sum(self.durations[j] for j in self.queues[k])
            for r in share:
                self.users[r].append(k)
                self.pressure[r] += work * share[r]
            self.shares.append(list(share.items()))

    def run(self, rng: random.Random | None) -> Schedule:
        """One pass over time. Without `rng` there is one order at each moment, by need alone."""
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
        return place(self.jobs, chosen, by_start(starts))

    def _ready(self, looked_at: list[int], busy: int, pressure: list[float]) -> list[tuple[float, int]]:
        """The kinds that could start a job now, each with the work ahead on its most loaded resource."""
        ready = []
        for k in looked_at:
            least = -1.0
            for mask, way in self.options[k]:
                if not mask & busy:
                    ahead = 0.0
                    for r in way:
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
        """Starts what it can, in that order; and the work ahead on the resources it puts to use."""
        picked, value = [], 0.0
        for k in order:
            if self.always[k] & busy:
                continue
            for _ in range(waiting[k]):
                least, way = 0.0, -1
                for w, (mask, held) in enumerate(self.options[k]):
                    if not mask & busy:
                        ahead = sum([pressure[r] for r in held])
                        if way < 0 or ahead < least:
                            least, way = ahead, w
                if way < 0:
                    break
                picked.append((k, way))
                value += least
                busy |= self.masks[k][way]
        return picked, value
