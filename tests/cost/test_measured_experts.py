"""What `validation/fit_grouped.py` takes for the rows of the rank that was timed."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest


@pytest.fixture(scope="module")
def fit() -> ModuleType:
    pytest.importorskip("scipy")
    sys.path.insert(0, str(Path(__file__).parents[2] / "validation"))
    try:
        import fit_grouped
    finally:
        sys.path.pop(0)
    return fit_grouped


def row(**other: object) -> dict[str, str]:
    """Return a measured row: 64 tokens that choose 2 of 8 experts on 4 ranks."""
    sizes = {"tokens": 64, "hidden": 256, "inter": 512, "topk": 2, "experts": 8, "tp": 1, "ep": 4}
    names = {"backend": "SGLang 0.5.14", "kernel": "sglang_fused_moe_triton", "dtype": "bfloat16"}
    of = {**sizes, **names, "distribution": "balanced", "latency_ms": 1.0, **other}
    return {name: str(value) for name, value in of.items()}


def test_copies_go_to_the_experts_with_the_fewest_rows(fit: ModuleType) -> None:
    rows = fit.topped_up(np.array([[0, 3, 4], [4, 4, 4], [1, 1, 1]]), 6, 4)
    assert rows.sum() == 22 + 6 and rows.max() == 4
    assert list(rows[1]) == [4, 4, 4] and sorted(rows[2]) == [2, 2, 2]


@pytest.mark.parametrize("distribution", ["power_law_1.01", "power_law_1.2"])
def test_no_expert_has_more_rows_than_there_are_tokens(fit: ModuleType, distribution: str) -> None:
    for rows, held in fit.drawn_rows((8, 16, 4, 4, distribution)):
        assert rows.max() <= 8 and held <= min(8, rows.sum()) and 8 <= rows.sum() <= 32


def test_balanced_rows_are_whole(fit: ModuleType) -> None:
    ((rows, held),) = fit.drawn_rows((1, 512, 22, 64, "balanced"))
    assert list(rows) == [1, 0, 0, 0, 0, 0, 0, 0] and held == 1


def test_copies_elsewhere_are_computed_by_expert_0_of_some_kernels(fit: ModuleType) -> None:
    here, elsewhere = (
        fit.rows_of([row(kernel=kernel)])[0] for kernel in ("other", "sglang_fused_moe_triton")
    )
    assert (here.rows[0], here.absent[0], here.tokens[0]) == (32, 96, 64)
    assert (elsewhere.rows[0], elsewhere.absent[0], elsewhere.tokens[0]) == (64, 0, 32)


def test_models_without_a_gate_have_one_product_up(fit: ModuleType) -> None:
    plain = {"hidden": 2688, "inter": 1856}
    tables = [row(**plain), row(**plain, backend="SGLang 0.5.10"), row()]
    assert list(fit.rows_of(tables)[0].columns) == [1, 2, 2]
