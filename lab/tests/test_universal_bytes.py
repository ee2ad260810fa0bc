"""For no pair of placements does the universal product move more than DTensor does for the same result."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("torch", reason="torch is not installed: DTensor cannot be asked what it moves")
from meshweave.algorithms.universal import UniversalProblem
from meshweave.cost.rates import RankRates
from meshweave.describe.layout import Layout, Partial, Placement, Replicate, Shard
from meshweave.describe.layout.mesh import Mesh
from meshweave.tune.universal import tune_universal
from meshweave_lab.bench.dtensor_traffic import PlacedProduct, dtensor_traffics

KINDS: tuple[Placement, ...] = (Shard(0), Shard(1), Replicate(), Partial())
RATES = RankRates(60e9, 2.4e9, 1e-4, 0.0, 49e9)


def more_than_dtensor(shape: tuple[int, int], sizes: tuple[int, int, int], every: int = 1) -> list[str]:
    pairs = list(itertools.product(itertools.product(KINDS, repeat=2), repeat=2))[::every]
    mesh = Mesh.of("mesh", shape, ("row", "col"))
    worse = []
    for (a, b), theirs in zip(
        pairs, dtensor_traffics(shape, [PlacedProduct(a, b, sizes) for a, b in pairs]), strict=True
    ):
        out = Layout(mesh, theirs.out_placements)
        problem = UniversalProblem(*sizes, Layout(mesh, a), Layout(mesh, b), out)
        ours = tune_universal(problem, RATES, objective="bytes").moved_bytes
        if ours > theirs.received_bytes:
            worse.append(f"{problem.a} @ {problem.b} -> {out}: {ours} > {theirs.received_bytes}")
    return worse


def test_a_square_mesh() -> None:
    """Tall and wide operands: what must be moved for k and for n differ. A ninth of all pairs."""
    assert more_than_dtensor((2, 2), (96, 64, 128), every=9) == []


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(96, 64, 128), (512, 512, 512), (64, 256, 32)], ids=str)
@pytest.mark.parametrize("shape", [(2, 2), (2, 4)], ids=str)
def test_all_pairs(shape: tuple[int, int], sizes: tuple[int, int, int]) -> None:
    assert more_than_dtensor(shape, sizes) == []
