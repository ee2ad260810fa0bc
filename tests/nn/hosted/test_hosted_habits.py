"""What users of transformers give a model and call of it, on several ranks as on one: masks, generation, files."""

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
ADAPTED = [
    "bloom", "cohere", "falcon", "gemma2", "gpt_neox", "granite", "llama", "mistral", "olmo2", "phi", "phi3",
    "qwen2", "qwen3",
]  # fmt: skip
REFUSED = {
    "dropout": "the adapter has lora_dropout",
    "variant": "DoraLinearLayer of peft",
    "two": "the adapter has the adapters default, second",
    "embedding": "give get_base_model()",
    "head": "lm_head: the adapter is of the head",
    "whole": "give get_base_model()",
    "layers of this library": "adapters are computed in models that run by their own code",
}
PATHS = {"PYTHONPATH": os.pathsep.join((str(HERE), str(HERE.parent / "parallel")))}
TOLERANCE = 1e-12
NEEDS_PEFT = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None,
    reason="peft is not installed",  # only ranks import it
)
STRATEGIES = ["megatron", "megatron_sp", "atp", "zero3", "data_parallel", "all_to_all_heads"]
WITHOUT_POSITIONS = ("bloom", "mpt")
MASKED = [
    "cohere2", "cwm", "falcon", "gemma2", "gpt2", "gptj", "granite", "llama", "ministral", "mistral", "olmo2",
    "phi", "qwen2", "qwen3", "seed_oss", "starcoder2", *WITHOUT_POSITIONS,
]  # fmt: skip
GENERATING = [
    "apertus", "bloom", "cohere", "exaone4", "falcon", "gemma2", "glm4", "gpt2", "gpt_neox", "gptj", "granite",
    "helium", "llama", "mistral", "mpt", "nemotron", "olmo2", "opt", "phi", "phi3", "qwen2", "qwen3",
    "seed_oss", "smollm3", "stablelm", "starcoder2",
]  # fmt: skip
SAID = {
    "mask": "rank 1 has other attention_mask than rank 0",
    "positions": "rank 1 has other position_ids than rank 0",
    "mask of one": "given: attention_mask, and  on the others",
    "short mask": "attention_mask is of 15 tokens, and there are 16",
    "mask of more dims": "give a tensor (batch, sequence)",
    "rows of a mask": "attention_mask has 3 rows, and tokens 4",
    "long positions": "position_ids are of 17 tokens",
    "cache with gradients": "under torch.no_grad()",
    "logits of a loss": "a loss is of all tokens",
    "generator": "rank 1 has other generator than rank 0",
    "options": "max_new_tokens: 3, and 2 on the others",
    "prompts": "rank 1 has other arguments of a call than rank 0",
    "time": "give max_new_tokens",
    "early exit": "not drafted by the first layers",
    "time by place": "give max_new_tokens",
    "beams": "generate with the weights under megatron or atp",
    "static": "give cache_implementation='dynamic'",
    "one row": "tokens are of shape (16,); give (batch, sequence)",
    "whole weights": "mw.load_weights(module, folder) reads whole weights",
    "whole weights in place": "mw.load_weights(module, folder) reads whole weights",
    "other layout in place": "load it without assign=True",
}


def _launched(cases: list[tuple[str, str, str]], num_ranks: int, folder: Path) -> list[dict[str, Any]]:
    payload = {"cases": cases, "folder": str(folder)}
    ranks = launch("habit_rank_functions:tried", num_ranks, payload, timeout_s=600, env=PATHS)
    return list(ranks)


def _check_given(name: str, answer: Any) -> None:
    assert isinstance(answer, dict), (name, answer)
    for form, off in answer.items():
        if form in ("packed", "documents") and any(kind in name for kind in WITHOUT_POSITIONS):
            assert "takes no position_ids" in off
        else:
            assert not isinstance(off, str) and max(off) < TOLERANCE, (name, form, off)


def _check_generated(name: str, answers: list[dict[str, Any]]) -> None:
    for form, answer in answers[0][name].items():
        if form == "beams" and "zero3" in name:
            assert "beams change rows" in answer
        else:
            is_same, off, _ = answer
            assert is_same and off < TOLERANCE, (name, form, answer)
        assert all(other[name][form] == answer for other in answers), (name, form)


