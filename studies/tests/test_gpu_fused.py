"""Fused products on GPUs in detail: every entry, one GPU against all, what order and waiting do to time."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from gpu_programs import LINK, small_gpu
from meshweave.algorithms.fused import (
    ENTRIES,
    AllGatherAtConsumer,
    DirectReduceScatter,
    FusedAllToAll,
    LoopedReduceScatter,
    NoChoice,
    RingReduceScatter,
    SequentialReduceScatter,
    Tiles,
)
from meshweave.algorithms.fused.product import TiledProduct
from meshweave.algorithms.universal.problem import UniversalProblem
from meshweave.base.errors import UnsupportedError
from meshweave.cost.machine import Machine
from meshweave.describe.layout import Layout
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.machine.cluster import load_cluster
from meshweave.describe.machine.network import FullMeshNetwork
from meshweave.ir.program import Program
from meshweave.ir.program.parse import parse
from meshweave_studies.gpu import GpuRun, lower, run, simulate_in_detail
from meshweave_studies.gpu.kernels import Source

RANKS = 4
NOT_IN_DETAIL = ("looped_reduce_scatter", "looped_all_gather", "t3_copied")
IN_DETAIL = tuple(entry for entry in ENTRIES if entry.name not in NOT_IN_DETAIL)
"""Entries that a GPU in detail runs: none that permutes or adds."""


def program_of(entry: Any, size: int = 64 * RANKS, config: Any = None, replicated: bool = False) -> Program:
    mesh = Mesh.of("tp", (RANKS,), ("x",))
    a, b, c = (Layout(mesh, (placement,)) for placement in entry.accepted[-1 if replicated else 0])
    problem = UniversalProblem(size, size, size, a, b, c, "float16")
    return entry.program(problem, config or next(entry.candidates(problem)))


@cache
def simulated(entry: Any, config: Any = None, num_gpus: int = 1, link: float = 1.0) -> GpuRun:
    gpu, links = small_gpu(), {**LINK, "link_bytes_per_s": int(LINK["link_bytes_per_s"] * link)}
    return run(lower(program_of(entry, config=config), gpu), gpu, num_gpus=num_gpus, **links)


@pytest.mark.parametrize("entry", IN_DETAIL, ids=lambda entry: entry.name)
def test_one_gpu_stands_for_all(entry: Any) -> None:
    one, all_of_them = simulated(entry), simulated(entry, num_gpus=RANKS)
    assert one.spans == all_of_them.spans
    assert one.traffic_bytes == all_of_them.traffic_bytes and one.counters == all_of_them.counters


@pytest.mark.parametrize(
    "entry",
    [entry for entry in IN_DETAIL if isinstance(entry, TiledProduct)],
    ids=lambda e: e.name,
)
def test_a_product_is_one_kernel_wherever_its_regions_go(entry: Any) -> None:
    kernels = lower(program_of(entry), small_gpu())
    assert [kernel.name for kernel in kernels.kernels].count("product") == 1
    tiles = len(kernels.kernels[0].units)
    assert tiles == (64 * RANKS // 32) ** 2 // (1 if entry.accepted[0][0].dim == 1 else RANKS)


def test_the_order_of_tiles_and_the_first_one_have_an_effect_on_time() -> None:
    configs = [Tiles(32, 32, "rows"), Tiles(32, 32, "columns"), Tiles(32, 32, "rows", 3)]
    times = [simulated(RingReduceScatter(), config).duration_ps for config in configs]
    assert len(set(times)) == 3
    assert simulated(RingReduceScatter(), Tiles(16, 64, "rows")).duration_ps not in times


def test_a_first_tile_past_the_last_one_goes_on_from_the_beginning() -> None:
    tiles = 64 * RANKS // 32 * (64 // 32)
    once, again = (simulated(RingReduceScatter(), Tiles(32, 32, "rows", n)).spans for n in (3, tiles + 3))
    assert once == again


def test_direct_reduce_scatter_reads_nothing_for_communication() -> None:
    """T3, section 7.1: it is made of the product's stores alone. A ring reads each part once to send it on."""
    ring, direct = (simulated(entry).traffic_bytes for entry in (RingReduceScatter(), DirectReduceScatter()))
    part = 64 * 64 * RANKS * 2
    assert direct[Source.REDUCE_SCATTER_READ] == 0
    assert ring[Source.REDUCE_SCATTER_READ] == (RANKS - 2) * part
    assert ring[Source.REDUCE_SCATTER_WRITE] == direct[Source.REDUCE_SCATTER_WRITE] == (RANKS - 1) * part


