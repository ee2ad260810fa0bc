"""What products ask of memory, and the prices that follow from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshweave.base.errors import DescriptionError
from meshweave.calibrate.cluster_toml import to_toml
from meshweave.cost.compute import TileTraffic, tile_traffic
from meshweave.cost.machine import mesh_machine
from meshweave.cost.price import price
from meshweave.describe.machine.chip import Chip
from meshweave.describe.machine.cluster import load_cluster
from meshweave.describe.machine.links import CommConstants
from meshweave.describe.machine.network import TorusNetwork
from meshweave.ir.program.release import CollectiveStep
from meshweave.ir.work import Compute, Transfer, matmul_work

CHIP = Chip("test", (("float32", 1e12),), 1e12, 1 << 30, 1e9, gemm_tile=(4, 8, 16))


def test_tiles_are_cut_at_the_edges() -> None:
    """A (6, 20) once per 3 column tiles, B (20, 20) once per 2 row tiles, C twice."""
    total = 6 * 20 * 3 + 20 * 20 * 2 + 2 * 6 * 20
    fill, drain = 4 * 16 + 16 * 8, 4 * 8
    work = matmul_work(6, 20, 20, "bfloat16")
    assert tile_traffic(work, CHIP) == TileTraffic(2 * fill, 2 * (total - fill - drain), 2 * drain)


def test_a_product_of_one_tile_streams_only_what_is_left_of_c() -> None:
    work = matmul_work(2, 3, 5, "float64")
    assert tile_traffic(work, CHIP) == TileTraffic(8 * (10 + 15), 8 * 6, 8 * 6)


@pytest.mark.parametrize(
    "work", [matmul_work(2, 0, 5, "float32"), Compute("copy", bytes=7), Compute("call", flops=9)]
)
def test_nothing_streams_without_a_product(work: Compute) -> None:
    assert tile_traffic(work, CHIP) == TileTraffic()


def test_without_tiles_only_calls_load_the_memory() -> None:
    chip = replace(CHIP, gemm_tile=None)
    assert tile_traffic(matmul_work(6, 20, 20, "float32"), chip) == TileTraffic()
    assert tile_traffic(Compute("call", 10, 30), chip) == tile_traffic(Compute("call", 10, 30), CHIP)
    assert tile_traffic(Compute("call", 10, 30), chip) == TileTraffic(0, 30, 0)


def test_a_price_is_a_roofline_between_fill_and_drain() -> None:
    cluster = replace(load_cluster("tpu-v4-pod:4"), chip=replace(CHIP, launch_s=1e-9))
    machine = mesh_machine(cluster, (2, 2), ("row", "col"))
    by_memory = price(matmul_work(6, 20, 20, "bfloat16"), machine)
    assert by_memory.total_ps == 1000 + 1000 * 2 * (6 * 20 * 3 + 20 * 20 * 2 + 2 * 6 * 20)
    assert price(Compute("call", 10**6, 999), machine).total_ps == 1000 + 10**6
    assert price(Compute("call", 10**6, 1001), machine).total_ps == 1000 + 1001 * 1000


@pytest.mark.parametrize(("collective", "one", "both"), [("all_gather", 50, 30), ("send_recv", 30, 30)])
def test_a_step_of_a_two_way_ring_has_its_share_of_the_rate(collective: str, one: int, both: int) -> None:
    """Of an all-gather's 60 GB/s half, alone no more than a link; send_recv is one direction's anyway."""
    machine = mesh_machine(load_cluster("tpu-v4-pod:4"), (2, 2), ("row", "col"))
    for ways, rate in ((1, one), (2, both)):
        work = Transfer(
            "permute", "tp.row", 2, 100, step=CollectiveStep(collective, 0, 1, num_directions=ways)
        )
        assert price(work, machine).rate_per_s == rate * 10**9


@pytest.mark.parametrize("kind", ["permute", "send", "recv", "get", "put", "accumulate"])
def test_a_message_is_no_faster_than_one_link(kind: str) -> None:
    pod = load_cluster("tpu-v4-pod:4")
    assert isinstance(pod.network, TorusNetwork)
    fast = ("send_recv", CommConstants(60e9, 0.0, 0.0))
    axes = tuple(
        replace(axis, constants=(*(c for c in axis.constants if c[0] != "send_recv"), fast))
        for axis in pod.network.axes
    )
    machine = mesh_machine(replace(pod, network=replace(pod.network, axes=axes)), (2, 2), ("row", "col"))
    assert price(Transfer(kind, "tp.row", 2, 100), machine).rate_per_s == 50 * 10**9
    assert price(Transfer("all_gather", "tp.row", 2, 100), machine).rate_per_s == 60 * 10**9


def test_tiles_come_from_the_file_and_go_back_to_it(tmp_path: Path) -> None:
    pod = load_cluster("tpu-v4-pod:4")
    cluster = replace(pod, chip=replace(pod.chip, gemm_tile=(128, 256, 512)))
    path = tmp_path / "cluster.toml"
    path.write_text(to_toml(cluster))
    assert load_cluster(path) == cluster
    for wrong in ("[128, 256]", "[128, 0, 512]", "128", "[1, 2, 3, 4]"):
        path.write_text(to_toml(cluster).replace("[128, 256, 512]", wrong))
        with pytest.raises(DescriptionError, match=r"chip\.gemm_tile"):
            load_cluster(path)


@pytest.mark.parametrize("tile", [(4, 8), (4, 0, 8)])
def test_a_tile_has_three_counts(tile: tuple[int, int, int]) -> None:
    with pytest.raises(DescriptionError, match="gemm_tile"):
        replace(CHIP, gemm_tile=tile)
