"""Schedules of a rank's local products: every one is legal, and none beats the exhaustive one or its bound."""

from __future__ import annotations

import random
import time
from functools import cache
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshweave.algorithms.universal.config import StageLimits
from meshweave.algorithms.universal.issue_order import IssueOrder
from meshweave_studies.slicing.stage_search import ScheduleSearchResult, exhaustive
from meshweave_studies.slicing.stages import (
    FetchNode,
    IssueStage,
    ProductNode,
    ScheduleGraph,
    cost_greedy,
    direct,
    flatten_stages,
    greedy,
    stage_s,
    staged_s,
)
from sampling import examples
from universal_pipelined import pipelined_s

HEURISTICS = (direct, greedy, cost_greedy)
quick = examples(150)


@st.composite
def graphs(draw: st.DrawFn, products: int = 9, fetches: int = 7, gives: bool = True) -> ScheduleGraph:
    """Any bipartite graph: shared, local and useless tiles, equal and unequal times, results kept and given."""
    seconds = st.integers(1, 6) if draw(st.booleans()) else st.integers(0, 40)
    tiles = draw(st.lists(seconds, max_size=fetches))
    needs = st.lists(st.integers(0, len(tiles) - 1), max_size=3) if tiles else st.just([])
    away = st.sampled_from([0, 0, 1, 3, 7]) if gives else st.just(0)
    local = st.builds(ProductNode, seconds.map(float), needs.map(tuple), away.map(float))
    return ScheduleGraph(
        tuple(FetchNode(float(t)) for t in tiles),
        tuple(draw(st.lists(local, max_size=products))),
    )


LIMITS = st.builds(StageLimits, st.integers(1, 3), st.integers(1, 3), st.integers(1, 2))


def check(stages: tuple[IssueStage, ...], graph: ScheduleGraph, limits: StageLimits) -> None:
    done: set[int] = set()
    fetched: set[int] = set()
    given: set[int] = set()
    for stage in stages:
        assert stage.products or stage.fetches or stage.accumulates
        assert len(stage.products) <= limits.products
        assert len(stage.fetches) <= limits.fetches
        assert len(stage.accumulates) <= limits.accumulates
        for product in stage.products:
            assert fetched.issuperset(graph.products[product].needs)
        assert done.issuperset(stage.accumulates)
        for before, now in ((done, stage.products), (fetched, stage.fetches), (given, stage.accumulates)):
            assert len(set(now)) == len(now) and not before & set(now)
            before.update(now)
    assert done == set(range(len(graph.products)))
    assert fetched == {tile for product in graph.products for tile in product.needs}
    assert given == {i for i, product in enumerate(graph.products) if product.accumulate_s}


def brute_force(graph: ScheduleGraph, limits: StageLimits) -> float:
    """The least cost over every selection of every stage, with no thought."""
    tiles = {tile for product in graph.products for tile in product.needs}

    def some(items: set[int], most: int) -> list[tuple[int, ...]]:
        return [c for size in range(most + 1) for c in combinations(sorted(items), size)]

    @cache
    def rest(done: frozenset[int], fetched: frozenset[int], given: frozenset[int]) -> float:
        todo = set(range(len(graph.products))) - done
        ready = {i for i in todo if fetched.issuperset(graph.products[i].needs)}
        owed = {i for i in done - given if graph.products[i].accumulate_s}
        if not todo and not owed:
            return 0.0
        return min(
            stage_s(IssueStage(p, f, g), graph) + rest(done.union(p), fetched.union(f), given.union(g))
            for p in some(ready, limits.products)
            for f in some(tiles - fetched, limits.fetches)
            for g in some(owed, limits.accumulates)
            if p or f or g
        )

    return rest(frozenset(), frozenset(), frozenset())


@quick
@given(graphs(), LIMITS)
def test_every_schedule_is_legal_and_none_beats_the_exhaustive_one(
    graph: ScheduleGraph, limits: StageLimits
) -> None:
    found = exhaustive(graph, limits, max_states=3000)
    check(found.stages, graph, limits)
    assert found.bound_seconds <= found.seconds == staged_s(found.stages, graph)
    assert found.proven == (found.bound_seconds >= found.seconds * (1 - 1e-9))
    for make in HEURISTICS:
        stages = make(graph, limits)
        check(stages, graph, limits)
        assert staged_s(stages, graph) >= found.seconds
        assert make(graph, limits) == stages


@quick
@given(graphs(products=5, fetches=4), LIMITS)
def test_the_exhaustive_schedule_is_the_best_there_is(graph: ScheduleGraph, limits: StageLimits) -> None:
    found = exhaustive(graph, limits)
    assert found.proven
    assert found.seconds == pytest.approx(brute_force(graph, limits), rel=1e-9)


@quick
@given(graphs(products=5, fetches=4), LIMITS, st.integers(0, 60))
def test_a_search_cut_short_still_bounds_the_best(
    graph: ScheduleGraph, limits: StageLimits, states: int
) -> None:
    found = exhaustive(graph, limits, max_states=states)
    best = brute_force(graph, limits)
    assert found.states <= states
    assert found.bound_seconds <= best * (1 + 1e-9) and best <= found.seconds * (1 + 1e-9)


@quick
@given(graphs(), LIMITS, st.integers(0, 400))
def test_a_limit_in_states_gives_the_same_twice(
    graph: ScheduleGraph, limits: StageLimits, states: int
) -> None:
    assert exhaustive(graph, limits, max_states=states) == exhaustive(graph, limits, max_states=states)


