"""AlpaComm's depth-first search with pruning (MLSys '23, section 3.2): which job is next, and by which route.

The tree holds the jobs in order of their starts, so that it meets a schedule once and not once per order that
yields it. A state is what is left to do and when each resource is free again; three arguments thin out the tree
without loss of an optimum:

- a job may be next only if it starts before any other could be over, else that other one fits in front of it at no
  cost (the active schedules of Giffler and Thompson, 1960);
- of jobs alike in duration and routes the first one goes first;
- a state met before, up to exchange of resources that all jobs treat alike, leads to nothing new.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

from meshweave.algorithms.reshard.order.baselines import balance
from meshweave.algorithms.reshard.order.bounds import ResourceLoad, exclusive_bound, resource_loads
from meshweave.algorithms.reshard.order.jobs import JobSchedule, JobSet, by_start, schedule_in_order
from meshweave.algorithms.reshard.order.list_greedy import greedy

MAX_NODES = 2_000
"""Some 60 ms with 20 jobs: the paper's search, too, is of use up to about that many."""
MAX_LOADS = 24

Trail: TypeAlias = "tuple[int, int, int, Trail | None]"
"""A job, its route, its start, and what came before."""
State: TypeAlias = "tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], Trail | None]"
"""When each resource is free, the jobs left, the duration left for each load, and the trail so far."""


def dfs(jobs: JobSet, max_nodes: int = MAX_NODES, known: JobSchedule | None = None) -> JobSchedule:
    """Return the best schedule found by depth-first search; it is `proven` if no schedule can be shorter.

    Args:
        max_nodes: about the most states that the search visits.
        known: a schedule that the result must beat or be; None for the better one of `balance` and one pass of
            `greedy`.
    """
    loads = resource_loads(jobs)
    goal = exclusive_bound(jobs, loads)
    if known is None:
        known = min(balance(jobs), greedy(jobs, passes=1, bound=goal), key=lambda s: s.makespan)
    search = _DepthFirstSearch(jobs, loads, known.makespan)
    nodes = 0
    while search.stack and search.least > goal and nodes < max_nodes:
        nodes += search.step()
    best = search.schedule() or known
    proven = best.makespan <= goal or not search.stack
    return replace(best, proven=proven, algorithm="dfs")


class _DepthFirstSearch:
    def __init__(self, jobs: JobSet, loads: list[ResourceLoad], least: int) -> None:
        self.jobs, self.least = jobs, least
        self.durations = [job.duration for job in jobs.jobs]
        self.routes = [job.routes for job in jobs.jobs]
        dense = sorted(loads, key=lambda load: -load.total / load.size)[:MAX_LOADS]
        self.sets = [tuple(r for r in range(len(jobs.class_of)) if load.resources >> r & 1) for load in dense]
        self.loads_of: list[list[int]] = [[] for _ in jobs.jobs]
        for n, load in enumerate(dense):
            for j in load.members:
                self.loads_of[j].append(n)
        todo = tuple(j for j in self._longest_first() if self.routes[j][0])
        self.twin: dict[int, int] = {}
        last: dict[object, int] = {}
        for j in todo:
            kind = self.durations[j], self.routes[j]
            if kind in last:
                self.twin[j] = last[kind]
            last[kind] = j
        self.alike = _alike(jobs)
        self.seen: dict[tuple[tuple[int, ...], tuple[int, ...]], None] = {}
        self.best: Trail | None = None
        free = (0,) * len(jobs.class_of)
        self.stack: list[tuple[int, State]] = []
        if todo:
            self.stack = [(0, (free, todo, tuple(load.total for load in dense), None))]

    def step(self) -> int:
        """Open the state on top of the stack; return the number of states visited by that."""
        bound, state = self.stack.pop()
        free, todo, _, trail = state
        if bound >= self.least:
            return 0
        now = trail[2] if trail else 0
        soonest, options = -1, []
        for n, j in enumerate(todo):
            if self.twin.get(j, -1) in todo[:n]:
                continue
            for w, route in enumerate(self.routes[j]):
                start = now
                for r in route:
                    if free[r] > start:
                        start = free[r]
                end = start + self.durations[j]
                if soonest < 0 or end < soonest:
                    soonest = end
                options.append((start, n, w))
        opened, nodes = [], 1 + len(options) // 16
        for start, n, w in options:
            if start < soonest:
                nodes += 1
                child = self._child(start, n, w, state)
                if child is not None:
                    opened.append((start, child[0], n, w, child))
        opened.sort(key=lambda entry: entry[:4], reverse=True)
        self.stack.extend(entry[4] for entry in opened)
        return nodes

    def _child(self, start: int, n: int, w: int, state: State) -> tuple[int, State] | None:
        """Return the state after that job, or None if it cannot lead to anything new or better."""
        free, todo, left, trail = state
        j = todo[n]
        end = start + self.durations[j]
        then = [t if t > start else start for t in free]  # nothing starts before this job any more
        for r in self.routes[j][w]:
            then[r] = end
        rest = list(left)
        for at in self.loads_of[j]:
            rest[at] -= self.durations[j]
        bound = max(then)
        for at, resources in enumerate(self.sets):
            if rest[at]:
                total = rest[at] + sum([then[r] for r in resources])
                bound = max(bound, -(-total // len(resources)))
        if bound >= self.least:
            return None
        others = todo[:n] + todo[n + 1 :]
        step: Trail = (j, w, start, trail)
        if not others:
            self.least, self.best = bound, step
            return None
        key = then[:]
        for group in self.alike:
            for r, t in zip(group, sorted([then[r] for r in group]), strict=True):
                key[r] = t
        met = (others, tuple(key))
        if met in self.seen:
            return None
        self.seen[met] = None
        return bound, (tuple(then), others, tuple(rest), step)

    def schedule(self) -> JobSchedule | None:
        """Return the best schedule found; None if none is better than the known one."""
        if self.best is None:
            return None
        starts, routes = [0] * len(self.durations), [0] * len(self.durations)
        trail: Trail | None = self.best
        while trail is not None:
            j, routes[j], starts[j], trail = trail
        return schedule_in_order(self.jobs, routes, by_start(starts))

    def _longest_first(self) -> list[int]:
        return sorted(range(len(self.durations)), key=lambda j: (-self.durations[j], j))


def _alike(jobs: JobSet) -> list[list[int]]:
    """Return groups of resources of which any two can be exchanged in all jobs without changing the jobs."""
    users: dict[int, list[frozenset[frozenset[int]]]] = {}
    kinds = dict.fromkeys(frozenset(frozenset(route) for route in job.routes) for job in jobs.jobs)
    for kind in kinds:
        for r in sorted({r for route in kind for r in route}):
            users.setdefault(r, []).append(kind)
    groups: list[list[int]] = []
    for r in sorted(users):
        for group in groups:
            swap = {r: group[0], group[0]: r}
            touched = users[r] + users[group[0]]
            if len(users[r]) == len(users[group[0]]) and all(
                frozenset(frozenset(swap.get(x, x) for x in route) for route in kind) == kind
                for kind in touched
            ):
                group.append(r)
                break
        else:
            groups.append([r])
    return [group for group in groups if len(group) > 1]
