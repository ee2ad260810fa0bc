"""Proofs with masked logits, rows that ranks do not share evenly, and where no gradients are computed."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")

from meshweave.execute.ranks.launch import launch

HERE = {"PYTHONPATH": f"{Path(__file__).parent}:{Path(__file__).parent.parent / 'parallel'}"}


@pytest.mark.gloo
def test_masked_logits_and_uneven_rows() -> None:
    for said in launch("input_rank_functions:said", 3, {}, timeout_s=100, env=HERE):
        assert said["masked"].startswith("equal"), said
        assert said["masked, and other"].startswith("output of the model differs on rank 0"), said
        assert said["uneven"].startswith("equal"), said
        assert said["without gradients"].startswith("equal"), said


@pytest.mark.gloo
def test_ranks_of_meshes_of_their_own_are_compared_with_those_of_other_rows() -> None:
    ranks = launch("input_rank_functions:said_of_replicas", 4, {}, timeout_s=100, env=HERE)
    for said in ranks:
        assert said["averaged"].startswith("equal") and " on ranks " not in said["averaged"], said
        assert "an average over ranks" in said["not averaged"], said
    assert len({said["not averaged"] for said in ranks}) == 1
