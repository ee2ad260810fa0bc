"""A product that several threads of a rank ask for: one at a time, and those that are refused change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")

from meshweave.execute.ranks.launch import launch

HERE = {"PYTHONPATH": str(Path(__file__).parent)}


@pytest.mark.gloo
def test_a_product_that_is_refused_in_another_thread_does_not_touch_the_operands_of_the_one_under_way() -> (
    None
):
    for *errors, said in launch("thread_rank_functions:used_meanwhile", 2, {}, timeout_s=180, env=HERE):
        assert max(errors) < 1e-12
        assert "a program already runs in this context" in said
