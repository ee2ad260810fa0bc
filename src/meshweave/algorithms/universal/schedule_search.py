"""The best schedule of a rank's local products: exhaustive search over stages, by branch and bound.

Slicing Is All You Need, section 4.3: of every possible selection of stages the one of least cost. See `schedule`
for what a stage is and what it costs.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from meshweave.algorithms.universal.schedule import (
    ScheduleGraph,
    StageLimits,
    Selection,
    Stage,
    ScheduleState,
    next_state,
    bit_set,
    staged_s,
    cost_greedy,
    direct,
    greedy,
    stage_s,
    unset,
)

EPS = 1e-9
"""Relative difference of two sums of the same times in different orders, and far below any that matters."""


@dataclass(frozen=True)
class ScheduleSearchResult:
    """The best schedule that a search met. No schedule takes under `bound_seconds`; `proven` where the two agree
    (to 1e-9). `states` were weighed."""

    stages: tuple[Stage, ...]
    seconds: float
    bound_seconds: float
    proven: bool
    states: int


def exhaustive(
    graph: ScheduleGraph,
    limits: StageLimits,
    budget_s: float = math.inf,
    max_states: int = 200_000,
) -> ScheduleSearchResult:
    """Searches all selections of all stages for the least `cost` (section 4.3), by branch and bound.

    What may follow depends on the state only, so each is kept once, with the least that leads to it. Depths
    take turns at extending their most promising state, which soon meets good schedules and raises the bound, too.
    It ends after `budget_s` seconds or `max_states` states; where the latter stops it first, the same input gives
    the same result.
    """
    stop = time.monotonic() + budget_s
    best = min((make(graph, limits) for make in (direct, greedy, cost_greedy)), key=lambda s: staged_s(s, graph))
    least, bound = staged_s(best, graph), _LowerBound(graph, limits)
    start: ScheduleState = (0, 0, 0)
    goal: ScheduleState = ((1 << len(graph.products)) - 1, bit_set(graph.needed_fetches), bit_set(graph.accumulating))
    known: dict[ScheduleState, tuple[float, ScheduleState, Stage | None]] = {start: (0.0, start, None)}
    heaps: list[list[tuple[float, int, float, ScheduleState]]] = [[(bound(start), 0, 0.0, start)]]
    states, spent = 0, False
    while any(heaps) and not spent:
        for depth in range(len(heaps)):
            if spent or not heaps[depth]:
                continue
            entry = heapq.heappop(heaps[depth])
            guess, _, so_far, state = entry
            if so_far > known[state][0] or guess >= least * (1 - EPS):
                continue
            if depth + 1 == len(heaps):
                heaps.append([])
            for stage in _selections(graph, state, limits):
                states += 1
                if states > max_states or (not states % 64 and time.monotonic() > stop):
                    heapq.heappush(heaps[depth], entry)  # not all of what follows it was weighed
                    states, spent = min(states, max_states), True
                    break
                child, total = next_state(state, stage), so_far + stage_s(stage, graph)
                if child in known and known[child][0] <= total:
                    continue
                guess_child = total + bound(child)
                if guess_child >= least * (1 - EPS):
                    continue
                known[child] = total, state, stage
                if child == goal:
                    best, least = _path(known, goal), total
                else:
                    heapq.heappush(heaps[depth + 1], (guess_child, states, total, child))
    least = staged_s(best, graph)
    floor = min([least, *(heap[0][0] for heap in heaps if heap)])
    return ScheduleSearchResult(best, least, floor, floor >= least * (1 - EPS), states)


class _LowerBound:
    """No less than this is still to come from a state.

    The stages sum to their compute and what communication sticks out, or the other way round. A transfer longer
    than the products of any stage sticks out by the difference; before the first product its tiles come, after the
    last one its result goes, with nothing to hide them. Alike for compute, beside fetches alone (what needs
    the last tile comes after all of them) and beside accumulations alone (before the first comes its product).
    """

    def __init__(self, graph: ScheduleGraph, limits: StageLimits) -> None:
        self.graph = graph
        self.kinds = ((1, 0), (0, 1)) if graph.duplex else ((1, 1), (1, 0), (0, 1))
        self.users = [
            [i for i, p in enumerate(graph.products) if t in p.needs] for t in range(len(graph.fetches))
        ]
        compute = [product.seconds for product in graph.products]
        fetches = [fetch.seconds for fetch in graph.fetches]
        gives = [product.accumulate_s for product in graph.products]
        top = _top(compute, limits.products)
        self.fetch_out = [max(0.0, t - top) for t in fetches]
        self.give_out = [max(0.0, t - top) for t in gives]
        self.compute_out = []
        for f, g in self.kinds:
            top = f * _top(fetches, limits.fetches) + g * _top(gives, limits.accumulates)
            self.compute_out.append([max(0.0, t - top) for t in compute])

    def __call__(self, state: ScheduleState) -> float:
        graph, products = self.graph, self.graph.products
        todo = unset(state[0], len(products))
        fetches = graph.unfetched(state)
        gives = [i for i in graph.accumulating if not state[2] >> i & 1]
        compute = sum(products[i].seconds for i in todo)
        fetch_s, give_s = (
            sum(graph.fetches[t].seconds for t in fetches),
            sum(products[i].accumulate_s for i in gives),
        )
        fetch_out, give_out = sum(self.fetch_out[t] for t in fetches), sum(self.give_out[i] for i in gives)
        lead = tail = 0.0
        if todo:
            hidden = {t: graph.fetches[t].seconds - self.fetch_out[t] for t in fetches}
            lead = min(sum(hidden.get(t, 0.0) for t in set(products[i].needs)) for i in todo)
            tail = min(products[i].accumulate_s - self.give_out[i] for i in todo)
        found = 0.0
        for (f, g), out in zip(self.kinds, self.compute_out, strict=True):
            rest = f * fetch_s + g * give_s + sum(out[i] for i in todo)
            if not g and fetches:
                rest += min(sum(products[i].seconds - out[i] for i in self.users[t]) for t in fetches)
            if not f and gives and not any(state[0] >> i & 1 for i in gives):
                rest += min(products[i].seconds - out[i] for i in gives)
            found = max(found, rest, compute + f * (fetch_out + lead) + g * (give_out + tail))
        return found


def _selections(graph: ScheduleGraph, state: ScheduleState, limits: StageLimits) -> Iterator[Stage]:
    """Every stage that may be next, but none to which more could be added at no cost (whatever is done sooner
    only helps later), and of items that are alike the first ones only."""
    ready, missing, owed = graph.ready(state), graph.unfetched(state), graph.unaccumulated(state)
    products, tiles = graph.products, graph.fetches
    users = {t: tuple(i for i, need in enumerate(graph.needs) if need >> t & 1) for t in missing}
    fetch_s, give_s = {t: tiles[t].seconds for t in missing}, {i: products[i].accumulate_s for i in owed}
    compute_s = {i: products[i].seconds for i in ready}
    fetch_sets = _subsets(missing, limits.fetches, {t: (tiles[t].seconds, users[t]) for t in missing})
    give_sets = _subsets(owed, limits.accumulates, give_s)
    for chosen in _subsets(ready, limits.products, {i: (compute_s[i], products[i].accumulate_s) for i in ready}):
        compute = sum(compute_s[i] for i in chosen)
        room = _least(compute_s, chosen, limits.products)
        for fetches in fetch_sets:
            inward = sum(fetch_s[t] for t in fetches)
            fetch_room = _least(fetch_s, fetches, limits.fetches)
            for gives in give_sets:
                outward = sum(give_s[i] for i in gives)
                give_room = _least(give_s, gives, limits.accumulates)
                whole = max(compute, graph.communication_s(inward, outward))
                more = (
                    compute + room,
                    graph.communication_s(inward + fetch_room, outward),
                    graph.communication_s(inward, outward + give_room),
                )
                if min(more) > whole and (chosen or fetches or gives):
                    yield Stage(chosen, fetches, gives)


def _subsets(items: Sequence[int], most: int, kinds: Mapping[int, Hashable]) -> list[Selection]:
    """Of up to `most` items, larger ones first. Items of one kind are taken in order."""
    twin = {
        item: next((j for j in reversed(items[:n]) if kinds[j] == kinds[item]), None)
        for n, item in enumerate(items)
    }
    sizes = range(min(most, len(items)), -1, -1)
    chosen = (chosen for size in sizes for chosen in combinations(items, size))
    return [c for c in chosen if all(twin[item] is None or twin[item] in c for item in c)]


def _least(times: Mapping[int, float], chosen: Selection, most: int) -> float:
    """Seconds of the shortest item that could be chosen, too."""
    if len(chosen) == most:
        return math.inf
    return min((t for item, t in times.items() if item not in chosen), default=math.inf)


def _path(known: Mapping[ScheduleState, tuple[float, ScheduleState, Stage | None]], goal: ScheduleState) -> tuple[Stage, ...]:
    stages: list[Stage] = []
    _, before, stage = known[goal]
    while stage is not None:
        stages.append(stage)
        _, before, stage = known[before]
    return tuple(reversed(stages))


def _top(times: Sequence[float], count: int) -> float:
    return sum(sorted(times)[-count:])
