"""Times of products on one thread of a CPU: bounds, growth, alignment, caches, and their file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshweave.base.errors import DescriptionError
from meshweave.calibrate.cluster_toml import kernels_toml
from meshweave.calibrate.kernel_fit import fit_cpu_products
from meshweave.cost.products import product_s, product_seconds
from meshweave.describe.machine.kernels import ChipKernels, CpuProductConstants
from meshweave.describe.machine.kernels_file import load_kernels
from sampling import examples

sizes = st.integers(1, 9000)
byte_s = st.floats(0, 1e-9)
MADE = CpuProductConstants(1.3e11, 2.6e-6, 1.1e10, 8e6, 4e-12, 5e-12, 1e-11, 2e-11, 1.5e-10)


@st.composite
def cpu_products(draw: st.DrawFn) -> CpuProductConstants:
    rates = draw(st.floats(1e9, 1e13)), draw(st.floats(0, 1e-4)), draw(st.floats(1e8, 1e12))
    return CpuProductConstants(*rates, draw(st.floats(1e4, 1e9)), *(draw(byte_s) for _ in range(5)))


@examples(60)
@given(cpu_products(), st.tuples(sizes, sizes, sizes), st.sampled_from([2, 4, 8]), st.integers(1, 5))
def test_a_product_keeps_to_its_rates(
    constants: CpuProductConstants, shape: tuple[int, int, int], item: int, batch: int
) -> None:
    m, n, k = shape
    seconds = product_s(constants, *shape, item)
    assert seconds * (1 + 1e-9) >= 2 * m * n * k / constants.flops_per_s + constants.launch_s
    stored_s = constants.store_s * item * m * n + constants.copy_s * item * k * n
    assert seconds * (1 + 1e-9) >= constants.launch_s + stored_s
    together = product_s(constants, *shape, item, batch)
    assert together == pytest.approx(constants.launch_s + batch * (seconds - constants.launch_s), rel=1e-6)


@examples(60)
@given(
    cpu_products(),
    st.tuples(sizes, st.integers(1, 500), sizes),
    st.tuples(sizes, st.integers(0, 500), sizes),
)
def test_a_larger_product_takes_no_less(
    constants: CpuProductConstants, shape: tuple[int, int, int], more: tuple[int, int, int]
) -> None:
    """Where rows of C stay aligned and no library changes its kernel by k."""
    constants = replace(constants, strided_s=0.0)
    m, n, k = shape[0], 16 * shape[1], shape[2]
    larger = m + more[0], n + 16 * more[1], k + more[2]
    assert product_s(constants, m, n, k, 4) <= product_s(constants, *larger, 4) * (1 + 1e-9)


def test_rows_within_cache_lines_and_caches_count() -> None:
    aligned, within = (product_s(MADE, 1000, n, 16, 4) for n in (1024, 1023))
    assert within > 1.2 * aligned
    assert product_s(MADE, 1000, 1024, 16, 8) > aligned
    small, large = (product_s(MADE, m, 1024, 64, 4) / m for m in (256, 8192))
    assert large > 1.5 * small
    banded, beyond = (product_s(MADE, 4000, 1600, k, 4) for k in (112, 113))
    assert banded > 1.2 * beyond


def test_the_fit_recovers_constants() -> None:
    draw = np.random.default_rng(0)
    shapes = np.exp(draw.uniform(np.log(16), np.log(4096), (200, 3))).round()
    seconds = product_seconds(MADE, *shapes.T, 4)
    fitted = fit_cpu_products(shapes, seconds, 4)
    assert np.abs(product_seconds(fitted, *shapes.T, 4) / seconds - 1).mean() < 0.01


def test_a_file_holds_them(tmp_path: Path) -> None:
    kernels = ChipKernels(
        "a core", "a test", (("float32", MADE), ("float64", replace(MADE, flops_per_s=6e10)))
    )
    (tmp_path / "cpu.toml").write_text(kernels_toml(kernels))
    assert load_kernels("cpu.toml", tmp_path) == kernels
    for change in ({"flops_per_s": 0.0}, {"cache_bytes": 0.0}, {"launch_s": -1.0}, {"store_s": -1e-12}):
        with pytest.raises(DescriptionError):
            replace(MADE, **change)
