"""What must hold of the MeshSlice section whatever the constants are; the scored rows are in validation/."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from meshweave.algorithms.matmul import ALGORITHMS, DATAFLOWS, MatmulProblem
from meshweave.cost.machine import mesh_machine
from meshweave.describe.cluster import load_cluster
from meshweave.tune.product import tune_product
from validation import meshslice as validation


def test_every_published_row_has_a_value_of_ours_or_a_reason() -> None:
    for entry in validation.published():
        assert "without" in entry or entry["id"] in validation.OURS, entry["id"]
        assert entry["where"] and entry["unit"]


def test_flops_per_chip_and_block() -> None:
    for row in validation.rows(["flops"]):
        assert row.ours == pytest.approx(row.published, rel=1e-3)


def test_traffic_of_25d_and_of_meshslice_with_dp_is_the_papers() -> None:
    """1.6 GB against 336 MB, read off the programs. (The paper counts 7 MB more for copies of the weights.)"""
    shown = {row.id: row.ours for row in validation.rows(["bytes_25d", "bytes_meshslice_dp"])}
    assert shown["bytes_25d"] == pytest.approx(1.63, rel=0.01)
    assert shown["bytes_meshslice_dp"] == pytest.approx(336, rel=0.025)


def test_the_mesh_shape_matters() -> None:
    assert validation.mesh_effect("gpt3") > 2


def test_meshslice_is_never_slower_than_collective() -> None:
    """Over 1,000 random products and meshes: it may always take one slice."""
    rng = random.Random(0)
    pods = {n: load_cluster(f"tpu-v4-pod:{n}") for n in (4, 16, 64, 256)}
    for _ in range(1000):
        chips = rng.choice(list(pods))
        shape = rng.choice(ALGORITHMS["meshslice"].meshes(chips))
        sizes = [8 * rng.randint(1, 6000) if rng.random() < 0.5 else rng.randint(8, 60000) for _ in range(3)]
        problem = MatmulProblem(sizes[0], sizes[1], sizes[2], shape, rng.choice(DATAFLOWS), "bfloat16")
        at = mesh_machine(pods[chips], shape, ("row", "col"), "tp")
        times = [
            tune_product(ALGORITHMS[n], problem, at).estimate.total_s for n in ("meshslice", "collective")
        ]
        assert times[0] <= times[1], problem
