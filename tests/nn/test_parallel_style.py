"""torch's `parallelize_module` with universal products, on real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")
from meshweave.execute.ranks.launch import launch

HERE = {"PYTHONPATH": str(Path(__file__).parent)}


@pytest.mark.gloo
def test_a_style_of_any_layout_computes_what_one_process_computes() -> None:
    assert launch("style_rank_functions:two_layers", 4, {}, timeout_s=180, env=HERE) == [[]] * 4
