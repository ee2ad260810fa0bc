"""Legal calls and configs of models of transformers that few have: as on one process, or refused in one line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")
pytest.importorskip("transformers", reason="transformers is not installed")

from meshweave.execute.ranks.launch import launch

HERE = Path(__file__).parent
PATHS = {"PYTHONPATH": os.pathsep.join((str(HERE), str(HERE.parent / "parallel")))}
TOLERANCE = 1e-9


def _launched(cases: list[tuple[str, str, str]], num_ranks: int = 2) -> list[dict[str, Any]]:
    ranks = launch("oddity_rank_functions:tried", num_ranks, {"cases": cases}, timeout_s=300, env=PATHS)
    return list(ranks)


ROWS_AND_HEADS = [
    ("unseen", "llama", "megatron"),
    ("one_head_of_keys", "gemma3_text", "megatron"),
    ("set_afterwards", "gpt2", "megatron"),
]
MORE_ROWS_AND_HEADS = [
    ("masked", "diffllama", "all_to_all_heads"),
    ("packed", "granitemoe", "zero3"),
    ("unseen", "llama", "data_parallel"),
    ("masked", "deepseek_v3", "megatron"),
    ("one_head_of_keys", "olmo2", "megatron_sp"),
    ("set_afterwards", "llama", "megatron"),
    ("set_afterwards", "gpt_oss", "megatron"),
]


@pytest.mark.gloo
@pytest.mark.parametrize(
    "cases", [ROWS_AND_HEADS, pytest.param(MORE_ROWS_AND_HEADS, marks=pytest.mark.slow)], ids=["few", "more"]
)
def test_padded_rows_with_dropout_and_one_head_of_keys(cases: list[tuple[str, str, str]]) -> None:
    for answers in _launched(cases):
        for name, off in answers.items():
            assert not isinstance(off, str) and max(off) < TOLERANCE, (name, off)


ANGLES = [("reaching", "moshi", "ring_attention")]
MORE_ANGLES = [
    ("reaching", "llama", "zero3"),
    ("reaching", "llama", "ring_attention"),
    ("reaching", "moshi", "data_parallel"),
]


@pytest.mark.gloo
@pytest.mark.parametrize(
    "cases", [ANGLES, pytest.param(MORE_ANGLES, marks=pytest.mark.slow)], ids=["few", "more"]
)
def test_angles_follow_from_the_last_position_of_all_ranks(cases: list[tuple[str, str, str]]) -> None:
    for answers in _launched([*cases, ("reaching", "falcon", "ring_attention")]):
        said = answers.pop("reaching falcon ring_attention")
        assert said.endswith("computes attention by code of its own, which does not run in a ring")
        for name, of_it in answers.items():
            assert not isinstance(of_it, str), (name, of_it)
            assert all(max(off) < TOLERANCE for off in of_it.values()), (name, of_it)


@pytest.mark.gloo
def test_factors_positions_and_models_for_evaluation() -> None:
    cases = [
        ("scaled", "bart", "megatron"),
        ("scaled", "gemma2", "megatron"),
        ("too_long", "gpt2", "zero3"),
        ("too_long", "opt", "megatron"),
        ("generated", "granitemoe", "megatron"),
        ("low_rank", "llama", "megatron"),
        ("low_rank", "llama", "zero3"),
    ]
    for answers in _launched(cases):
        for kind in ("bart", "gemma2"):
            off, factor = answers[f"scaled {kind} megatron"]
            assert off == 0 and factor > 1, (kind, off)
        assert "LayoutError: transformer.wpe has 16 rows" in answers["too_long gpt2 zero3"]
        assert "LayoutError: model.decoder.embed_positions has 18 rows" in answers["too_long opt megatron"]
        assert answers["generated granitemoe megatron"] is True
        assert "a linear layer between two others" in answers["low_rank llama megatron"]
        assert max(answers["low_rank llama zero3"]) < TOLERANCE
