"""Search of the issue order of a universal product."""

from __future__ import annotations

import pytest

from meshweave.algorithms.universal import UniversalConfig, UniversalProblem, universal_program
from meshweave.algorithms.universal.config import SCHEDULE_KINDS
from meshweave.algorithms.universal.issue_order import SearchEffort
from meshweave.algorithms.universal.schedule import STAGE_LIMITS, ProductNode, ScheduleGraph
from meshweave.cost.machine import Machine
from meshweave.describe.layout.grid import block_2d, row_block
from meshweave.describe.machine.cluster import load_cluster
from meshweave.simulate import simulate
from meshweave_studies.slicing.schedules import search_schedule


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
