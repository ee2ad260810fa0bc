"""Torch's own features go on working with parallel models: optimisers, checkpointing, autocast, compile, FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")

from meshweave.execute.ranks.launch import launch

HERE = {"PYTHONPATH": str(Path(__file__).parent)}


def _answers(names: tuple[str, ...], num_ranks: int, timeout_s: float = 100) -> list[dict[str, Any]]:
    payload = {"features": names}
    return launch("feature_rank_functions:features", num_ranks, payload, timeout_s=timeout_s, env=HERE)


@pytest.mark.gloo
def test_features_of_torch() -> None:
    names = (
        "generators",
        "checkpointing",
        "dropout",
        "autocast",
        "by_hand",
        "refusals",
        "meta",
        "overlap",
        "norms",
        "unheard",
    )
    ranks = _answers(names, 2)
    for answer in ranks:
        assert all(answer["generators"]), answer["generators"]
        assert answer["checkpointing"] == 0
        assert answer["by_hand"] < 1e-12
        assert answer["autocast"]["dtypes"] == ["torch.float32"]
        assert answer["autocast"]["loss"] < 0.05
        assert answer["autocast"]["gradients"] < 0.1
        assert max(answer["norms"]) < 0.01, answer["norms"]
        assert answer["meta"]["is_meta"]
        assert answer["meta"]["difference"] < 1e-5
        said = answer["unheard"]
        for name, path in {
            "head": "lm_head",
            "part": "model.layers.0.mlp",
            "patched": "model.layers.0.mlp.gate_proj",
        }.items():
            assert said[name].startswith(f"UnsupportedError: {path} has a hook, or a forward set on it")
        assert "torch.func.grad, vmap and the like do not transform" in said["transform"]
        assert said["states"].startswith("LayoutError: exp_avg of this AdamW is of a whole parameter")
        assert said["pruned"].startswith("UnsupportedError: lm_head.weight is no parameter any more")
        for name in ("plain", "tied", "untied"):
            assert said[name].startswith("UnsupportedError: lm_head.weight was put there after parallelize")
        assert said["added"].startswith("UnsupportedError: a parameter beside lm_head.weight was put there")
        assert said["norm"] == said["no states"] == ""
    first, second = (answer["dropout"] for answer in ranks)
    assert first["copied"] == second["copied"]
    assert first["split"] != second["split"]
    assert 16 < sum(value > 0 for value in first["split"]) < 48
    linear, strange, unknown, flat, ring = ranks[0]["refusals"]
    assert "no model known here" in linear
    assert "q_norm" in strange
    assert "did you mean" in unknown
    assert "mesh axes" in flat
    assert "attention in a ring has no dropout, and this model's is 0.1" in ring
    whole_layers, by_sites, accepted = ranks[0]["overlap"]
    assert "run one by one; plan without overlap='layers'" in whole_layers
    assert by_sites == accepted == "megatron_sp on 2x1 ranks"


@pytest.mark.gloo
@pytest.mark.slow
def test_compile_fsdp_and_optimizers() -> None:
    for answer in _answers(
        ("optimizer", "compiled", "compiled_whole", "compiled_step", "fsdp"), 4, timeout_s=300
    ):
        assert answer["optimizer"] < 1e-8
        assert answer["compiled"]["difference"] < 1e-12
        assert answer["compiled"]["graph_breaks"] == 0
        assert answer["compiled_whole"]["difference"] < 1e-12
        assert "have other tokens than" in answer["compiled_whole"]["said"]
        assert answer["compiled_step"] < 1e-12
        assert answer["fsdp"] < 1e-10


@pytest.mark.gloo
@pytest.mark.slow
def test_200_steps_follow_the_losses_of_one_process() -> None:
    for answer in _answers(("curve",), 2, timeout_s=300):
        assert answer["curve"] < 1e-6
