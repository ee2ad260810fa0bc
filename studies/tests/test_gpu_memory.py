"""What bounds a compute unit and a slice of the cache, by closed forms; tiles that a library chooses."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_programs import LINK, fused, sequential, small_gpu
from meshweave.describe.machine.gpu import GpuFile, load_gpu
from meshweave.ir.program import Program
from meshweave.ir.program.parse import parse
from meshweave_studies.gpu import Arbiter, GpuRun, lower, run
from meshweave_studies.gpu.kernels import Kernels, Rectangle, Region, Source, StoreTarget
from meshweave_studies.gpu.tiles import SPLITS, choose_tile, estimated_ps
from sampling import examples

BLOCK = 16384


def moved(gpu: GpuFile, num_blocks: int, compute_units: int) -> GpuRun:
    """Return the run of a kernel that copies blocks of memory, each once, with some compute units."""
    kernels = Kernels()
    kernel = kernels.add_kernel("copy", Source.OTHER_READ, Source.OTHER_WRITE)
    kernels.kernels[kernel].compute_units = compute_units
    for number in range(num_blocks):
        source, target = (
            kernels.add_region(Region(Rectangle(base + number * BLOCK, 1, BLOCK, 0))) for base in (0, 1 << 30)
        )
        kernels.add_move(kernel, target, StoreTarget.LOCAL, (source,))
    return run(kernels, gpu, **LINK)


@pytest.mark.parametrize("in_flight", [2048, 4096, 8192])
def test_a_compute_unit_reads_what_it_has_in_flight_in_a_latency(in_flight: int) -> None:
    """Little's law: a unit of an idle memory reads its bytes in flight in each round trip."""
    gpu = load_gpu("t3-80cu").model_copy(update={"in_flight_bytes": in_flight})
    cache, memory = gpu.cache, gpu.memory
    dram_ps = (memory.timing.rcd + memory.timing.cl) * 10**12 // int(memory.clock_hz)
    round_trip_ps = cache.bank_ps + cache.to_memory_ps + dram_ps + cache.from_memory_ps
    blocks = 64
    ideal_ps = blocks * BLOCK / in_flight * round_trip_ps
    took_ps = moved(gpu, blocks, compute_units=1).duration_ps
    assert ideal_ps <= took_ps <= 1.25 * ideal_ps


def test_units_share_the_rate_of_memory() -> None:
    gpu = load_gpu("t3-80cu")
    made = moved(gpu, 2048, compute_units=80)
    bytes_per_s = sum(made.traffic_bytes.values()) / (made.duration_ps / 1e12)
    assert 0.6e12 < bytes_per_s < 1.024e12


@pytest.mark.parametrize(("plain_sets", "misses"), [(False, 32), (True, 64)])
def test_lines_of_one_number_modulo_the_sets_share_one_set_unless_hashed(
    plain_sets: bool, misses: int
) -> None:
    """32 lines, a whole number of sets apart, are read twice in turn: 16 of one set do not hold them."""
    gpu = small_gpu()
    line, ways = gpu.cache.line_bytes, gpu.cache.lines_per_set
    sets = gpu.cache.num_bytes // line // ways
    kernels = Kernels()
    kernel = kernels.add_kernel("copy", Source.OTHER_READ, Source.OTHER_WRITE)
    kernels.kernels[kernel].compute_units = kernels.kernels[kernel].slots = 1
    for number in range(4 * ways):
        source, target = (
            kernels.add_region(Region(Rectangle(base, 1, line, 0)))
            for base in (number % (2 * ways) * sets * line, (1 << 30) + number * line)
        )
        kernels.add_move(kernel, target, StoreTarget.LOCAL, (source,))
    assert run(kernels, gpu, plain_sets=plain_sets, **LINK).counters["cache_misses"] == misses


def test_communication_is_not_held_back_once_the_producer_is_through() -> None:
    gpu = small_gpu()
    program = lower(fused(2048, 256, 64, 4), gpu)
    held, drained = (
        run(program, gpu, arbiter=Arbiter("communication-aware", 2, drains=drains), **LINK)
        for drains in (False, True)
    )
    assert drained.counters["held_cycles"] < held.counters["held_cycles"]
    assert drained.kernel_ps("product") < held.kernel_ps("product")
    assert drained.traffic_bytes == held.traffic_bytes
    never = [
        run(program, gpu, arbiter=Arbiter("communication-aware", 65, drains=drains), **LINK).spans
        for drains in (False, True)
    ]
    assert never[0] == never[1]


