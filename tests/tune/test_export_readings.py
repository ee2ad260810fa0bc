"""Settings that other software would refuse, or read as something else than the plan says."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from test_exports import plan_of

from meshweave.base.errors import UnsupportedError
from meshweave.describe.model import load_model
from meshweave.describe.model.hugging_face import transformer_from_config
from meshweave.tune.exports import Export, export

CORE = ("megatron-lm", "megatron-bridge")


def says(made: Export, words: str) -> bool:
    return any(words in sentence for sentence in made.left_out)


@pytest.mark.parametrize("target", CORE)
@pytest.mark.parametrize("optimizer", ["adam-bf16", "adam-8bit"])
def test_states_of_adam_in_fewer_bits_are_not_told(target: str, optimizer: str) -> None:
    made = export(plan_of({}, settings={"optimizer": optimizer}), target)
    assert says(made, f"optimizer = {optimizer}")
    assert not says(export(plan_of({"zero": 0}, settings={"optimizer": "sgd"}), target), "optimizer = ")


@pytest.mark.parametrize("target", CORE)
@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
def test_megatron_shards_the_states_of_adam_alone(target: str, optimizer: str) -> None:
    """DistributedOptimizer of megatron-core 0.19.2 ends without it."""
    plan = plan_of({"zero": 1}, {"zero": 0}, settings={"optimizer": optimizer})
    with pytest.raises(UnsupportedError, match=f"and not those of {optimizer}; .*row 2 of the plan can be"):
        export(plan, target)


@pytest.mark.parametrize(
    ("activation", "biases", "is_told"),
    [
        ("gelu_new", (True, True, True), True),
        ("gelu_new", (False, False, False), False),
        ("gelu_pytorch_tanh", (True, False, False), False),
        ("gelu", (False, False, False), True),
    ],
)
def test_megatron_has_no_gelu_by_tanh_without_biases(
    activation: str, biases: tuple[bool, ...], is_told: bool
) -> None:
    """--disable-bias-linear sets bias_gelu_fusion to False (validate_args), and then F.gelu is computed."""
    model = load_model("gpt3")
    names = dict(zip(("qkv_bias", "out_bias", "ffn_bias"), biases, strict=True))
    own = replace(model.architecture, activation=activation, **names)
    made = export(plan_of({}, model=replace(model, architecture=own)), "megatron-lm")
    assert says(made, f"activation = {activation}") != is_told


def test_a_squared_relu_is_not_fused_with_biases() -> None:
    """TransformerConfig refuses bias_activation_fusion with any activation but GELU and SwiGLU."""
    model = load_model("gpt3")
    own = replace(model.architecture, activation="relu2")
    settings = export(plan_of({}, model=replace(model, architecture=own)), "megatron-lm").settings
    assert settings["--squared-relu"] and settings["--no-bias-gelu-fusion"]


@pytest.mark.parametrize("target", [*CORE, "torchtitan"])
def test_unequal_shares_of_ranks_are_refused(target: str) -> None:
    odd = replace(load_model("llama-3-8b"), hidden=40 * 128, num_heads=40, num_kv_heads=10)
    with pytest.raises(UnsupportedError, match="10 heads of keys and values do not divide among 4 ranks"):
        export(plan_of({"tensor": 4}, model=odd), target)
    assert export(plan_of({"tensor": 2}, model=odd), target).settings
    degrees: dict[str, Any] = {"tensor": 2, "context": 4, "pipeline": 1}
    with pytest.raises(UnsupportedError, match=r"a multiple of 16 tokens .* and not of 1000"):
        export(plan_of(degrees, sequence=1000), target)
    assert export(plan_of(degrees | {"strategy": "megatron"}, sequence=1000), target).settings
    assert export(plan_of(degrees, sequence=1008), target).settings


@pytest.mark.parametrize("target", [*CORE, "maxtext"])
def test_unequal_shares_of_inner_features_are_refused(target: str) -> None:
    """Megatron Core divides them by an assertion; XLA shards no weight unevenly."""
    odd = replace(load_model("llama-3-8b"), ffn_hidden=14337)
    degrees: dict[str, Any] = {"tensor": 4, "pipeline": 1}
    with pytest.raises(UnsupportedError, match="14337 of a feed-forward part do not divide among 4 ranks"):
        export(plan_of(degrees, model=odd), target)
    assert export(plan_of(degrees | {"tensor": 1}, model=odd), target).settings


def test_maxtext_shares_heads_and_words_evenly() -> None:
    degrees: dict[str, Any] = {"tensor": 4, "pipeline": 1}
    odd = replace(load_model("llama-3-8b"), hidden=40 * 128, num_heads=40, num_kv_heads=10)
    with pytest.raises(UnsupportedError, match="10 heads of keys and values do not divide among 4 ranks"):
        export(plan_of(degrees, model=odd), "maxtext")
    words = replace(load_model("llama-3-8b"), vocab_size=128257)
    with pytest.raises(UnsupportedError, match="128257 words do not divide among 4 ranks"):
        export(plan_of(degrees, model=words), "maxtext")


def test_a_recipe_of_bridge_keeps_nothing_that_the_plan_has_otherwise() -> None:
    """Recipes shard optimizer states and overlap; Bridge turns both switches on where one is."""
    settings = export(plan_of({"zero": 0}), "megatron-bridge").settings
    for name in ("ddp.use_distributed_optimizer", "optimizer.use_distributed_optimizer"):
        assert settings[name] is False
    for name in ("ddp.overlap_param_gather", "model.account_for_loss_in_pipeline_split"):
        assert settings[name] is False
    assert settings["model.recompute_modules"] is None and settings["model.recompute_method"] is None
    sharded = export(plan_of({"zero": 1, "recompute": "full"}), "megatron-bridge").settings
    assert sharded["optimizer.use_distributed_optimizer"] and sharded["ddp.use_distributed_optimizer"]
    assert sharded["model.recompute_method"] == "uniform"


def test_bridge_computes_in_bfloat16_unless_told() -> None:
    assert says(export(plan_of({}, dtype="float32"), "megatron-bridge"), "Products are in float32")
    assert not says(export(plan_of({}), "megatron-bridge"), "Products are in")


def test_torchtitan_has_ranks_of_experts_among_those_that_shard() -> None:
    degrees = {"data": 8, "pipeline": 1, "tensor": 1, "expert": 8}
    with pytest.raises(UnsupportedError, match="expert 8 does not divide; ZeRO 1 to 3 shards over data 8"):
        export(plan_of(degrees | {"zero": 0}, model="mixtral-8x7b"), "torchtitan")
    made = export(plan_of(degrees | {"zero": 3}, model="mixtral-8x7b"), "torchtitan")
    assert made.settings["parallelism"]["expert_parallel_degree"] == 8


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_rotary_scaling_has_one_kind_by_either_of_its_names(key: str) -> None:
    config = {
        "model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 512,
        "intermediate_size": 1024, "vocab_size": 128, "rope_theta": 1e4, "max_position_embeddings": 16384,
        "rope_scaling": {key: "linear", "factor": 8.0},
    }  # fmt: skip
    model = transformer_from_config(config, "folder/config.json")
    made = export(plan_of({"tensor": 2, "strategy": "megatron"}, model=model), "hf")
    assert made.settings["config"]["rope_parameters"]["rope_type"] == "linear"
    assert made.settings["config"]["rope_parameters"]["factor"] == 8.0


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_rotary_scaling_of_llama_3_is_told_under_either_name(key: str) -> None:
    """Transformers 4 called `rope_type` `type`."""
    model = load_model("llama-3.1-405b")
    scaling = json.loads(model.architecture.rotary_scaling)
    scaling[key] = scaling.pop("rope_type")
    own = replace(model.architecture, rotary_scaling=json.dumps(scaling))
    made = export(plan_of({}, model=replace(model, architecture=own)), "megatron-lm")
    assert made.settings["--rope-scaling-factor"] == 8 and not says(made, "rotary_scaling")