def test_each_peer_has_a_link() -> None:
    """With links a thousand times slower the time is that of what crosses the busiest one."""
    part_s = 64 * 64 * RANKS * 2 / (LINK["link_bytes_per_s"] * 0.001)
    for entry, parts in ((RingReduceScatter(), RANKS - 1), (DirectReduceScatter(), 1)):
        run_of = simulated(entry, link=0.001)
        assert run_of.kernel_ps("product") / 1e12 == pytest.approx(parts * part_s, rel=0.1)
    assert simulated(FusedAllToAll(), link=0.001).duration_ps / 1e12 == pytest.approx(part_s / RANKS, rel=0.1)


def test_tiles_wait_for_the_rows_that_arrive() -> None:
    """A product that is triggered by what is gathered takes as long as its links, or as itself alone."""
    alone = run(lower(parse(_ALONE), small_gpu()), small_gpu(), **LINK)
    quick, slow = (simulated(AllGatherAtConsumer(), link=factor) for factor in (100.0, 0.01))
    hops_ps = (RANKS - 1) * LINK["link_ps"]
    assert alone.duration_ps < quick.duration_ps < alone.duration_ps + 1.5 * hops_ps
    transfer_s = (RANKS - 1) * 64 * 64 * RANKS * 2 / (LINK["link_bytes_per_s"] * 0.01)
    assert transfer_s < slow.duration_ps / 1e12 < 1.2 * transfer_s
    assert slow.counters["sent_bytes"] == (RANKS - 1) * 64 * 64 * RANKS * 2


_ALONE = f"""
program("product")
tp = mesh((1,), ("x",))
a = scratch(({64 * RANKS}, {64 * RANKS}), "float16", on=tp)
b = scratch(({64 * RANKS}, 64), "float16", on=tp)
c = scratch(({64 * RANKS}, 64), "float16", on=tp)
l = lane()
with tp:
    matmul(c, a, b, release=release(), lane=l)
"""


def test_a_cluster_with_a_link_between_any_two_runs_what_a_ring_refuses() -> None:
    ring = load_cluster(f"t3-8:{RANKS}")
    links = FullMeshNetwork(RANKS, 1, ring.network.link, ring.network.link)
    meshed = replace(ring, network=links)
    program = program_of(DirectReduceScatter(), config=Tiles(32, 32))
    assert simulate_in_detail(program, Machine.of(meshed, program)).duration_ps > 0
    with pytest.raises(UnsupportedError, match=r"a link to one neighbour, .* sends to 3 ranks") as error:
        simulate_in_detail(program, Machine.of(ring, program))
    assert "\n" not in str(error.value)


def test_a_product_that_joins_nothing_is_refused() -> None:
    text = _ALONE.replace("release()", "release(joins=True)")
    with pytest.raises(UnsupportedError, match="lane l has none before it to join"):
        lower(parse(text), small_gpu())


def test_baselines_are_runs_of_the_sequential_entry() -> None:
    """Sequential, near-memory reduction, and compute units split between product and collective."""
    program, gpu = program_of(SequentialReduceScatter(), config=NoChoice(), replicated=True), small_gpu()
    plain = run(lower(program, gpu), gpu, **LINK)
    near = run(lower(program, gpu, near_memory=True), gpu, **LINK)
    assert [name for name, _, _ in plain.spans] == ["product", "reduce_scatter", "all_gather"]
    assert near.traffic_bytes[Source.REDUCE_SCATTER_READ] < plain.traffic_bytes[Source.REDUCE_SCATTER_READ]
    split = lower(program, gpu)
    for kernel in split.kernels:
        kernel.compute_units = 3 if kernel.name == "product" else 1
    slower = run(split, gpu, **LINK)
    assert slower.kernel_ps("product") > plain.kernel_ps("product")
    assert slower.kernel_ps("reduce_scatter") >= plain.kernel_ps("reduce_scatter")


def test_what_a_gpu_in_detail_does_not_run_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="has 'permute'"):
        lower(program_of(LoopedReduceScatter()), small_gpu())
