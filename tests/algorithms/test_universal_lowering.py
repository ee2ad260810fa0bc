"""The universal product by schedules: right in whatever order a rank works, and proven before it runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_universal import cases, operands

from meshweave.algorithms.universal import (
    Slicing,
    UniversalConfig,
    UniversalProblem,
    universal_program,
)
from meshweave.algorithms.universal.config import SCHEDULE_KINDS, ScheduleKind, StageLimits
from meshweave.algorithms.universal.issue_order import (
    IssueOrder,
    direct_order,
    issue_orders,
    remote_panels,
)
from meshweave.base.errors import UnsupportedError
from meshweave.cost.rates import RankRates
from meshweave.describe.layout.grid import ProcessGrid, block_2d, row_block
from meshweave.describe.machine.cluster import load_cluster
from meshweave.execute.numpy import run_numpy
from meshweave.ir.analysis.validate import validate
from meshweave.ir.program import Program
from meshweave.lower import lower_one_sided
from sampling import examples

RATES = RankRates(1e9, 1e9, accumulate_factor=0.8, ranks_per_package=2, package_bytes_per_s=3e9)
Ordered = tuple[UniversalProblem, UniversalConfig, dict[int, IssueOrder]]


@st.composite
def ordered(draw: st.DrawFn) -> Ordered:
    """Steps, fetches and accumulates of each rank in orders that have nothing to do with one another."""
    problem, choice = draw(cases())
    slicing, found = Slicing(problem, choice), {}
    for rank in problem.ranks:
        listed = direct_order(slicing.steps(rank), rank)
        parts = (
            tuple(draw(st.permutations(part)))
            for part in (listed.fetches, listed.products, listed.accumulates)
        )
        found[rank] = IssueOrder(*parts)
    return problem, choice, found


def check(problem: UniversalProblem, program: Program) -> None:
    inputs = operands(problem)
    assert validate(program).skipped == ()
    lowered = lower_one_sided(program)
    assert validate(lowered).skipped == ()
    for seed in (None, 1):
        for one in (program, lowered):
            found = run_numpy(one, inputs, seed=seed).outputs["C"]
            np.testing.assert_array_equal(found, inputs["A"] @ inputs["B"])


@examples(60)
@given(ordered())
def test_any_order_gives_the_dense_product(case: Ordered) -> None:
    problem, choice, orders = case
    check(problem, universal_program(problem, choice, orders=orders))


@examples(25)
@given(cases(), st.sampled_from(["greedy", "cost-greedy", "exhaustive"]))
def test_every_schedule_gives_the_dense_product(
    case: tuple[UniversalProblem, UniversalConfig], schedule: str
) -> None:
    problem, choice = case
    check(problem, universal_program(problem, replace(choice, schedule=schedule, rates=RATES)))  # type: ignore[arg-type]


@examples(25)
@given(cases(), st.sampled_from(SCHEDULE_KINDS), st.tuples(*[st.integers(1, 3)] * 3))
def test_any_limits_give_the_dense_product(
    case: tuple[UniversalProblem, UniversalConfig], schedule: ScheduleKind, most: tuple[int, int, int]
) -> None:
    problem, choice = case
    limits = StageLimits(*most)
    program = universal_program(problem, replace(choice, schedule=schedule, rates=RATES, limits=limits))
    check(problem, program)
    widths = {lane.name: lane.width for lane in program.lanes}
    assert widths == {"compute": limits.products, "get": 1, "give": limits.accumulates}


def misaligned() -> UniversalProblem:
    """Tiles of 3 of A against blocks of B along k: products of several sizes."""
    a = ProcessGrid.over(4, (2, 2)).block_cyclic_layout((4, 3), (0, 1))
    return UniversalProblem(8, 8, 8, a, row_block(4), block_2d(4), "float64")


def test_the_listed_order_is_direct_execution() -> None:
    problem = misaligned()
    for stationary in ("a", "b", "c"):
        choice = UniversalConfig(stationary, num_slices=3)
        slicing = Slicing(problem, choice)
        orders = {rank: direct_order(slicing.steps(rank), rank) for rank in problem.ranks}
        assert universal_program(problem, choice, orders=orders) == universal_program(problem, choice)


def test_as_many_slots_as_an_order_needs_and_prefetch_more() -> None:
    """All fetched before the first product is done: all are there at once."""
    problem, choice = misaligned(), UniversalConfig("c", num_slices=1, prefetch=1)
    slicing = Slicing(problem, choice)
    orders, panels = {}, 0
    for rank in problem.ranks:
        steps = slicing.steps(rank)
        listed = direct_order(steps, rank)
        orders[rank] = IssueOrder(listed.fetches[::-1], listed.products, listed.accumulates)
        panels = max(panels, sum(operand == "a" for _, operand in remote_panels(steps, rank)))
    slots = {b.name: b.slots for b in universal_program(problem, choice, orders=orders).buffers}
    assert panels >= 3 and slots["a_in"] == panels
    assert {b.name: b.slots for b in universal_program(problem, choice).buffers}["a_in"] == 2


def test_a_schedule_by_costs_asks_for_rates() -> None:
    with pytest.raises(UnsupportedError, match="schedule 'greedy' needs rates"):
        universal_program(misaligned(), UniversalConfig(schedule="greedy"))
    assert issue_orders(Slicing(misaligned(), UniversalConfig(schedule="greedy", rates=RATES)))[0].products


def test_rates_of_a_machine() -> None:
    def of(name: str) -> RankRates:
        return RankRates.of(load_cluster(name))

    assert of("pvc-node") == RankRates(
        flops_per_s=22.7e12,
        link_bytes_per_s=26.5e9,
        memory_bytes_per_s=1.6384e12,
        accumulate_factor=0.8,
        ranks_per_package=2,
        package_bytes_per_s=230e9,
    )
    assert of("h100-node").link_bytes_per_s == 450e9 and of("h100-node").ranks_per_package == 1
    assert of("pvc-node").transfer_s(0, 1, 230) == pytest.approx(1e-9)
    assert of("pvc-node").transfer_s(0, 0, 10**9) == 0
    assert of("tpu-v4-4x4").ranks_per_package == 1