@pytest.mark.gloo
def test_masks_generation_files_and_what_differs(tmp_path: Path) -> None:
    cases = [
        ("stepped", "qwen3", "zero3"),
        ("given", "mistral", "megatron_sp"),
        ("generated", "llama", "megatron"),
        ("saved", "gpt2", "zero3"),
        ("differing", "qwen3", "zero3"),
        ("fused", "gpt2", "megatron"),
    ]
    ranks = _launched(cases, 2, tmp_path)
    for answers in ranks:
        _check_given("given mistral megatron_sp", answers["given mistral megatron_sp"])
        assert answers["stepped qwen3 zero3"] == [1, 1]
        fused = answers["fused gpt2 megatron"]
        assert max(fused["AdamW"], fused["SGD"]) < 1e-3 and fused["norms"][0] == fused["norms"][1] > 0, fused
        said = answers["differing qwen3 zero3"]
        assert said.keys() == SAID.keys()
        assert all(words in said[name] for name, words in SAID.items()), said
    _check_generated("generated llama megatron", ranks)
    wrong = ranks[0]["saved gpt2 zero3"]
    assert wrong and not any(wrong.values()), wrong


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_masks_and_packed_rows_of_many(tmp_path: Path, strategy: str) -> None:
    for answers in _launched([("given", kind, strategy) for kind in MASKED], 4, tmp_path):
        for name, answer in answers.items():
            _check_given(name, answer)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_rings_say_what_computes_with_a_mask(tmp_path: Path) -> None:
    (answer,) = _launched([("given", "qwen3", "ring_attention")], 2, tmp_path)[0].values()
    assert all("under all_to_all_heads it is computed" in said for said in answer.values()), answer


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("strategy", "num_ranks"), [("megatron", 2), ("megatron", 4), ("atp", 4), ("zero3", 2)]
)
def test_generation_of_many(tmp_path: Path, strategy: str, num_ranks: int) -> None:
    ranks = _launched([("generated", kind, strategy) for kind in GENERATING], num_ranks, tmp_path)
    for name in ranks[0]:
        _check_generated(name, ranks)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_that_share_rows_do_not_generate(tmp_path: Path) -> None:
    cases = [("generated", "qwen3", name) for name in ("megatron_sp", "ring_attention", "all_to_all_heads")]
    for name, answer in _launched(cases, 2, tmp_path)[0].items():
        assert all("generate with the weights under megatron or atp" in said for said in answer.values()), (
            name
        )


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("strategy", ["megatron", "atp", "zero3"])
def test_files_of_many(tmp_path: Path, strategy: str) -> None:
    kinds = ["gpt2", "gpt_neox", "llama", "gemma2", "olmo2", "phi", "opt", "bloom", "falcon", "qwen3"]
    for name, wrong in _launched([("saved", kind, strategy) for kind in kinds], 4, tmp_path)[0].items():
        assert isinstance(wrong, dict) and not any(wrong.values()), (name, wrong)


def _check_adapted(name: str, answer: Any) -> None:
    assert isinstance(answer, dict), (name, answer)
    assert all(abs(own - right) < TOLERANCE for own, right in answer["losses"]), (name, answer)
    assert answer["losses"][-1][0] < answer["losses"][0][0], (name, answer)
    assert answer["names"] and answer["count"] >= 8 and "merge_and_unload()" in answer["said"], (name, answer)
    assert max(answer["adapters"], answer["merged"]) < TOLERANCE, (name, answer)


@NEEDS_PEFT
@pytest.mark.gloo
def test_adapters_train_and_merge_as_on_one_process(tmp_path: Path) -> None:
    ranks = _launched(
        [("adapted", "granite", "megatron_sp"), ("refused", "granite", "megatron")], 2, tmp_path
    )
    for answers in ranks:
        _check_adapted("granite", answers["adapted granite megatron_sp"])
        said = answers["refused granite megatron"]
        assert said.keys() == REFUSED.keys()
        assert all(words in said[name] for name, words in REFUSED.items()), said


@NEEDS_PEFT
@pytest.mark.gloo
def test_peft_saves_and_loads_adapters_of_a_parallelised_model(tmp_path: Path) -> None:
    for answers in _launched([("kept", "llama", "zero3")], 2, tmp_path):
        answer = answers["kept llama zero3"]
        assert answer["names"] and answer["differ"] > 1e-3, answer
        assert max(answer["state"], answer["saved"], answer["loaded"]) < TOLERANCE, answer
        assert "are not switched off or on" in answer["said"]["disabled"], answer
        assert "merge_and_unload()" in answer["said"]["merged"], answer


@NEEDS_PEFT
@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_adapters_of_many(tmp_path: Path, strategy: str) -> None:
    for answers in _launched([("adapted", kind, strategy) for kind in ADAPTED], 4, tmp_path):
        for name, answer in answers.items():
            _check_adapted(name, answer)


def test_a_rank_without_rows_of_a_weight_has_none_of_its_adapter() -> None:
    from meshweave.nn.hosted.adapters import positions_of

    rows, columns = positions_of(((), ((1, 3), (5, 6))))
    assert rows.numel() == 0 and columns.tolist() == [1, 2, 5] and rows.dtype == columns.dtype
