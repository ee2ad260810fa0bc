"""What parallelised models do not take is refused on all ranks, and before anything of the model is replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")

from meshweave.execute.ranks.launch import launch

HERE = {"PYTHONPATH": str(Path(__file__).parent)}
OF_TOKENS = (
    "tokens[1, 2] is 99: the vocabulary has 24 words, 0 to 23", "tokens[1, 2] is -1: the vocabulary",
    "targets[1, 2] is 24: the vocabulary has 24 words, 0 to 23, or -100 for none", "targets[1, 2] is -1",
    "tokens are float32; give int64 or int32", "targets are of shape (4, 4), tokens of (4, 8)",
    "targets are float32; give int64", "a sequence of 40 tokens, and the model has 32 learned positions",
    "tokens are of shape (0, 8)", "tokens are of shape (8,)", "tokens[1, 2] is 99",
    "tokens are on the meta device", "targets are on the meta device",
)  # fmt: skip
OF_MODELS = {
    "layer_twice": "transformer.h.0.ln_1.weight and transformer.h.1.ln_1.weight are one parameter",
    "module_twice": "transformer.h.0.mlp.c_fc.weight and transformer.h.1.mlp.c_fc.weight are one parameter",
    "parameter_twice": "transformer.h.0.ln_2.weight and transformer.h.1.ln_1.weight are one parameter",
    "three_names": "transformer.wte.weight, transformer.wpe.weight and lm_head.weight are one parameter",
    "one_memory": "transformer.h.0.attn.c_proj.weight and transformer.h.1.attn.c_proj.weight overlap in memory",
    "overlapping_memory": "transformer.h.1.attn.c_proj.weight overlap in memory",
    "tied_by_memory": "lm_head.weight and transformer.wte.weight overlap in memory",
    "bias_of_a_tied_head": "lm_head has a bias and the weight of transformer.wte",
    "parametrized": "transformer.h.1.mlp.c_fc: weight is computed by a parametrization",
    "hooked": "transformer.ln_f.weight has hooks",
    "with_gradient": "transformer.wte.weight has a gradient",
    "max_norm": "transformer.wte has max_norm=1.0",
    "scaled_by_frequency": "transformer.wte has scale_grad_by_freq=True",
    "sparse": "transformer.wte has sparse=True",
}


def _answers(*names: str, num_ranks: int = 2, timeout_s: float = 300) -> list[dict[str, Any]]:
    return launch("refusal_rank_functions:refuse", num_ranks, {"names": names}, timeout_s=timeout_s, env=HERE)


@pytest.mark.gloo
def test_tokens_and_models_that_are_not_taken() -> None:
    names = "tokens", "nothing_to_learn", "models", "stale_optimizer", "norm_class", "meta", "others"
    for answer in _answers(*names):
        assert "LayerNorm.forward was replaced after parallelize" in answer["norm_class"]
        for strategy, said in answer["tokens"].items():
            assert said[-1] == "", strategy
            for found, expected in zip(said, OF_TOKENS, strict=False):
                assert found.startswith("LayoutError: "), (strategy, found, expected)
                assert expected in found, (strategy, found)
        assert answer["nothing_to_learn"] == ["nan"] * 5
        assert answer["models"].keys() == OF_MODELS.keys()
        for name, (said, is_as_before) in answer["models"].items():
            assert said.startswith("UnsupportedError: "), (name, said)
            assert OF_MODELS[name] in said, (name, said)
            assert is_as_before, name
        assert "as it was before parallelize" in answer["stale_optimizer"]
        assert len(answer["meta"]) == 3
        for said in answer["meta"]:
            assert said.startswith("UnsupportedError: transformer.wte.weight is on the meta device"), said
        for kind, said in answer["others"].items():
            assert said.startswith(f"UnsupportedError: {kind} is none of the causal language models"), said


@pytest.mark.gloo
@pytest.mark.slow
def test_ranks_that_are_alike_differ_nowhere() -> None:
    for answer in _answers("alike", num_ranks=4, timeout_s=500):
        assert answer["alike"] == []


@pytest.mark.gloo
def test_padding_and_frozen_parameters_are_honoured() -> None:
    for answer in _answers("padding", "frozen"):
        for name in ("padding", "frozen"):
            assert max(answer[name].values()) < 1e-10, answer[name]


@pytest.mark.gloo
def test_a_loss_without_the_term_of_a_rank_is_none() -> None:
    """A rank that fails before its loss still says what it was called with: that is no term of the loss."""
    first, second, third = (answer["without_loss"] for answer in _answers("without_loss", num_ranks=3))
    assert second == ["this layer fails"]
    assert (
        first
        == third
        == ["BindError: rank 1 ended this call of a parallelised model without its loss: see its error"]
    )


@pytest.mark.gloo
def test_what_a_call_compares_is_not_lost_by_a_call_inside_of_it() -> None:
    for answer in _answers("inside"):
        alike, unlike = answer["inside"]
        assert alike == ""
        assert "has other tokens than" in unlike, unlike