def durations(policy: str, queue: int) -> tuple[int, int]:
    """Return how long a product takes alone and fused, its stores past the cache, with a queue of this length."""
    gpu = small_gpu()
    gpu = gpu.model_copy(update={"memory": gpu.memory.model_copy(update={"queue": queue})})
    arbiter = Arbiter(policy)  # type: ignore[arg-type]
    alone, joined = (
        run(lower(make(2048, 256, 256, 4), gpu), gpu, arbiter=arbiter, **LINK) for make in (sequential, fused)
    )
    return alone.kernel_ps("product"), joined.kernel_ps("product")


def test_stores_that_fill_the_queues_stall_loads_behind_them() -> None:
    """Slices whose queue is full serve nothing: short queues cost the fused product more than long ones."""
    long_alone, long_fused = durations("round-robin", 240)
    short_alone, short_fused = durations("round-robin", 4)
    assert short_fused / long_fused > 1.02 * short_alone / long_alone


def test_a_product_beside_communication_is_no_slower_where_it_goes_first() -> None:
    _, round_robin = durations("round-robin", 64)
    _, aware = durations("communication-aware", 64)
    assert aware <= round_robin


def product(m: int, n: int, k: int) -> Program:
    return parse(f"""
program("product")
tp = mesh((1,), ("x",))
A = tensor(({m}, {k}), "bfloat16")
B = tensor(({n}, {k}), "bfloat16")
C = tensor(({m}, {n}), "bfloat16")
a = input(A, tp[R])
b = input(B, tp[R])
c = output(C, tp[R])
compute = lane()
with tp:
    matmul(c, a, b, transpose_b=True, lane=compute)
""")


@examples(40)
@given(st.integers(1, 700), st.integers(1, 700), st.integers(1, 4000))
def test_tiles_of_parts_of_k_cover_a_product_once(m: int, n: int, k: int) -> None:
    gpu = load_gpu("a100")
    choice = choose_tile(gpu, m, n, k, 2)
    made = lower(product(m, n, k), gpu)
    units = made.kernels[0].units
    assert (
        sum((i1 - i0) * (j1 - j0) * (k1 - k0) for _, _, _, _, i0, i1, j0, j1, k0, k1, *_ in units)
        == m * n * k
    )
    assert len(made.kernels) == (2 if choice.splits > 1 else 1)
    by_tile: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for unit in units:
        by_tile.setdefault(unit[4:8], []).append(unit[8:10])
    for parts in by_tile.values():
        assert len(parts) == choice.splits and parts[0][0] == 0 and parts[-1][1] == k
        assert all(one[1] == other[0] for one, other in pairwise(parts))
    stored = [made.regions[unit[0]].rectangle for unit in made.kernels[-1].units]
    assert sum(area.rows * area.row_bytes for area in stored) == 2 * m * n


@examples(100)
@given(st.integers(1, 20000), st.integers(1, 20000), st.integers(1, 20000))
def test_the_chosen_tile_is_the_fastest_of_the_library(m: int, n: int, k: int) -> None:
    gpu = load_gpu("h100")
    choice = choose_tile(gpu, m, n, k, 2)
    least = estimated_ps(gpu, choice, m, n, k, 2)
    assert (choice.rows, choice.columns) in {tuple(tile) for tile in gpu.tiles} and choice.splits in SPLITS
    for rows, columns in gpu.tiles:
        slots = max(1, min(8, gpu.slots * gpu.tile[0] * gpu.tile[1] // (rows * columns)))
        other = type(choice)(rows, columns, gpu.tile[2], 1, slots)
        assert least <= estimated_ps(gpu, other, m, n, k, 2)


def test_few_tiles_of_a_long_k_are_faster_in_parts() -> None:
    gpu = load_gpu("a100")
    alone = gpu.model_copy(update={"tiles": []})
    split, whole = (
        run(lower(product(128, 256, 8192), one), one, **LINK).spans[-1][2] for one in (gpu, alone)
    )
    assert choose_tile(gpu, 128, 256, 8192, 2).splits > 1
    assert split < whole / 2
