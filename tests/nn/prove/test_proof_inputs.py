"""Proofs with masked logits, rows that ranks do not share evenly, and where no gradients are computed."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")

from meshweave.execute.ranks.launch import launch


@pytest.mark.gloo
def test_masked_logits_and_uneven_rows() -> None:
    env = {"PYTHONPATH": str(Path(__file__).parent)}
    for said in launch("input_rank_functions:said", 3, {}, timeout_s=100, env=env):
        assert said["masked"].startswith("equal"), said
        assert said["masked, and other"].startswith("output of the model differs on rank 0"), said
        assert said["uneven"].startswith("equal"), said
        assert said["without gradients"].startswith("equal"), said
