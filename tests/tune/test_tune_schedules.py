"""Search of the issue order of a universal product."""

from __future__ import annotations

import pytest

from meshweave.algorithms.universal import UniversalConfig, UniversalProblem, universal_program
from meshweave.cost.machine import Machine
from meshweave.describe.layout.grid import block_2d, row_block
from meshweave.describe.machine.cluster import load_cluster
from meshweave.simulate import simulate
from meshweave.tune.schedules import SCHEDULE_KINDS, search_schedule


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