@quick
@given(graphs(), LIMITS, st.integers(0, 4))
def test_lanes_need_no_less_than_their_work(graph: ScheduleGraph, limits: StageLimits, prefetch: int) -> None:
    for make in HEURISTICS:
        issue = flatten_stages(make(graph, limits))
        seconds = pipelined_s(issue, graph, prefetch)
        fetches = sum(graph.fetches[tile].seconds for tile in issue.fetches)
        gives = sum(product.accumulate_s for product in graph.products)
        compute = sum(product.seconds for product in graph.products)
        assert seconds >= max(compute, fetches + gives) * (1 - 1e-9)
        assert seconds <= (compute + fetches + gives) * (1 + 1e-9)


@quick
@given(graphs(gives=False), LIMITS)
def test_fetching_further_ahead_only_helps(graph: ScheduleGraph, limits: StageLimits) -> None:
    issue = flatten_stages(direct(graph, limits))
    times = [pipelined_s(issue, graph, prefetch) for prefetch in range(5)]
    assert times == sorted(times, reverse=True)


def test_stages_by_hand() -> None:
    """Two products of 3 s, each of its own pair of tiles of 1 s, whose results go away in 2 s."""
    graph = ScheduleGraph(
        (FetchNode(1.0),) * 4, (ProductNode(3.0, (0, 1), 2.0), ProductNode(3.0, (2, 3), 2.0))
    )
    stages = direct(graph, StageLimits())
    assert stages == (
        IssueStage((), (0, 1), ()),
        IssueStage((0,), (2, 3), ()),
        IssueStage((1,), (), (0,)),
        IssueStage((), (), (1,)),
    )
    assert staged_s(stages, graph) == 2 + 3 + 3 + 2
    assert flatten_stages(stages) == IssueOrder((0, 1, 2, 3), (0, 1), (0, 1))
    assert exhaustive(graph, StageLimits()) == ScheduleSearchResult(stages, 10.0, 10.0, True, 0)
    assert pipelined_s(flatten_stages(stages), graph, 1) == 10
    assert pipelined_s(flatten_stages(stages), graph, 0) == 2 + 3 + 2 + 3 + 2


def test_no_prefetch_waits_and_one_wire_carries_one_transfer() -> None:
    """Beside the second product a third one's tile of 4 s and the first one's result of 4 s."""
    products = (ProductNode(1.0, (), 4.0), ProductNode(1.0, ()), ProductNode(1.0, (0,)))
    graph = ScheduleGraph((FetchNode(4.0),), products)
    issue = IssueOrder((0,), (0, 1, 2), (0,))
    assert pipelined_s(issue, graph, 1) == 9  # the fetch goes first


def test_reordering_pairs_long_products_with_long_fetches() -> None:
    """In the given order a long fetch meets a short product and the other way round."""
    graph = ScheduleGraph(
        tuple(FetchNode(float(t)) for t in (1, 9, 1, 9, 1)),
        tuple(ProductNode(t, (i,)) for i, t in enumerate((1.0, 9.0, 1.0, 9.0, 1.0))),
    )
    limits = StageLimits(1, 1, 1)
    given_order, found = staged_s(direct(graph, limits), graph), exhaustive(graph, limits)
    assert (given_order, found.seconds, found.proven) == (1 + 9 * 4 + 1, 30.0, True)
    assert staged_s(cost_greedy(graph, limits), graph) < given_order


def test_empty_and_local_work() -> None:
    nothing = ScheduleGraph((FetchNode(1.0),), ())
    assert all(make(nothing, StageLimits()) == () for make in HEURISTICS)
    assert exhaustive(nothing, StageLimits()) == ScheduleSearchResult((), 0.0, 0.0, True, 0)
    assert pipelined_s(IssueOrder((), (), ()), nothing, 2) == 0
    local = ScheduleGraph((), (ProductNode(2.0, ()),) * 3)
    assert greedy(local, StageLimits()) == tuple(IssueStage((i,), (), ()) for i in range(3))
    assert exhaustive(local, StageLimits(products=2)).seconds == 6


def misaligned(seed: int, rows: int, inner: int) -> ScheduleGraph:
    """Stationary C: tiles of A and B cut one another into products of all sizes, and few tiles are at home."""
    draw = random.Random(seed)
    m = [draw.randint(1, 9) for _ in range(rows)]
    cuts = sorted({0, 40, *(draw.randint(1, 39) for _ in range(inner - 1))})
    k = [stop - start for start, stop in pairwise(cuts)]
    home = draw.randrange(len(k))
    tiles = [m[i] * k[j] for i in range(rows) for j in range(len(k))] + [8 * size for size in k]
    at = {(i, j): i * len(k) + j for i in range(rows) for j in range(len(k))}
    products = [
        ProductNode(float(m[i] * k[j]), (at[i, j], rows * len(k) + j) if j != home else (at[i, j],))
        for i in range(rows)
        for j in range(len(k))
    ]
    return ScheduleGraph(tuple(FetchNode(t / 2) for t in tiles), tuple(products))


def test_a_large_graph_ends_within_its_budget() -> None:
    graph = misaligned(1, 6, 10)
    start = time.monotonic()
    found = exhaustive(graph, StageLimits(), budget_s=0.2, max_states=10**9)
    assert time.monotonic() - start < 10
    check(found.stages, graph, StageLimits())
    assert 0 < found.bound_seconds <= found.seconds
    assert found.seconds <= min(staged_s(make(graph, StageLimits()), graph) for make in HEURISTICS)
