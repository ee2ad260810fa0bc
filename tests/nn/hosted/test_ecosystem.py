"""Habits of torch and transformers on models that ranks share: as on one process, or refused in one line."""

from __future__ import annotations

import importlib.util
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
NEEDS_ACCELERATE = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None,
    reason="accelerate is not installed",  # only ranks import it
)
SAID = {
    "second derivatives": "gradients of gradients are not computed",
    "anomalies": "give check_nan=False",
    "class of a norm": "RMSNorm.forward was replaced after parallelize",
    "head": "call the whole model",
    "layer": "call the whole model",
    "DDP": "take FSDP2",
    "state of a rank": "its state: of the rank at",
    "shared": "share a model on one rank",
    "initial": "initialise parameters by their names",
    "data": "embed_tokens.weight.data was assigned",
}


def _launched(cases: list[tuple[str, str, str]], num_ranks: int, folder: Path) -> list[dict[str, Any]]:
    payload = {"cases": cases, "folder": str(folder)}
    ranks = launch("ecosystem_rank_functions:tried", num_ranks, payload, timeout_s=600, env=PATHS)
    return list(ranks)


def _check(name: str, answer: Any) -> None:
    assert not isinstance(answer, str), (name, answer)
    if name.startswith("stepped"):
        for optimizer, off in answer.items():  # Muon computes in bfloat16
            assert off < (1e-2 if optimizer == "muon" else TOLERANCE), (name, answer)
    elif name.startswith("trained"):
        assert max(answer["losses"], answer["weights"], answer["logits"]) < 1e-6, (name, answer)
        assert answer["files"] == ["model.safetensors"], (name, answer)
    else:
        assert answer < TOLERANCE, (name, answer)


@pytest.mark.gloo
def test_optimizers_of_matrices_and_what_is_refused(tmp_path: Path) -> None:
    for rank, answers in enumerate(
        _launched([("stepped", "qwen3", "zero3"), ("refused", "qwen3", "zero3")], 2, tmp_path)
    ):
        _check("stepped qwen3 zero3", answers["stepped qwen3 zero3"])
        said = answers["refused qwen3 zero3"]
        assert all(words in said[name] for name, words in SAID.items()), said
        assert ("is the part of another rank" in said["weights of a rank"]) == (rank > 0), said


@NEEDS_ACCELERATE
@pytest.mark.gloo
def test_trainer_trains_evaluates_and_saves(tmp_path: Path) -> None:
    for answers in _launched([("trained", "llama", "megatron")], 2, tmp_path):
        for name, answer in answers.items():
            _check(name, answer)


@pytest.mark.gloo
@pytest.mark.slow  # Dynamo takes 15 s a rank
def test_a_compiled_model_takes_batches_of_several_sizes(tmp_path: Path) -> None:
    for answers in _launched([("compiled", "plain", "data_parallel")], 2, tmp_path):
        _check("compiled plain data_parallel", answers["compiled plain data_parallel"])


@NEEDS_ACCELERATE
@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("strategy", ["megatron", "megatron_sp", "zero3", "atp"])
def test_habits_of_many(tmp_path: Path, strategy: str) -> None:
    kinds = ["llama", "qwen3", "gemma2"] + (["mixtral"] if strategy != "atp" else [])
    cases = [(name, kind, strategy) for name in ("stepped", "trained", "compiled") for kind in kinds]
    cases.append(("compiled", "plain", strategy))
    for answers in _launched(cases, 4, tmp_path):
        for name, answer in answers.items():
            _check(name, answer)
