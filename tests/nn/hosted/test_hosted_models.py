"""Models of transformers that run by their own code: files, dropout, unequal shares, pipelines."""

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
POPULATION = (
    "apertus", "arcee", "bart", "bitnet", "bloom", "cohere", "cohere2", "ernie4_5", "exaone4", "falcon",
    "gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj",
    "cwm", "gpt2", "granite", "granite_swa", "helium", "hunyuan_v1_dense", "jais2", "llama", "ministral",
    "ministral3", "mistral", "modernbert-decoder", "qwen2", "seed_oss",
    "mpt", "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "openai-gpt", "opt", "persimmon", "phi",
    "phi3", "qwen3", "smollm3", "stablelm", "starcoder2", "vaultgemma",
)  # fmt: skip
"""Types whose weights are loaded and which run as a pipeline."""
TIED = ["biogpt", "cohere", "ctrl", "ernie4_5", "gemma3_text", "gpt2", "opt", "smollm3", "starcoder2"]
UNTIED = ["llama", "mistral", "qwen3", "granite", "glm", "gpt_neox", "starcoder2", "gemma2", "olmo2", "phi3"]


def _launched(cases: list[tuple[str, str]], num_ranks: int, folder: Path) -> list[dict[str, Any]]:
    payload = {"cases": cases, "folder": str(folder)}
    ranks = launch("hosted_rank_functions:tried", num_ranks, payload, timeout_s=600, env=PATHS)
    return list(ranks)


def _check_loaded(kind: str, answer: Any) -> None:
    assert isinstance(answer, dict), (kind, answer)
    assert abs(answer["loss"] - answer["wanted"]) < 1e-6, (kind, answer)
    assert answer["names"] and answer["values"], (kind, answer)


@pytest.mark.gloo
def test_weights_of_files_dropout_and_unequal_shares(tmp_path: Path) -> None:
    cases = [("loaded", "gemma2"), ("dropped", "opt"), ("uneven", "llama")]
    cases += [("checkpointed", "gpt_neox")]
    first, second = _launched(cases, 2, tmp_path)
    _check_loaded("gemma2", first["loaded gemma2"])
    dropped = first["dropped opt"]
    assert dropped == second["dropped opt"]
    assert dropped["plain"] == dropped["again"] == dropped["checkpointed"] != dropped["without"]
    assert dropped["gradients plain"] == dropped["gradients again"] == dropped["gradients checkpointed"]
    assert first["uneven llama"] < 1e-5
    assert first["checkpointed gpt_neox"] < 1e-9


@pytest.mark.gloo
def test_ranks_of_a_ring_share_heads(tmp_path: Path) -> None:
    for answers in _launched([("in_rings", "llama")], 4, tmp_path):
        off = answers["in_rings llama"]
        assert isinstance(off, dict) and max(off.values()) < 1e-9, off


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_weights_of_files_of_many(tmp_path: Path) -> None:
    for first in range(0, len(POPULATION), 14):
        cases = [("loaded", kind) for kind in POPULATION[first : first + 14]]
        answers = _launched(cases, 2, tmp_path)[0]
        for name, answer in answers.items():
            _check_loaded(name, answer)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_layers_that_fsdp_shards(tmp_path: Path) -> None:
    for answers in _launched([("sharded", kind) for kind in UNTIED[:3]], 4, tmp_path):
        assert all(isinstance(off, float) and off < 1e-9 for off in answers.values()), answers


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_pipelines_of_untied_models(tmp_path: Path) -> None:
    for answers in _launched([("pipelined", kind) for kind in UNTIED], 4, tmp_path):
        assert all(isinstance(off, float) and off < 1e-9 for off in answers.values()), answers


@pytest.mark.gloo
def test_stages_share_a_table(tmp_path: Path) -> None:
    """Both have the sum of its gradients, optimizers keep the copies equal, and copies that are not are seen.

    A loss over micro-batches with unequal numbers of targets is the mean over all of them.
    """
    for answers in _launched([("tied", "gemma2"), ("pipelined", "llama")], 2, tmp_path):
        _check_tied("tied gemma2", answers["tied gemma2"])
        assert answers["pipelined llama"] < 1e-9, answers


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_stages_of_ranks_share_a_table(tmp_path: Path) -> None:
    for answers in _launched([("resumed", kind) for kind in TIED], 2, tmp_path):
        assert all(off < 1e-9 for off in answers.values()), answers
    for answers in _launched([("tied", kind) for kind in TIED], 4, tmp_path):
        for name, answer in answers.items():
            _check_tied(name, answer)


def _check_tied(name: str, answer: Any) -> None:
    assert isinstance(answer, dict) and answer["off"] < 1e-9, (name, answer)
    assert "have grown apart" in answer["apart"], (name, answer)


@pytest.mark.gloo
@pytest.mark.slow
def test_layers_are_compiled_or_say_why_not(tmp_path: Path) -> None:
    kinds = ("llama", "gpt_neox")
    (answers, _) = _launched([("compiled", kind) for kind in kinds], 2, tmp_path)
    for kind in kinds:
        found = answers[f"compiled {kind}"]
        said = found.pop("megatron_sp fullgraph")
        assert "fullgraph=True" in said, said
        assert all(isinstance(off, float) and off < 1e-9 for off in found.values()), found
