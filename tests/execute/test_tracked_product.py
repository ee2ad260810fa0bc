"""Products that count their tiles, in Triton's interpreter: alone, and in the programs of fused products."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from cuda_world import ENV, needs_cuda, places  # noqa: E402

from meshweave.algorithms.fused import AllGatherAtConsumer, RingReduceScatter, Tiles  # noqa: E402
from meshweave.execute.cuda.regions import tracked_regions  # noqa: E402
from meshweave.execute.cuda.tiling import Block, block_of, tiles_of_region  # noqa: E402
from meshweave.execute.memory.shared import why_unavailable  # noqa: E402
from meshweave.execute.ranks.launch import launch  # noqa: E402
from meshweave.execute.torch.analysis import RankAnalysis  # noqa: E402
from meshweave.execute.torch.bind import bind  # noqa: E402
from meshweave.ir.program.parse import parse  # noqa: E402
from meshweave.ir.program.release import Release  # noqa: E402

HERE = Path(__file__).parent
INTERPRETED = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton: pip install triton")
needs_shared = pytest.mark.skipif(bool(why_unavailable()), reason=f"shared memory {why_unavailable()}")


@pytest.mark.parametrize(
    "release",
    [
        Release(),
        Release(first=3),
        Release((), "columns", 2),
        Release((), "rows"),
        Release((5, 7), "columns", 1),
        Release((40, 70), "rows", 1),
    ],
)
def test_tiles_cover_a_region_once_and_fit_a_block(release: Release) -> None:
    rows, columns = 83, 100
    block = block_of([(rows, columns, release)], 24, 4)
    covered = torch.zeros(rows, columns, dtype=torch.int32)
    listed = tiles_of_region(rows, columns, release, Block(16, 32, 16) if not release.tile else block)
    for (top, bottom), (left, right) in listed:
        assert bottom - top <= max(block.rows, 16) and right - left <= max(block.columns, 32)
        covered[top:bottom, left:right] += 1
    assert bool((covered == 1).all())


def test_tiles_come_in_the_order_that_a_release_names() -> None:
    block = Block(16, 16, 16)
    assert tiles_of_region(4, 4, Release((2, 2), "columns", 1), block) == [
        ((2, 4), (0, 2)),
        ((0, 2), (2, 4)),
        ((2, 4), (2, 4)),
        ((0, 2), (0, 2)),
    ]
    assert tiles_of_region(4, 40, Release((4, 20), "rows"), block)[:2] == [
        ((0, 4), (0, 16)),
        ((0, 4), (16, 20)),
    ]


def test_every_region_has_a_counter_where_its_tiles_go() -> None:
    problem = next(iter(RingReduceScatter().examples()))
    regions = tracked_regions(RingReduceScatter().program(problem, Tiles()))
    assert len(regions.counter_of) == 16 and len(set(regions.counter_of.values())) == 16
    for rank in range(4):
        own = [holder for (at, _), (holder, _) in regions.counter_of.items() if at == rank]
        assert own == [(rank + 1) % 4, rank, rank, rank]  # the first one is stored in the neighbour's memory
    assert regions.num_counters == 4


def test_an_op_waits_for_regions_by_their_counters_and_not_for_the_kernel() -> None:
    problem = next(iter(RingReduceScatter().examples()))
    program = RingReduceScatter().program(problem, Tiles())
    tracked = RankAnalysis(program, 1, True, True, True, True)
    library = RankAnalysis(program, 1, True, True, True)
    assert tracked.regions is not None and library.regions is None
    puts = [index for index, bound in enumerate(tracked.ops) if bound.op.kind == "put"]
    assert len(puts) == 2
    for index in puts:
        local = [node for node in tracked.awaited_regions[index] if node[0] == 1]
        assert len(local) == 1 and local[0][1] in library.edges[index]
        assert local[0][1] not in tracked.edges[index]


CHECK = """
import itertools, sys, torch
from meshweave.base.errors import UnsupportedError
from meshweave.execute.cuda.kernels import accumulate
from meshweave.execute.cuda.tiling import Block
from meshweave.execute.cuda.tracked_product import TrackedRegion, TrackedProduct
from meshweave.ir.program.ops import Release
generator = torch.Generator().manual_seed(0)
shapes = ((30, 40, 24), 3, False), ((32, 16, 33), 2, True), ((64, 33, 16), 4, True)
orders = ((), "", 0), ((), "columns", 1), ((6, 7), "rows", 2), ((40, 50), "columns", 0)
for which, dtype in enumerate((torch.float32, torch.float16, torch.bfloat16)):
    for number, (((m, n, k), count, adds), order) in enumerate(itertools.product(shapes, orders)):
        if (adds and dtype == torch.bfloat16) or (sys.argv[1] == "some" and number % 3 != which):
            continue
        a = torch.randint(-2, 3, (m, k), generator=generator).to(dtype)
        b = torch.randint(-2, 3, (n, k), generator=generator).to(dtype).t()
        out = torch.full((m, n), 1.0 if adds else float("nan"), dtype=dtype)
        counters, size = torch.zeros(count, dtype=torch.int32), m // count
        regions = [
            TrackedRegion(a[at : at + size], b, out[at : at + size], counters[at // size], Release(*order, adds))
            for at in range(m - size, -1, -size)
        ]
        product, expected = TrackedProduct(regions, block=Block(16, 16, 16)), a.float() @ b.float()
        for run in (1, 2):
            product()
            assert torch.equal(out.float(), run * expected + 1 if adds else expected), (dtype, m, adds, order)
            assert [int(region.counter) for region in regions] == [run * of for of in product.num_tiles]
        TrackedProduct(regions, block=Block(16, 16, 16), counts=False)()
        assert [int(region.counter) for region in regions] == [2 * of for of in product.num_tiles]
for dtype in (torch.float64, torch.float32, torch.float16, torch.int32, torch.int64):
    out = torch.ones(20, 300, dtype=dtype)
    value = torch.arange(12 * 150).reshape(12, 150).remainder(7).to(dtype)
    accumulate(out[3:15, 1::2], value)
    accumulate(out[3], torch.full((300,), 2, dtype=dtype))
    expected = torch.ones(20, 300, dtype=dtype)
    expected[3:15, 1::2] += value
    expected[3] += 2
    assert torch.equal(out, expected), dtype
def far(shape, strides):
    size = sum((count - 1) * stride for count, stride in zip(shape, strides)) + 1
    return torch.empty(size, dtype=torch.float16).as_strided(shape, strides).copy_(torch.ones(shape))
for strides in itertools.product(((3, 1), (1, 1 << 30)), ((16, 1), (1 << 30, 1)), ((16, 1), (1, 1 << 28))):
    a, b, out = map(far, ((16, 3), (3, 16), (16, 16)), strides)
    TrackedProduct([TrackedRegion(a, b, out)], block=Block(16, 16, 16))()
    assert bool((out == 3).all()), strides
    accumulate(out, far((16, 16), strides[2]))
    assert bool((out == 4).all()), strides
try:
    accumulate(torch.ones(2, 2).bfloat16(), torch.ones(2, 2).bfloat16())
    raise SystemExit("bfloat16 was added")
except UnsupportedError:
    pass
"""


@needs_triton
@pytest.mark.parametrize("which", ["some", pytest.param("all", marks=pytest.mark.slow)])
def test_tiles_are_right_and_counted_in_the_interpreter(which: str) -> None:
    """In a process of its own: the interpreter is chosen when a kernel is defined."""
    command = [sys.executable, "-c", CHECK, which]
    subprocess.run(command, env={**os.environ, **INTERPRETED}, check=True, timeout=240)


@pytest.mark.gloo
@needs_triton
@needs_shared
def test_fused_programs_run_their_products_as_kernels_in_the_interpreter() -> None:
    """The programs that the simulator reads; waits of threads, and queued ones. The slow suite has all of them."""
    payload = {"memories": [("shared", "float16"), ("queued", "bfloat16")], "every": 4}
    assert launch("tracked_rank_functions:cases", 3, payload, env=INTERPRETED, timeout_s=120.0) == [[]] * 3


@pytest.mark.gloo
@pytest.mark.slow
@needs_triton
@needs_shared
@pytest.mark.parametrize("num_ranks", [3, 4])
def test_every_fused_program_in_the_interpreter(num_ranks: int) -> None:
    payload = {
        "memories": [
            (kind, dtype) for kind in ("shared", "queued") for dtype in ("float16", "float32", "bfloat16")
        ]
    }
    options = {"env": INTERPRETED, "timeout_s": 400.0}
    assert launch("tracked_rank_functions:cases", num_ranks, payload, **options) == [[]] * num_ranks


@pytest.mark.gloo
@needs_triton
@needs_shared
@pytest.mark.parametrize("memory", ["queued", pytest.param("shared", marks=pytest.mark.slow)])
def test_a_counter_that_never_completes_is_an_error_with_region_and_rank(memory: str) -> None:
    """Queued as on a stream, where the error comes at the end of the run, and polled by the ranks."""
    said = launch("tracked_rank_functions:late", 4, {"memory": memory}, env=INTERPRETED, timeout_s=60.0)
    assert "region acc[" in said[3] and "of rank 3" in said[3] and "rank 2" in said[3], said
    assert all(said), said


@needs_shared
def test_refusals() -> None:
    from meshweave.base.errors import BindError

    program = RingReduceScatter().program(next(iter(RingReduceScatter().examples())), Tiles())
    with pytest.raises(BindError, match="with `memory`"):
        bind(program, 0, {}, products="tracked")
    with pytest.raises(BindError, match="'library' or 'tracked'"):
        bind(program, 0, {}, products="kernel")  # type: ignore[arg-type]


def test_regions_that_wait_for_parts_have_a_kernel_each() -> None:
    """What waits for nothing new joins the kernel before; what waits for a part that arrives begins one."""
    from meshweave.execute.cuda.regions import launches

    for entry, kernels in ((RingReduceScatter(), [4]), (AllGatherAtConsumer(), [1, 1, 1, 1])):
        problem = next(iter(entry.examples()))
        analysis = RankAnalysis(entry.program(problem, Tiles()), 2, True, True, True, True)
        assert analysis.regions is not None
        lanes = [bound.op.lane for bound in analysis.ops]
        needed = [
            {*(other for other in analysis.edges[index] if lanes[other] != lanes[index])}
            | {count.counter for count in analysis.completion_counters.to_start.get((2, index), ())}
            for index in range(len(lanes))
        ]
        own = [index for rank, index in analysis.regions.product_of if rank == 2]
        alike = set(itertools.pairwise(own))
        found = launches(2, analysis.regions, needed, lanes, alike, analysis.edges)
        assert [len(members) for members in found.members.values()] == kernels
        assert len(found.joined) == sum(kernels) - len(kernels)


CHAINED = """
program("chained")
tp = mesh((2,), ("x",))
a = scratch((8, 8), "float32", on=tp)
c = scratch((8, 8), "float32", on=tp, slots=3)
e = scratch((8, 8), "float32", on=tp)
l = lane()
with tp:
    matmul(c, a, a, release=release(), lane=l)
    matmul(c(1), a, a, release=release(joins=True), lane=l)
    matmul(c(2), {}, a, release=release(joins=True), lane=l)
    put(at(1 - tp.x, e), c(2), release=release(), lane=l)
"""


@pytest.mark.parametrize(("operand", "kernels"), [("a", [3]), ("c", [2, 1]), ("c(1)", [2, 1])])
def test_a_region_that_reads_another_begins_a_kernel(operand: str, kernels: list[int]) -> None:
    from meshweave.execute.cuda.regions import launches

    analysis = RankAnalysis(parse(CHAINED.format(operand)), 0, True, True, True, True)
    assert analysis.regions is not None
    found = launches(0, analysis.regions, [()] * 4, ["l"] * 4, {(0, 1), (1, 2)}, analysis.edges)
    assert [len(members) for members in found.members.values()] == kernels


@pytest.mark.gpu
def test_fused_programs_over_symmetric_memory_on_one_device() -> None:
    needs_cuda()
    pytest.importorskip("triton")
    dtypes = ["float32", "float16"]
    if torch.cuda.get_device_capability() >= (9, 0):
        dtypes.append("bfloat16")
    for num_ranks in (3, 4):
        options = {"env": ENV, "places": places(num_ranks), "timeout_s": 240.0}
        payload = {"dtypes": dtypes}
        assert (
            launch("tracked_rank_functions:cases_on_gpu", num_ranks, payload, **options) == [[]] * num_ranks
        )


@pytest.mark.gpu
def test_copies_wait_for_their_regions_on_a_stream() -> None:
    """The copies are queued before the product, on another stream: nothing but the counters holds them back."""
    needs_cuda()
    pytest.importorskip("triton")
    from meshweave.execute.cuda.tracked_product import TrackedProduct, TrackedRegion
    from meshweave.execute.cuda.trigger import StreamWords, copy_when_whole

    device, size, count = torch.device("cuda:0"), 256, 4
    words, dma = StreamWords(device), torch.cuda.Stream()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        a, b = (torch.randint(-2, 3, (count * size, count * size), device=device).to(dtype) for _ in range(2))
        out, target = torch.zeros_like(a), torch.zeros_like(a)
        counters = torch.zeros(count, device=device, dtype=torch.int32)
        regions = [
            TrackedRegion(part, b, out[at * size : (at + 1) * size], counters[at])
            for at, part in reversed(list(enumerate(a.split(size))))
        ]
        product = TrackedProduct(regions)
        product()  # compiled before anything waits for it
        for run in (2, 3):
            target.zero_()
            torch.cuda.synchronize()
            with torch.cuda.stream(dma):
                for region, part, tiles in zip(
                    regions, reversed(target.split(size)), product.num_tiles, strict=True
                ):
                    assert region.counter is not None
                    copy_when_whole(words, part, region.out, region.counter, run * tiles)
            product()
            torch.cuda.synchronize()
            assert torch.equal(target.float(), a.float() @ b.float())


@pytest.mark.gpu
def test_sums_of_several_streams_are_whole() -> None:
    needs_cuda()
    pytest.importorskip("triton")
    from meshweave.execute.cuda.kernels import accumulate, lacks_atomic_add

    device, streams = torch.device("cuda:0"), [torch.cuda.Stream() for _ in range(4)]
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64):
        if lacks_atomic_add(dtype, device):
            continue
        out, value = (torch.ones(513, 300, device=device, dtype=dtype) for _ in range(2))
        torch.cuda.synchronize()
        for stream in streams:
            with torch.cuda.stream(stream):
                accumulate(out[:, 1:], value[:, 1:])
        torch.cuda.synchronize()
        assert float(out[:, 0].double().sum()) == 513 and bool((out[:, 1:] == 5).all()), dtype


@pytest.mark.gpu
def test_a_counter_that_never_completes_on_a_stream_is_an_error_with_region_and_rank() -> None:
    needs_cuda()
    pytest.importorskip("triton")
    options = {"env": ENV, "places": places(4), "timeout_s": 120.0}
    said = launch("tracked_rank_functions:late", 4, {"memory": "symmetric"}, **options)
    assert "region acc[" in said[3] and "of rank 3" in said[3] and "rank 2" in said[3], said
