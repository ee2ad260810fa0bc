"""Fused linear layers against dense ones, and what is said of a region that never becomes whole."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("torch")

from meshweave.execute.memory.shared import why_unavailable
from meshweave.execute.ranks.launch import launch

ENV = {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
needs_shared = pytest.mark.skipif(bool(why_unavailable()), reason=f"shared memory {why_unavailable()}")


@pytest.mark.gloo
@needs_shared
@pytest.mark.parametrize("is_all", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_results_and_gradients_equal_dense_ones(is_all: bool) -> None:
    """Every dtype, algorithm and transport in the slow suite, some of each in the fast one."""
    assert launch("fused_rank_functions:cases", 4, {"all": is_all}, env=ENV, timeout_s=240.0) == [[]] * 4


@pytest.mark.gloo
@needs_shared
@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton: pip install triton")
def test_layers_whose_kernels_count_their_tiles_equal_dense_ones() -> None:
    payload = {"device": "cpu", "transport": "shared"}
    folders = os.pathsep.join(
        str(Path(__file__).parents[at] / name) for at, name in ((0, ""), (1, "execute"))
    )
    env = {**ENV, "PYTHONPATH": folders, "TRITON_INTERPRET": "1"}
    assert launch("fused_rank_functions:tracked", 3, payload, env=env, timeout_s=240.0) == [[]] * 3


@pytest.mark.gloo
@needs_shared
def test_a_region_that_is_never_whole_is_named_with_its_rank_and_the_one_that_is_late() -> None:
    said = launch("fused_rank_functions:late", 4, {}, env=ENV, timeout_s=60.0)
    assert "region y of rank 3" in said[3] or "region y[" in said[3], said
    assert "of rank 3" in said[3] and "rank 2 did not come" in said[3], said
