"""Search of the issue order of a universal product."""

from __future__ import annotations

import numpy as np
import pytest

from meshweave.algorithms.universal import Slicing, UniversalConfig, UniversalProblem, universal_program
from meshweave.algorithms.universal.config import SCHEDULE_KINDS, STAGE_LIMITS, StageLimits
from meshweave.algorithms.universal.issue_order import remote_panels
from meshweave.base.errors import UnsupportedError
from meshweave.cost.machine import Machine
from meshweave.cost.rates import RankRates
from meshweave.describe.layout.grid import ProcessGrid, block_2d, row_block
from meshweave.describe.machine.cluster import load_cluster
from meshweave.simulate import simulate
from meshweave_studies.slicing.issue_rules import SearchEffort, schedule_graph, schedule_stages
from meshweave_studies.slicing.schedules import search_schedule
from meshweave_studies.slicing.stages import ProductNode, ScheduleGraph

RATES = RankRates(1e9, 1e9, accumulate_factor=0.8, ranks_per_package=2, package_bytes_per_s=3e9)


def test_every_kind_is_simulated_and_the_fastest_comes_first() -> None:
    cluster = load_cluster("h100-node").with_chips(4)
    problem = UniversalProblem(512, 512, 512, block_2d(4, (2, 2)), row_block(4), block_2d(4, (1, 4)))
    config = UniversalConfig("c", num_slices=2)
    schedules = search_schedule(problem, config, cluster, max_states=200)
    assert {schedule.kind for schedule in schedules} == set(SCHEDULE_KINDS)
    times = [schedule.simulated_s for schedule in schedules]
    assert times == sorted(times)
    for schedule in schedules:
        program = universal_program(problem, config, orders=schedule.orders)
        machine = Machine.of(cluster, program, logical=True)
        assert simulate(program, machine).duration_s == schedule.simulated_s
    by_kind = {schedule.kind: schedule for schedule in schedules}
    best = by_kind["exhaustive"]
    assert best.bound_s is not None and best.bound_s <= best.staged_s * (1 + 1e-9)
    assert best.staged_s <= min(by_kind[kind].staged_s for kind in SCHEDULE_KINDS) * (1 + 1e-9)
    direct = universal_program(problem, config)
    assert simulate(direct, Machine.of(cluster, direct, logical=True)).duration_s == pytest.approx(
        by_kind["direct"].simulated_s
    )


def test_the_work_of_a_search_is_bounded_for_all_ranks_together() -> None:
    """Ranks whose links all differ, and many products each: once this took as many states as there are ranks."""
    effort = SearchEffort()
    few = [ScheduleGraph((), (ProductNode(1.0, (), 0.0),) * 2)] * 8
    many = [ScheduleGraph((), (ProductNode(float(rank), (), 0.0),) * 40) for rank in range(16)]
    assert SearchEffort.of(few, STAGE_LIMITS, None) == effort  # they are alike: searched once
    bounded = SearchEffort.of(many, STAGE_LIMITS, None)
    assert bounded.max_states * 16 <= effort.max_states and bounded.max_selections < effort.max_selections
    assert SearchEffort.of(many, STAGE_LIMITS, 7).max_states == 7


def misaligned() -> UniversalProblem:
    """Tiles of 3 of A against blocks of B along k: products of several sizes."""
    a = ProcessGrid.over(4, (2, 2)).block_cyclic_layout((4, 3), (0, 1))
    return UniversalProblem(8, 8, 8, a, row_block(4), block_2d(4), "float64")


def test_limits_bound_what_a_stage_holds() -> None:
    slicing = Slicing(misaligned(), UniversalConfig("b", num_slices=3))
    graph = schedule_graph(slicing, 0, RATES)
    for limits in (StageLimits(), StageLimits(2, 3, 2)):
        for kind in SCHEDULE_KINDS:
            stages = schedule_stages(kind, graph, SearchEffort(limits=limits))
            for stage in stages:
                assert len(stage.products) <= limits.products
                assert len(stage.fetches) <= limits.fetches
                assert len(stage.accumulates) <= limits.accumulates
    with pytest.raises(UnsupportedError, match="1 or more of each"):
        StageLimits(products=0)


def test_panels_are_tiles_and_cost_what_they_move() -> None:
    slicing, rank = Slicing(misaligned(), UniversalConfig("c", num_slices=1)), 0
    steps, found = (
        slicing.steps(rank),
        schedule_graph(Slicing(misaligned(), UniversalConfig("c", num_slices=1)), rank, RATES),
    )
    assert len(found.products) == len(steps) and len(found.fetches) == len(remote_panels(steps, rank))
    assert {product.accumulate_s for product in found.products} == {0.0}
    for fetch, (number, operand) in zip(found.fetches, remote_panels(steps, rank), strict=True):
        blocks = steps[number].panels[operand].blocks
        rates = {block.owner: 3e9 if block.owner == 1 else 1e9 for block in blocks}
        expected = sum(8 * b.num_elements / rates[b.owner] for b in blocks if b.owner != rank)
        assert fetch.seconds == pytest.approx(expected)
    first = found.products[0]
    assert first.seconds == pytest.approx(2 * np.prod(steps[0].sizes) / 1e9)


def test_results_that_go_away_take_as_long_as_they_are_added() -> None:
    slicing = Slicing(
        UniversalProblem(8, 8, 8, *(row_block(4),) * 3, "float64"), UniversalConfig("b", num_slices=1)
    )
    found = schedule_graph(slicing, 0, RATES)
    times = sorted(product.accumulate_s for product in found.products)
    assert times == pytest.approx([0.0, *(8 * 16 / rate / 0.8 for rate in (3e9, 1e9, 1e9))])
