"""Products below 16 bits are priced by measured constants of the chip, or refused."""

from __future__ import annotations

import pytest

import meshweave as mw
from meshweave.base.errors import DescriptionError
from meshweave.describe.catalog import cluster_names
from meshweave.describe.machine.measured_file import LOW_PRECISIONS

MODEL = "llama-2-7b"


@pytest.mark.parametrize("name", cluster_names())
def test_a_precision_is_measured_on_the_chip_or_refused(name: str) -> None:
    cluster = mw.load_cluster(name)
    kernels = cluster.chip.kernels
    measured = {dtype for dtype, _ in kernels.products} if kernels else set()
    for dtype in LOW_PRECISIONS:
        if dtype in measured:
            mw.algorithms.StepProblem(mw.load_model(MODEL), cluster, 8, 2048, product_dtype=dtype)
        else:
            with pytest.raises(DescriptionError, match=f"products in {dtype} were not measured on chip"):
                mw.algorithms.StepProblem(mw.load_model(MODEL), cluster, 8, 2048, product_dtype=dtype)


@pytest.mark.parametrize("name", ["dgx-h100:8", "dgx-b200:8", "dgx-b300:8", "gb300-nvl72:8"])
def test_fewer_bits_take_less_time(name: str) -> None:
    """Of a layer with large products on one chip."""
    times = {
        dtype: mw.step(MODEL, name, 8, 4096, tp=8, micro_batch=8, product_dtype=dtype).time_s
        for dtype, _ in mw.load_cluster(name).chip.kernels.products  # type: ignore[union-attr]
        if dtype == "bfloat16" or dtype in LOW_PRECISIONS
    }
    assert len(times) >= 3
    assert max(times, key=lambda dtype: times[dtype]) == "bfloat16"
