"""A layer priced site by site takes as long as the programs of its sites, which `meshweave.parallelize` runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import meshweave as mw
from meshweave.algorithms.block import ENTRIES, BlockAlgorithm, BlockConfig, BlockProblem
from meshweave.algorithms.block.roles import Roles, Side
from meshweave.algorithms.block.sites import (
    MoveSite,
    ProductSite,
    move_program,
    product_parts,
    ring_parts,
)
from meshweave.algorithms.block.two_d import IncludedProducts
from meshweave.algorithms.step import StepProblem
from meshweave.algorithms.step.block_tasks import without_gradients
from meshweave.algorithms.step.layers import hidden_between_sites_s, layer_time
from meshweave.base.units import to_s
from meshweave.cost.machine import Machine
from meshweave.cost.price import price
from meshweave.estimate import estimate_skeleton, skeleton_ps
from meshweave.ir.program import Program
from meshweave.ir.skeleton import Skeleton, Task, skeleton_of
from meshweave.ir.work import Compute, Transfer, Work
from meshweave.tune.plan_file import load_plan
from meshweave.tune.step_cases import planned_step
from plain_simulator.reference import simulate
from product_sites import product_sites

BATCH, SEQUENCE, HIDDEN, HEADS, WIDTH, FFN = 8, 8, 16, 4, 2, 24


def duration(work: Work) -> int:
    """Return some picoseconds that differ between works."""
    return 1 + sum(map(ord, repr(work))) % 97


def took(program: Program) -> int:
    """Return the picoseconds of a program without reductions of gradients of weights."""
    return skeleton_ps(without_gradients(skeleton_of(program.expanded)), duration)


def products_ps(problem: BlockProblem, config: BlockConfig, roles: Roles) -> int:
    """Return the picoseconds of the four products of a layer, forward and backward."""
    total = 0
    for is_first, is_attention in ((True, True), (False, True), (True, False), (False, False)):
        units, unit = (HEADS, WIDTH * (3 if is_first else 1)) if is_attention else (FFN, 1)
        site = ProductSite(is_first, is_attention, HIDDEN, units, unit)
        parts = product_parts(site, problem, config, roles, problem.mesh)
        total += took(parts.forward) + took(parts.backward)
    return total


def between_ps(skeleton: Skeleton) -> int:
    """Return the picoseconds of what is no product and no communication."""
    tasks = (task for _, task in skeleton.counted_tasks())
    return sum(
        task.times * duration(task.work)
        for task in tasks
        if isinstance(task.work, Compute)
        and task.work.kind in ("call", "add", "zero")
        and task.lane == "compute"
    )


def statistics_ps(problem: BlockProblem, roles: Roles) -> int:
    """Return the picoseconds in which ranks sum the statistics of both norms, forward and backward."""
    if not roles.two_step_norms:
        return 0
    sides = (Side("batch", BATCH), Side("sequence", SEQUENCE), Side("", 2))
    before = tuple("partial" if dim == "hidden" else dim for dim in roles.residual)
    move = skeleton_of(
        move_program(MoveSite(sides, before, roles.statistics), problem.mesh, "float32").expanded
    )
    sums = (task.work for _, task in move.counted_tasks() if isinstance(task.work, Transfer))
    return 4 * sum(map(duration, sums))


def ring_ps(problem: BlockProblem, config: BlockConfig, roles: Roles) -> int:
    """Return the picoseconds of attention in a ring beyond those of its calls, forward and backward."""
    parts = ring_parts(problem, config, roles, problem.mesh)
    programs = parts.forward, parts.backward
    return sum(took(program) - between_ps(skeleton_of(program.expanded)) for program in programs)


WITHOUT_CHAINS = [entry for entry in ENTRIES if getattr(entry, "product_2d", "") != "summa"]
"""Chains of broadcasts have no time without a machine."""


@pytest.mark.parametrize("entry", WITHOUT_CHAINS, ids=lambda entry: entry.name)
def test_a_layer_by_sites_is_the_programs_of_its_sites(entry: BlockAlgorithm) -> None:
    shape = {2: (2, 2), 3: (2, 2, 2)}[len(entry.roles)]
    if entry.refusal(BlockProblem(1, 1, 1, 1, 1, 1, 1, shape)):
        shape = (4, 1)
    problem = BlockProblem(BATCH, SEQUENCE, HIDDEN, HEADS, HEADS, WIDTH, FFN, shape, dtype="float32")
    roles = entry.roles_of(problem)
    config = BlockConfig(slices=2) if isinstance(entry, IncludedProducts) else BlockConfig()
    by_sites = without_gradients(entry.skeleton(problem, replace(config, overlap="sites")))
    whole = skeleton_ps(without_gradients(entry.skeleton(problem, config)), duration)
    assert whole <= skeleton_ps(by_sites, duration)
    expected = products_ps(problem, config, roles) + statistics_ps(problem, roles)
    if isinstance(entry, IncludedProducts):  # copies of slices are no tasks of the skeleton
        assert skeleton_ps(by_sites, duration) == pytest.approx(expected + between_ps(by_sites), rel=0.01)
    elif roles.ring_axis is None:
        assert skeleton_ps(by_sites, duration) == expected + between_ps(by_sites)
    else:
        rings_ps = ring_ps(problem, config, roles)
        assert skeleton_ps(by_sites, duration) == expected + between_ps(by_sites) + rings_ps


CHAINS = [entry for entry in ENTRIES if getattr(entry, "product_2d", "") == "summa"]


@pytest.mark.parametrize("entry", CHAINS, ids=lambda entry: entry.name)
def test_a_layer_of_chains_by_sites_is_the_programs_of_its_sites(entry: BlockAlgorithm) -> None:
    """On a machine, where the slowest rank of each product counts: with sums over depth within 3 %."""
    shape = {2: (2, 2), 3: (2, 2, 2)}[len(entry.roles)]
    problem = BlockProblem(BATCH, SEQUENCE, HIDDEN, HEADS, HEADS, WIDTH, FFN, shape, dtype="float32")
    roles, config = entry.roles_of(problem), BlockConfig(slices=2, packets=4)
    skeleton = entry.skeleton(problem, replace(config, overlap="sites"))
    machine = Machine.of(
        mw.load_cluster(f"tpu-v4-pod:{len(problem.mesh.ranks)}"), entry.program(problem, config)
    )
    expected_s = 0.0
    for site in product_sites(problem):
        parts = product_parts(site, problem, config, roles, problem.mesh)
        for program in (parts.forward, parts.backward):
            expected_s += simulate(program, machine, contention=False).duration_s
    tasks = [task for phase in skeleton.phases for task in phase.tasks if isinstance(task, Task)]
    for task in tasks:
        is_move = isinstance(task.work, Transfer)
        if is_move and "gradients" in task.lane and task.work.part_bytes > 4 * 2 * HIDDEN:
            continue  # the gradient of a matrix, which its product reduces
        if is_move or task.work.kind in ("call", "add", "zero"):
            expected_s += task.times * to_s(price(task.work, machine).total_ps)
    assert estimate_skeleton(skeleton, machine).total_s == pytest.approx(
        expected_s, rel=0.03 if len(shape) == 3 else 0.001
    )


def problem_of(**options: Any) -> StepProblem:
    """Return a step of a small model on eight chips."""
    return StepProblem(mw.load_model("llama-3-8b"), mw.load_cluster("dgx-h100:8"), 16, 2048, **options)


@pytest.mark.parametrize("strategy", ["megatron_sp", "meshslice_block", "collective_block"])
def test_less_is_hidden_by_sites(strategy: str) -> None:
    parallelism = mw.Parallelism(
        tensor=8 if strategy == "megatron_sp" else (4, 2), strategy=strategy, micro_batch=4, context=1
    )
    layers, sites = problem_of(overlap="layers"), problem_of()
    hidden_s = hidden_between_sites_s(layers, parallelism)
    assert hidden_s > 0
    times = [layer_time(each, parallelism) for each in (layers, sites)]
    totals = [each.forward.total_s + each.backward.total_s for each in times]
    assert totals[1] - totals[0] == pytest.approx(hidden_s)
    assert hidden_between_sites_s(sites, parallelism) == 0


def test_nothing_is_hidden_between_sites_without_communication() -> None:
    alone = mw.Parallelism(data=8, micro_batch=2)
    assert hidden_between_sites_s(problem_of(overlap="layers"), alone) == 0


def test_a_plan_says_which_overlap_it_counts_on(tmp_path: Path) -> None:
    options = {"batch": 16, "sequence": 2048, "tp": 8, "strategy": "megatron_sp", "micro_batch": 4, "zero": 0}
    steps = {}
    for overlap in ("layers", "sites"):
        plan = mw.plan("llama-3-8b", "dgx-h100:8", overlap=overlap, **options, stack="ideal")
        plan.save(tmp_path / "plan.json")
        read = load_plan(tmp_path / "plan.json")
        assert read.step.overlap == overlap
        steps[overlap] = planned_step(read)
        assert steps[overlap].problem.overlap == overlap
        assert steps[overlap].time_s == pytest.approx(read.step.best.step_s)
    assert steps["sites"].time_s > steps["layers"].time_s


@pytest.mark.parametrize(
    "degrees",
    [
        {"tensor": 8},
        {"tensor": 4, "pipeline": 2, "recompute": "full"},
        {"tensor": 2, "context": 2, "pipeline": 2},
        {"tensor": (2, 2), "strategy": "atp", "data": 2},
    ],
    ids=str,
)
def test_a_step_by_sites_is_simulated_by_the_programs_of_its_layers(degrees: dict[str, Any]) -> None:
    parallelism = mw.Parallelism(**{"strategy": "megatron_sp", "micro_batch": 2, **degrees})
    times = {}
    for overlap in ("layers", "sites"):
        step = mw.algorithms.step_of(problem_of(overlap=overlap), parallelism)
        simulated = mw.simulation.simulate_step(step)
        assert simulated.time_s == pytest.approx(step.time_s, rel=0.02)
        times[overlap] = simulated.time_s
    assert times["sites"] > times["layers"]


def test_an_unknown_overlap_is_refused() -> None:
    with pytest.raises(mw.errors.DescriptionError, match=r"unknown overlap 'site' \(did you mean 'sites'"):
        problem_of(overlap="site")
