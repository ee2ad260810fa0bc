"""The best schedule of a rank's local products: exhaustive search over stages, by branch and bound.

Slicing Is All You Need, section 4.3: of all possible sequences of stages the one of least cost. See `stages` for
what a stage is and what it costs.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from meshweave.algorithms.universal.config import StageLimits
from meshweave.algorithms.universal.issue_order import Selection
from meshweave_studies.slicing.stages import (
    MAX_SELECTIONS,
    IssueStage,
    ScheduleGraph,
    ScheduleState,
    bit_set,
    cost_greedy,
    direct,
    greedy,
    next_state,
    stage_s,
    staged_s,
    unset,
)

EPS = 1e-9
"""The relative difference up to which two times are equal: sums of the same times in different orders are."""

KnownStates = dict[ScheduleState, tuple[float, ScheduleState, IssueStage | None]]
"""For each state the least seconds that lead to it, the state before it, and the stage in between."""


@dataclass(frozen=True)
class ScheduleSearchResult:
    """The best schedule that a search found.

    Attributes:
        stages: the stages of the schedule.
        seconds: the time of all stages together.
        bound_seconds: a lower bound of the time of any schedule.
        proven: whether `seconds` equals `bound_seconds`, to 1e-9 of it.
        states: the number of states that the search visited.
    """

    stages: tuple[IssueStage, ...]
    seconds: float
    bound_seconds: float
    proven: bool
    states: int


def exhaustive(
    graph: ScheduleGraph,
    limits: StageLimits,
    budget_s: float = math.inf,
    max_states: int = 200_000,
    max_selections: int = MAX_SELECTIONS,
) -> ScheduleSearchResult:
    """Return the fastest sequence of stages (least `staged_s`, section 4.3) that branch and bound finds.

    The search starts from the best of `direct`, `greedy` and `cost_greedy`. A state (`ScheduleGraph`) is kept
    once, with the least seconds that lead to it. For each number of stages in turn, the search extends the state
    with the least lower bound.

    Args:
        limits: the most products, fetches and accumulates of one stage.
        budget_s: seconds after which the search ends; the result then depends on the computer's speed.
        max_states: number of states after which the search ends. Equal input then gives equal results.
        max_selections: the most choices per stage that `cost_greedy` compares.
    """
    stop = time.monotonic() + budget_s
    heuristics = (
        direct(graph, limits), greedy(graph, limits), cost_greedy(graph, limits, max_selections)
    )  # fmt: skip
    best = min(heuristics, key=lambda stages: staged_s(stages, graph))
    best_s, lower_bound = staged_s(best, graph), _LowerBound(graph, limits)
    start: ScheduleState = (0, 0, 0)
    all_products = (1 << len(graph.products)) - 1
    goal: ScheduleState = (all_products, bit_set(graph.needed_fetches), bit_set(graph.accumulating))
    known: KnownStates = {start: (0.0, start, None)}
    heaps: list[list[tuple[float, int, float, ScheduleState]]] = [[(lower_bound(start), 0, 0.0, start)]]
    states, is_spent = 0, False
    while any(heaps) and not is_spent:
        for depth in range(len(heaps)):
            if is_spent or not heaps[depth]:
                continue
            entry = heapq.heappop(heaps[depth])
            bound_s, _, state_s, state = entry
            if state_s > known[state][0] or bound_s >= best_s * (1 - EPS):
                continue
            if depth + 1 == len(heaps):
                heaps.append([])
            for stage in _next_stages(graph, state, limits):
                states += 1
                if states > max_states or (not states % 64 and time.monotonic() > stop):
                    heapq.heappush(heaps[depth], entry)  # some of what may follow it was not weighed
                    states, is_spent = min(states, max_states), True
                    break
                child, child_s = next_state(state, stage), state_s + stage_s(stage, graph)
                if child in known and known[child][0] <= child_s:
                    continue
                child_bound_s = child_s + lower_bound(child)
                if child_bound_s >= best_s * (1 - EPS):
                    continue
                known[child] = child_s, state, stage
                if child == goal:
                    best, best_s = _path(known, goal), child_s
                else:
                    heapq.heappush(heaps[depth + 1], (child_bound_s, states, child_s, child))
    best_s = staged_s(best, graph)
    least_s = min([best_s, *(heap[0][0] for heap in heaps if heap)])
    return ScheduleSearchResult(best, best_s, least_s, least_s >= best_s * (1 - EPS), states)


class _LowerBound:
    """A lower bound on the seconds still to come from a state.

    The stages take their compute and the communication that it does not hide, or the other way round. A transfer
    longer than the products of any stage exposes at least the difference. Nothing hides the fetches of the first
    product or the accumulate of the last. The same holds for compute, beside fetches alone (whatever needs the
    last tile comes after all of them) and beside accumulates alone (the product of the first comes before it).
    """

    def __init__(self, graph: ScheduleGraph, limits: StageLimits) -> None:
        self.graph = graph
        # Weights of fetches and accumulates in the communication that a bound counts.
        self.weights = ((1, 1), (1, 0), (0, 1))
        self.users = [
            [i for i, product in enumerate(graph.products) if tile in product.needs]
            for tile in range(len(graph.fetches))
        ]
        compute = [product.seconds for product in graph.products]
        fetches = [fetch.seconds for fetch in graph.fetches]
        accumulates = [product.accumulate_s for product in graph.products]
        longest = _sum_of_largest(compute, limits.products)
        self.exposed_fetch_s = [max(0.0, seconds - longest) for seconds in fetches]
        self.exposed_accumulate_s = [max(0.0, seconds - longest) for seconds in accumulates]
        self.exposed_compute_s = []
        for fetch_weight, accumulate_weight in self.weights:
            longest = fetch_weight * _sum_of_largest(fetches, limits.fetches)
            longest += accumulate_weight * _sum_of_largest(accumulates, limits.accumulates)
            self.exposed_compute_s.append([max(0.0, seconds - longest) for seconds in compute])

    def __call__(self, state: ScheduleState) -> float:
        graph, products = self.graph, self.graph.products
        todo = unset(state[0], len(products))
        fetches = graph.unfetched(state)
        accumulates = [i for i in graph.accumulating if not state[2] >> i & 1]
        compute_s = sum(products[i].seconds for i in todo)
        fetch_s = sum(graph.fetches[tile].seconds for tile in fetches)
        accumulate_s = sum(products[i].accumulate_s for i in accumulates)
        exposed_fetch_s = sum(self.exposed_fetch_s[tile] for tile in fetches)
        exposed_accumulate_s = sum(self.exposed_accumulate_s[i] for i in accumulates)
        first_s = last_s = 0.0
        if todo:
            hidden = {tile: graph.fetches[tile].seconds - self.exposed_fetch_s[tile] for tile in fetches}
            first_s = min(sum(hidden.get(tile, 0.0) for tile in set(products[i].needs)) for i in todo)
            last_s = min(products[i].accumulate_s - self.exposed_accumulate_s[i] for i in todo)
        bound_s = 0.0
        for (fetch_weight, accumulate_weight), exposed_s in zip(
            self.weights, self.exposed_compute_s, strict=True
        ):
            by_transfers_s = fetch_weight * fetch_s + accumulate_weight * accumulate_s
            by_transfers_s += sum(exposed_s[i] for i in todo)
            if not accumulate_weight and fetches:
                by_transfers_s += min(
                    sum(products[i].seconds - exposed_s[i] for i in self.users[tile]) for tile in fetches
                )
            if not fetch_weight and accumulates and not any(state[0] >> i & 1 for i in accumulates):
                by_transfers_s += min(products[i].seconds - exposed_s[i] for i in accumulates)
            by_compute_s = (
                compute_s
                + fetch_weight * (exposed_fetch_s + first_s)
                + accumulate_weight * (exposed_accumulate_s + last_s)
            )
            bound_s = max(bound_s, by_transfers_s, by_compute_s)
        return bound_s


def _next_stages(graph: ScheduleGraph, state: ScheduleState, limits: StageLimits) -> Iterator[IssueStage]:
    """Yield every stage that may be next and to which nothing can be added at no cost.

    What can be done at no cost is best done now. Of items that are alike only the first ones are taken.
    """
    ready, unfetched, unaccumulated = graph.ready(state), graph.unfetched(state), graph.unaccumulated(state)
    compute_s = {i: graph.products[i].seconds for i in ready}
    fetch_s = {tile: graph.fetches[tile].seconds for tile in unfetched}
    accumulate_s = {i: graph.products[i].accumulate_s for i in unaccumulated}
    users = {tile: tuple(i for i, need in enumerate(graph.needs) if need >> tile & 1) for tile in unfetched}
    product_kinds = {i: (compute_s[i], graph.products[i].accumulate_s) for i in ready}
    fetch_kinds = {tile: (fetch_s[tile], users[tile]) for tile in unfetched}
    fetch_sets = _subsets(unfetched, limits.fetches, fetch_kinds)
    accumulate_sets = _subsets(unaccumulated, limits.accumulates, accumulate_s)
    for products in _subsets(ready, limits.products, product_kinds):
        products_s = sum(compute_s[i] for i in products)
        next_product_s = _shortest_other(compute_s, products, limits.products)
        for fetches in fetch_sets:
            fetches_s = sum(fetch_s[tile] for tile in fetches)
            next_fetch_s = _shortest_other(fetch_s, fetches, limits.fetches)
            for accumulates in accumulate_sets:
                accumulates_s = sum(accumulate_s[i] for i in accumulates)
                next_accumulate_s = _shortest_other(accumulate_s, accumulates, limits.accumulates)
                duration_s = max(products_s, fetches_s + accumulates_s)
                lengthened_s = min(
                    products_s + next_product_s,
                    fetches_s + next_fetch_s + accumulates_s,
                    fetches_s + (accumulates_s + next_accumulate_s),
                )
                if lengthened_s > duration_s and (products or fetches or accumulates):
                    yield IssueStage(products, fetches, accumulates)


def _subsets(items: Sequence[int], most: int, kinds: Mapping[int, Hashable]) -> list[Selection]:
    """Return the subsets of up to `most` items, larger ones first. Items of one kind are taken in order."""
    twin = {
        item: next((other for other in reversed(items[:n]) if kinds[other] == kinds[item]), None)
        for n, item in enumerate(items)
    }
    sizes = range(min(most, len(items)), -1, -1)
    subsets = (subset for size in sizes for subset in combinations(items, size))
    return [
        subset for subset in subsets if all(twin[item] is None or twin[item] in subset for item in subset)
    ]


def _shortest_other(times: Mapping[int, float], selected: Selection, most: int) -> float:
    """Return the seconds of the shortest item that could be selected as well."""
    if len(selected) == most:
        return math.inf
    return min((seconds for item, seconds in times.items() if item not in selected), default=math.inf)


def _path(known: KnownStates, goal: ScheduleState) -> tuple[IssueStage, ...]:
    """Return the stages that lead to a known state."""
    stages: list[IssueStage] = []
    _, state, stage = known[goal]
    while stage is not None:
        stages.append(stage)
        _, state, stage = known[state]
    return tuple(reversed(stages))


def _sum_of_largest(times: Sequence[float], count: int) -> float:
    return sum(sorted(times)[-count:])
