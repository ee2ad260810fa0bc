"""Rivals measured in a lab: the right numbers, and times that cannot be under the bound."""

from pathlib import Path

import pytest

from meshweave.algorithms.matmul import Config, MatmulProblem
from meshweave.cost.machine import mesh_machine
from meshweave.lab import Lab
from meshweave.lab.bench import Case, balanced_flops_per_s, bench, bound_s, cases, ideal

LAB = Path(__file__).parents[2] / "examples" / "labs" / "torus-2x2.toml"


def test_the_pace_balances_compute_and_communication():
    lab, problem = Lab.load(LAB), MatmulProblem(256, 256, 4096, (2, 2))
    pace = balanced_flops_per_s(problem, lab.cluster(), 2.0)
    machine = mesh_machine(ideal(lab.cluster(), pace), (2, 2), ("row", "col"), "tp")
    assert bound_s(problem, machine) == pytest.approx(problem.flops / 4 / pace)


def test_algorithms_that_cannot_use_the_mesh_are_left_out():
    lab = Lab.load(LAB)
    names = [
        case.algorithm for case in cases(MatmulProblem(64, 64, 64, (2, 2)), lab.cluster(), ["cannon", "25d"])
    ]
    assert "cannon" in names and "25d" not in names


@pytest.mark.lab
@pytest.mark.gloo
def test_rivals_give_the_dense_product_and_take_their_time(nothing_left):
    pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")
    lab, problem = Lab.load(LAB), MatmulProblem(96, 96, 2048, (2, 2))
    rivals = [
        Case("meshslice S=4", "meshslice", Config((1,) * 4), 1),
        Case("collective", "collective", rings=1),
        Case("DTensor, same placements"),
    ]
    pace = balanced_flops_per_s(problem, lab.cluster(), 1.0)
    with lab.up() as running:
        results, reports = bench(running, problem, rivals, flops_per_s=pace, repeat=2, timeout_s=90)
    assert [result.error for result in results] == [0.0, 0.0, 0.0]
    for result in results:
        assert result.fastest_s <= result.median_s <= result.slowest_s
        assert result.median_s > 0.9 * result.bound_s  # token buckets let a burst through
    assert all(report["num_products"] > 0 for report in reports)
