"""Times of products, attention and collectives by their shape: bounds, monotony, tables, the one place."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshweave.base.errors import DescriptionError, UnsupportedError
from meshweave.cost.attention import attention_s
from meshweave.cost.calls import engine_flops, with_counts
from meshweave.cost.compute import call_s, engine_amount, shape_s
from meshweave.cost.libraries import collective_seconds
from meshweave.cost.product_table import interpolation, table_s
from meshweave.cost.products import product_s, product_seconds
from meshweave.cost.rates import RankRates
from meshweave.describe.catalog import kernel_constants_names
from meshweave.describe.machine.cluster import load_cluster
from meshweave.describe.machine.kernels import (
    TILE_MENUS,
    AttentionConstants,
    ChipKernels,
    CollectiveConstants,
    ProductConstants,
    ProductTable,
    SystolicConstants,
)
from meshweave.describe.machine.kernels_file import load_kernels
from meshweave.ir.program.call_dims import CALL_DIMS
from meshweave.ir.work import Compute, matmul_work
from sampling import examples

rates = st.floats(1e9, 1e15)
sizes = st.integers(1, 20_000)
durations = st.floats(0, 1e-4)
shapes = st.tuples(sizes, sizes, sizes)


@st.composite
def products(draw: st.DrawFn, menus: tuple[str, ...] = tuple(TILE_MENUS)) -> ProductConstants:
    return ProductConstants(
        draw(st.sampled_from(menus)),
        draw(st.integers(1, 200)),
        draw(rates),
        draw(rates),
        draw(durations),
        draw(durations),
        draw(rates),
        draw(st.floats(0, 1)),
        draw(st.floats(1, 8)),
        draw(st.floats(0, 10)),
        draw(st.floats(0, 0.3)),
        draw(st.floats(0, 1e-11)),
    )


@st.composite
def systolic_products(draw: st.DrawFn) -> SystolicConstants:
    sizes = st.floats(0, 1e7)
    return SystolicConstants(
        draw(rates),
        draw(st.floats(0, 200)),
        draw(rates),
        draw(durations),
        draw(rates),
        draw(sizes),
        draw(sizes),
        draw(st.floats(1, 1e5)),
        draw(st.floats(1, 8)),
    )


@examples(60)
@given(st.one_of(products(), systolic_products()), shapes, st.sampled_from([1, 2, 4]))
def test_a_product_never_beats_the_rate_or_the_memory(
    constants: ProductConstants | SystolicConstants, shape: tuple[int, int, int], item: int
) -> None:
    m, n, k = shape
    seconds = product_s(constants, m, n, k, item)
    assert seconds * (1 + 1e-9) >= 2 * m * n * k / constants.flops_per_s
    assert seconds * (1 + 1e-9) >= item * (m * k + k * n + m * n) / constants.memory_bytes_per_s
    assert seconds * (1 + 1e-9) >= constants.launch_s


@examples(60)
@given(st.one_of(products(("gpu",)), systolic_products()), shapes, shapes, st.integers(1, 4))
def test_a_larger_product_takes_no_less(
    constants: ProductConstants | SystolicConstants,
    shape: tuple[int, int, int],
    more: tuple[int, int, int],
    batch: int,
) -> None:
    larger = [a + b - 1 for a, b in zip(shape, more, strict=True)]
    assert product_s(constants, *shape, 2) <= product_s(constants, *larger, 2) * (1 + 1e-9)
    assert product_s(constants, *shape, 2) <= product_s(constants, *shape, 2, batch) * (1 + 1e-9)


@examples(60)
@given(st.one_of(products(), systolic_products()), shapes)
def test_a_product_takes_at_most_what_its_padded_one_takes(
    constants: ProductConstants | SystolicConstants, shape: tuple[int, int, int]
) -> None:
    """A menu that chooses by m keeps to its choice: pad within what it chooses from."""
    if isinstance(constants, ProductConstants) and constants.tiles == "gpu-by-m" and shape[0] <= 128:
        shape = (shape[0] + 128, *shape[1:])
    padded = [math.ceil(size / step) * step for size, step in zip(shape, (256, 256, 128), strict=True)]
    assert product_s(constants, *shape, 2) <= product_s(constants, *padded, 2) * (1 + 1e-9)


@examples(20)
@given(st.one_of(products(), systolic_products()), st.lists(shapes, min_size=1, max_size=5))
def test_many_products_at_once_are_each(
    constants: ProductConstants | SystolicConstants, many: list[tuple[int, int, int]]
) -> None:
    together = product_seconds(constants, *np.array(many).T, 2)
    assert together == pytest.approx([product_s(constants, *shape, 2) for shape in many])


def test_waves_and_splits_count() -> None:
    constants = ProductConstants("gpu", 132, 8e14, 1e15, 0.0, 0.0, 1e15, overlap=8.0, split_passes=0.0)
    full = product_s(constants, 128 * 12, 128 * 11, 4096, 2)
    assert full == pytest.approx(2 * 128 * 12 * 128 * 11 * 4096 / 8e14, rel=1e-3)
    over = product_s(constants, 128 * 12 + 1, 128 * 11, 4096, 2)
    assert over > 1.02 * full
    whole_k = replace(constants, split_passes=1e6)
    assert product_s(constants, 128, 128, 65536, 2) < product_s(whole_k, 128, 128, 65536, 2) / 4


def test_systolic_arrays_pad_and_turn() -> None:
    """One thin dim is padded to 8 rows whichever of m and n it is; the others to 128."""
    constants = SystolicConstants(1e12, 0.0, 1e15, 0.0, 1e15, 0.0, 0.0, overlap=8.0)
    assert product_s(constants, 1, 128, 128, 2) == pytest.approx(2 * 8 * 128 * 128 / 1e12, rel=1e-3)
    assert product_s(constants, 1000, 3, 129, 2) == product_s(constants, 3, 1000, 129, 2)
    assert product_s(constants, 129, 129, 129, 2) == product_s(constants, 136, 256, 256, 2)
    bound = replace(constants, memory_bytes_per_s=1e9, first_bytes=1e6, last_bytes=1e6)
    in_turn = 2 * 3 * 512 * 512 / 1e9 + 2 * 512**3 / 1e12
    assert product_s(replace(bound, overlap=1.0), 512, 512, 512, 2) == pytest.approx(in_turn, rel=1e-3)
    wide = product_seconds(bound, 512, 512, 512, 2, out_bytes=4) - product_seconds(bound, 512, 512, 512, 2)
    assert float(wide) == pytest.approx(2 * 512 * 512 / 1e9, rel=0.1)


table_points = st.lists(
    st.tuples(st.tuples(sizes, sizes, sizes), st.floats(1e-6, 1e-1)),
    min_size=1,
    max_size=12,
    unique_by=lambda point: point[0],
)


@examples(40)
@given(table_points, st.one_of(st.none(), products()))
def test_a_table_returns_its_points(
    points: list[tuple[tuple[int, int, int], float]], constants: ProductConstants | None
) -> None:
    table = ProductTable.of(dict(points))
    for shape, seconds in points:
        assert table_s(table, constants, "bfloat16", *shape, "error") == pytest.approx(seconds, rel=1e-6)


def test_a_table_knows_alignment_and_does_not_follow_an_outlier() -> None:
    """Where odd m take 1.5 times the base, so does the next odd m, but not its even neighbour."""
    constants = ProductConstants("gpu", 108, 3e14, 1e12, 1e-6, 2e-6, 2e12)
    made = [(m + odd, n, 1024) for m in range(512, 4097, 512) for n in (512, 2048) for odd in (0, 1)]
    times = {shape: product_s(constants, *shape, 2) * (1.5 if shape[0] % 2 else 1.0) for shape in made}
    known = interpolation(ProductTable.of(times), constants, "bfloat16")
    odd, even = (
        float(known.seconds(m, 1024, 1024)) / product_s(constants, m, 1024, 1024, 2) for m in (1793, 1792)
    )
    assert odd > 1.25 and even < 1.15
    outlier = (2048, 512, 1024)
    times[outlier] *= 2
    table = ProductTable.of(times)
    assert table_s(table, constants, "bfloat16", *outlier, "error") == times[outlier]
    beside = float(interpolation(table, constants, "bfloat16").seconds(2056, 512, 1024))
    assert beside < 1.9 * product_s(constants, 2056, 512, 1024, 2)
    assert hash(table) == hash(ProductTable.of(dict(times)))


def test_outside_a_table_is_an_error_or_the_model() -> None:
    table = ProductTable.of({(64, 64, 64): 1e-5, (256, 256, 256): 3e-5})
    constants = ProductConstants("gpu", 108, 3e14, 1e12, 1e-6, 2e-6, 2e12)
    inside = table_s(table, constants, "bfloat16", 128, 128, 128, "error")
    assert inside is not None and 1e-6 < inside < 1e-4
    with pytest.raises(UnsupportedError, match=r"m=512, n=64, k=64 is outside .* m from 64 to 256"):
        table_s(table, constants, "bfloat16", 512, 64, 64, "error")
    assert table_s(table, constants, "bfloat16", 512, 64, 64, "model") is None
    with pytest.raises(UnsupportedError, match="outside"):  # there is no model to take its place
        table_s(table, None, "bfloat16", 512, 64, 64, "model")
    kernels = ChipKernels("c", "s", (("bfloat16", constants),), tables=(("bfloat16", table),))
    chip = replace(load_cluster("dgx-a100").chip, kernels=kernels)
    at_point = matmul_work(64, 64, 64, "bfloat16")
    assert shape_s(at_point, chip) == pytest.approx(1e-5)
    outside = matmul_work(512, 64, 64, "bfloat16")
    assert shape_s(outside, chip) == product_s(constants, 512, 64, 64, 2)
    assert interpolation(table, constants, "bfloat16") is interpolation(table, constants, "bfloat16")


@examples(40)
@given(
    st.integers(1, 200), st.sampled_from([16, 64, 128]), rates, durations, durations, rates,
    st.floats(0, 1), st.floats(1, 6), st.integers(1, 256), st.integers(1, 9000), st.sampled_from([64, 128]),
)  # fmt: skip
def test_attention_keeps_to_its_bounds(
    units: int, block: int, rate: float, tile_s: float, launch_s: float, memory: float,
    tail: float, overlap: float, heads: int, length: int, width: int,
) -> None:  # fmt: skip
    constants = AttentionConstants(units, block, rate, tile_s, launch_s, memory, tail, overlap)
    num_bytes = 8 * heads * length * width
    causal, full = (
        attention_s(constants, heads, length, length, width, num_bytes, is_causal)
        for is_causal in (True, False)
    )
    assert causal <= full * (1 + 1e-9)
    assert full * (1 + 1e-9) >= max(4 * heads * length**2 * width / rate, num_bytes / memory)
    assert causal * (1 + 1e-9) >= max(2 * heads * length**2 * width / rate, num_bytes / memory, launch_s)
    longer = attention_s(constants, heads, length + 17, length + 17, width, num_bytes, True)
    assert longer >= causal * (1 - 1e-9)


@examples(40)
@given(
    st.lists(durations, min_size=4, max_size=4), rates, rates, st.floats(0, 1e-6), st.floats(0, 1),
    st.sampled_from(["all_gather", "all_reduce"]), st.integers(2, 16), st.integers(1, 2**33),
)  # fmt: skip
def test_collectives_grow_with_size(
    times: list[float], slow: float, fast: float, ramp: float, power: float, kind: str, chips: int, size: int
) -> None:
    launch, hop, simple, simple_hop = times
    constants = CollectiveConstants(launch, hop, slow, simple, simple_hop, fast, ramp, power)
    smaller, larger = (float(collective_seconds(constants, kind, chips, x)) for x in (size, 2 * size))
    assert launch <= smaller <= larger
    moved = (2 if kind == "all_reduce" else 1) * size * (chips - 1) / chips
    assert smaller * (1 + 1e-9) >= moved / max(slow, fast)


def test_constants_out_of_range_are_refused() -> None:
    good = ProductConstants("gpu", 1, 1e12, 1e12, 0.0, 0.0, 1e12)
    for change in (
        {"tiles": "many"}, {"units": 0}, {"flops_per_s": 0.0}, {"wave_share": 1.5}, {"overlap": 0.5},
        {"tile_s": -1.0}, {"slowdown": -0.1},
    ):  # fmt: skip
        with pytest.raises(DescriptionError):
            replace(good, **change)
    with pytest.raises(DescriptionError, match="twice"):
        ProductTable(((1, 2, 3, 1.0), (1, 2, 3, 2.0)))
    with pytest.raises(DescriptionError, match="no rows"):
        ProductTable(())
    with pytest.raises(DescriptionError, match="gemm_tile and kernels"):
        chip = load_cluster("dgx-a100").chip
        replace(chip, gemm_tile=(1, 1, 1))


def test_chips_of_the_catalog() -> None:
    for name in kernel_constants_names():
        kernels = load_kernels(name)
        assert kernels.source and (kernels.products or kernels.collectives)
        is_timed_by_links = name.startswith(("tpu", "h800")) or "-pcie-" in name
        assert len({kind for kind, _ in kernels.collectives}) == (0 if is_timed_by_links else 4)
    chip = load_cluster("dgx-h100").chip
    assert chip.kernels == load_kernels("h100-sxm5-80gb")
    products = chip.kernels.product("bfloat16")
    assert products is not None and products.flops_per_s <= chip.peak("bfloat16")
    assert products.memory_bytes_per_s <= chip.memory_bytes_per_s


def test_a_chip_of_systolic_arrays_is_priced_by_shape() -> None:
    kernels = load_kernels("tpu-v5e")
    chip = replace(load_cluster("tpu-v4-pod").chip, kernels=kernels, gemm_tile=None)
    constants = kernels.product("bfloat16")
    assert isinstance(constants, SystolicConstants)
    full, thin = matmul_work(4096, 4096, 4096, "bfloat16"), matmul_work(4096, 4096, 8, "bfloat16")
    for work in (full, thin):
        assert shape_s(work, chip) == product_s(constants, *work.dims, 2)
    rates = [work.flops / (shape_s(work, chip) or 1) / constants.flops_per_s for work in (full, thin)]
    assert rates[0] > 0.8 and rates[1] < 0.05


def test_one_place_prices_by_shape_and_else_by_rate() -> None:
    chip = load_cluster("dgx-h100").chip
    large, thin = matmul_work(8192, 8192, 8192, "bfloat16"), matmul_work(8192, 64, 8192, "bfloat16")
    for work in (large, thin):
        m, n, k = work.dims
        assert chip.kernels is not None
        constants = chip.kernels.product("bfloat16")
        assert constants is not None
        seconds = product_s(constants, m, n, k, 2)
        assert shape_s(work, chip) == seconds
        assert engine_amount(work, chip) == math.ceil(seconds * int(chip.effective_flops_per_s))
    share = [work.flops / chip.peak("bfloat16") / (shape_s(work, chip) or 1) for work in (large, thin)]
    assert 0.6 < share[0] < 0.9 and share[1] < 0.35
    alone = matmul_work(512, 512, 512, "float32")  # no constants: its one rate
    assert shape_s(alone, chip) is None
    assert engine_amount(alone, chip) == engine_flops(alone.flops, chip, "", "float32")
    assert shape_s(large, chip.with_flops_per_s(1e12)) is None
    empty = matmul_work(0, 5, 5, "bfloat16")
    assert engine_amount(empty, chip) == 0


def test_calls_by_shape() -> None:
    chip = load_cluster("dgx-h100").chip
    assert chip.kernels is not None

    def seconds(call: str, shape: tuple[int, ...], num_bytes: int, part: str = "") -> float:
        work = Compute("call", 0, num_bytes, dtype="bfloat16", call=call, shape=shape, part=part)
        return call_s(with_counts(work), chip)

    shape, num_bytes = (2, 16, 4096, 4096, 128), 8 * 2 * 16 * 4096 * 128
    full, causal = (seconds(call, shape, num_bytes) for call in ("attention", "causal_attention"))
    assert 1.6 < full / causal < 2.0
    assert seconds("causal_attention", shape, round(2.5 * num_bytes), "input_grad") == pytest.approx(
        2.5 * causal
    )
    assert chip.kernels.elementwise is not None
    launch_s, rate = chip.kernels.elementwise
    assert seconds("norm", (4096, 4096), 1 << 26) == pytest.approx(launch_s + (1 << 26) / rate)
    as_product = seconds("matmul", (512, 512, 512), 0)
    assert as_product == pytest.approx(shape_s(matmul_work(512, 512, 512, "bfloat16"), chip))


def test_thin_slices_do_not_pay() -> None:
    """A product in 96 parts of k takes far longer in all than one in 4, which takes about as long as whole."""
    chip = load_cluster("dgx-h100").chip
    whole, four, many = (
        slices * (shape_s(matmul_work(4096, 1536, 4096 // slices, "bfloat16"), chip) or 0)
        for slices in (1, 4, 96)
    )
    assert whole < four < 1.6 * whole and many > 3 * four


def test_rates_without_shapes_are_those_of_the_constants() -> None:
    cluster = load_cluster("dgx-h100")
    assert cluster.chip.kernels is not None
    constants = cluster.chip.kernels.product("bfloat16")
    assert constants is not None
    known = RankRates.of(cluster, "bfloat16")
    assert (known.flops_per_s, known.launch_s) == (constants.flops_per_s, constants.launch_s)
    assert RankRates.of(cluster, "float32").flops_per_s == cluster.chip.flops_per_s("float32")


@pytest.mark.parametrize("call", sorted(CALL_DIMS))
def test_a_call_that_does_not_say_its_sizes_is_priced_by_no_shape(call: str) -> None:
    chip = load_cluster("dgx-h100").chip
    for shape in ((), (4,), (4, 4, 4, 4, 4, 4)):
        work = Compute("call", 100, 8, dtype="bfloat16", call=call, shape=shape)
        by_bytes = shape_s(replace(work, shape=()), chip)
        assert shape_s(work, chip) == by_bytes, shape
