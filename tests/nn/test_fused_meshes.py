"""Fused linear layers on any axis of a mesh, and products of `matmul` that take fused programs."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from meshweave.execute.memory.shared import why_unavailable
from meshweave.execute.ranks.launch import launch

ENV = {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
pytestmark = [
    pytest.mark.gloo,
    pytest.mark.skipif(bool(why_unavailable()), reason=f"shared memory {why_unavailable()}"),
]

SLOW_NETWORK = """
name = "four-slow-hosts"
source = "made up: products and transfers of the test take about as long"
[chip]
name = "slow core"
source = "made up"
peak_flops_per_s = { float64 = 1e6 }
effective_flops_per_s = 1e6
memory_bytes = 1_000_000_000
memory_bytes_per_s = 1e10
[network]
kind = "switch"
size = 4
[network.axis]
name = "link"
source = "made up"
link_bytes_per_s = 5e5
link_latency_s = 1e-6
"""


@pytest.mark.parametrize("ranks", [(0, 2, 1, 3), pytest.param((0, 1, 2, 3), marks=pytest.mark.slow)])
def test_layers_on_each_axis_equal_dense_ones_with_their_gradients(ranks: tuple[int, ...]) -> None:
    """Batch dims, rings side by side, columns on the other axis, a sub-mesh; memory and messages.

    The ranks of an axis ascend: torch's own collectives of a DTensor go by rank, not by place in the mesh.
    """
    payload = {"ranks": list(ranks), "all": ranks == (0, 1, 2, 3)}
    said = launch("fused_mesh_rank_functions:placed_cases", 4, payload, env=ENV, timeout_s=120.0)
    assert said == [[]] * 4


def test_what_no_ring_computes_is_refused_in_one_line() -> None:
    (said, *others) = launch("fused_mesh_rank_functions:refusals", 4, {}, env=ENV, timeout_s=60.0)
    assert all(one == said for one in others)
    expected = (
        "with at least two dims each",
        "dim 2 of x of 3 dims; it must be one of them but the last",
        "2 ranks do not divide dim 1 of x (3, 5, 8)",
        "device_mesh has 2 dims",
        "needs x in Shard(-1) and weight in Shard(1) on one mesh dim",
        "are not those of a ring",
        "needs x in Shard of a dim of rows and weight in Shard(0) on one mesh dim",
        "1 rows leave some of ranks 2, 3 without any",
        "no fused product takes a",
        "overlap is 'tiles'; it must be one of auto, slices, fused",
        "mesh dims shard x in another order than from left to right",
    )
    for one, part in zip(said, expected, strict=True):
        assert part in one and "\n" not in one, (part, one)


def test_matmul_takes_fused_products_where_they_are_simulated_to_be_faster(tmp_path: Path) -> None:
    """With "auto" on a cluster of slow links, never with "slices"; with "fused" also the gradient that is one."""
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(SLOW_NETWORK)
    payload = {"cluster": str(cluster)}
    for wrong, ran in launch("fused_mesh_rank_functions:products", 4, payload, env=ENV, timeout_s=120.0):
        assert wrong == []
        for name, programs in ran:
            fused = [one for one in programs if one.startswith("T3") or "ring" in one]
            assert bool(fused) == (name != "slices"), (name, programs)
