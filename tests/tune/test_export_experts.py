"""Exports of models with experts: what a config says is told, or refused by its name; nothing else is trained."""

from __future__ import annotations

import json
import random
from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_exports import plan_of
from typer.testing import CliRunner

import meshweave as mw
from meshweave.algorithms.step.stacks import SAME_STACK, load_stack, stack_names
from meshweave.base.errors import DescriptionError, UnsupportedError
from meshweave.cli.app import app
from meshweave.describe.catalog import models
from meshweave.describe.machine.cluster import load_cluster
from meshweave.describe.model import Transformer, load_model
from meshweave.describe.model.hugging_face import transformer_from_config
from meshweave.describe.model.routed_architecture import RULES, routing_of
from meshweave.describe.model.routed_config import FAMILIES
from meshweave.tune.exports import TARGETS, export, launch_file
from sampling import examples

ALONE = {"data": 8, "pipeline": 1, "tensor": 1}
ROUTED = [name for name in models() if load_model(name).is_routed]
LIMITED = {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}
COUNTS = ("n_routed_experts", "num_local_experts", "num_experts")


def read(made: Any) -> dict[str, Any]:
    """What arguments say, in the words of a config; keys that they do not have are left out."""
    arguments = made.settings
    is_softmax = arguments["--moe-router-score-function"] == "softmax"
    config = {
        "num_hidden_layers": arguments["--num-layers"], "hidden_size": arguments["--hidden-size"],
        "num_attention_heads": arguments["--num-attention-heads"], "vocab_size": arguments["--vocab-size"],
        "experts": arguments["--num-experts"], "num_experts_per_tok": arguments["--moe-router-topk"],
        "inner": arguments["--moe-ffn-hidden-size"], "intermediate_size": arguments["--ffn-hidden-size"],
        "max_position_embeddings": arguments["--max-position-embeddings"],
        "rms_norm_eps": arguments["--norm-epsilon"], "rope_theta": arguments["--rotary-base"],
        "norm_topk_prob": not (is_softmax and "--moe-router-pre-softmax" in arguments),
        "tie_word_embeddings": "--untie-embeddings-and-output-weights" not in arguments,
        "router_aux_loss_coef": arguments.get("--moe-aux-loss-coeff", 0.0),
        "routed_scaling_factor": arguments.get("--moe-router-topk-scaling-factor", 1.0),
        "shared": arguments.get("--moe-shared-expert-intermediate-size", 0),
    }  # fmt: skip
    for option, key in (
        ("--num-query-groups", "num_key_value_heads"), ("--q-lora-rank", "q_lora_rank"),
        ("--kv-lora-rank", "kv_lora_rank"), ("--qk-head-dim", "qk_nope_head_dim"),
        ("--qk-pos-emb-head-dim", "qk_rope_head_dim"), ("--v-head-dim", "v_head_dim"),
        ("--moe-router-num-groups", "n_group"), ("--moe-router-group-topk", "topk_group"),
        ("--kv-channels", "head_dim"),
    ):  # fmt: skip
        if option in arguments:
            config[key] = arguments[option]
    assert arguments["--normalization"] == "RMSNorm" and arguments["--position-embedding-type"] == "rope"
    assert {"--disable-bias-linear", "--swiglu", "--moe-grouped-gemm"} <= set(arguments)
    return config


def said(config: dict[str, Any]) -> dict[str, Any]:
    """A config in the words of `read`, with what its family has where it leaves keys out."""
    rule = RULES[config["model_type"]]
    full = {"rope_theta": 1e4, **rule.defaults, **config}
    rotary = full["rope_parameters"]["rope_theta"] if "rope_parameters" in full else None
    inner = full.get("moe_intermediate_size", full["intermediate_size"])
    return full | {
        "experts": next(full[key] for key in COUNTS if key in full), "inner": inner,
        "rope_theta": config.get("rope_theta", rotary), "norm_topk_prob": full.get("norm_topk_prob", True),
        "router_aux_loss_coef": full.get("router_aux_loss_coef", full.get("aux_loss_alpha", 0.0)),
        "routed_scaling_factor": full.get("routed_scaling_factor", 1.0),
        "tie_word_embeddings": full.get("tie_word_embeddings", False),
        "shared": full.get("shared_expert_intermediate_size", full.get("n_shared_experts", 0) * inner),
    }  # fmt: skip


def dense_layers(made: Any, config: dict[str, Any]) -> None:
    pattern = made.settings.get("--moe-layer-freq")
    count, total = config.get("first_k_dense_replace", 0), config["num_hidden_layers"]
    kinds = eval(pattern) if pattern else [1] * total
    step = config.get("decoder_sparse_step", 1)
    assert kinds == [int(i >= count and (i + 1) % step == 0) for i in range(total)]


@pytest.mark.parametrize("name", ROUTED)
def test_megatron_is_told_a_catalog_model_or_refuses_it(name: str) -> None:
    config = json.loads(load_model(name).config)
    try:
        made = export(plan_of(ALONE | {"expert": 8}, model=name), "megatron-lm")
    except UnsupportedError as error:
        assert name.startswith("gpt-oss") == ("attention with sinks" in str(error))
        assert name.startswith("kimi") == ("YaRN with beta_fast = 1.0" in str(error))
        assert name.startswith(("gpt-oss", "kimi"))
        return
    assert {key: said(config)[key] for key in read(made)} == read(made)
    assert made.settings["--expert-model-parallel-size"] == 8
    assert made.settings["--moe-token-dispatcher-type"] == "alltoall"
    assert not any("The model has" in text or "does not know" in text for text in made.left_out)
    dense_layers(made, config)


def drawn(family: str, draw: random.Random) -> dict[str, Any]:
    """A config of a family that Megatron-LM has arguments for."""
    groups = draw.choice([2, 4])
    chosen = draw.choice([2, 4])
    config: dict[str, Any] = {
        "model_type": family, "num_hidden_layers": draw.randint(2, 9), "hidden_size": 64 * draw.randint(4, 9),
        "num_attention_heads": 8, "num_key_value_heads": groups, "vocab_size": draw.randint(99, 9999),
        "intermediate_size": draw.randint(9, 999), "num_experts_per_tok": chosen, "head_dim": 64,
        "max_position_embeddings": 8192 * draw.randint(1, 9),
    }  # fmt: skip
    is_sigmoid = RULES[family].scores == "sigmoid"
    config["num_local_experts" if family == "mixtral" else "num_experts"] = draw.choice([8, 16])
    if is_sigmoid or family == "deepseek_v2":
        config["n_routed_experts"] = config.pop("num_experts")
        config |= {"n_shared_experts": draw.randint(1, 2), "first_k_dense_replace": draw.randint(0, 1)}
        config |= {"n_group": 1, "topk_group": 1}
    if family != "mixtral":
        config["moe_intermediate_size"] = draw.randint(9, 999)
    if family == "qwen2_moe":
        config |= {"shared_expert_intermediate_size": draw.randint(9, 99), "qkv_bias": False}
    if family.startswith("qwen"):
        config["decoder_sparse_step"] = draw.randint(1, 2)
    if family.startswith(("deepseek", "kimi")):
        del config["head_dim"], config["num_key_value_heads"]
        config |= {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
        config |= {"q_lora_rank": draw.choice([None, 48])}
        if is_sigmoid and chosen == 4 and draw.random() < 0.5:
            config |= {"n_group": 4, "topk_group": 2}
    choices = {"rms_norm_eps": [1e-5, 1e-6], "rope_theta": [1e4, 5e6], "tie_word_embeddings": [True, False]}
    if family in ("mixtral", "qwen2_moe", "qwen3_moe"):
        choices["router_aux_loss_coef"] = [0.001, 0.02]
    if family.startswith("qwen"):
        choices["norm_topk_prob"] = [True, False]
    if is_sigmoid:
        choices["routed_scaling_factor"] = [1.0, 2.5]
    must = family == "kimi_k2"
    config |= {key: draw.choice(values) for key, values in choices.items() if must or draw.random() < 0.7}
    return config | ({"hidden_act": "silu", "norm_topk_prob": True} if must else {})


def model_of(config: dict[str, Any]) -> Transformer:
    return transformer_from_config(config, "folder/config.json")


@pytest.mark.parametrize("family", sorted(RULES))
@given(st.integers(0, 2**31))
@examples(25)
def test_megatron_is_told_what_a_config_says(family: str, seed: int) -> None:
    config = drawn(family, random.Random(seed))
    model = model_of(config)
    if not model.is_routed:
        return
    made = export(plan_of(ALONE, model=model), "megatron-lm")
    expected = said(config)
    back = read(made)
    assert {key: expected.get(key) for key in back} == back
    assert ("--moe-shared-expert-gate" in made.settings) == (family == "qwen2_moe")
    assert ("--qk-layernorm" in made.settings) == (family == "qwen3_moe" or "kv_lora_rank" in config)
    assert ("--moe-router-enable-expert-bias" in made.settings) == (RULES[family].scores == "sigmoid")
    assert ("--moe-router-num-groups" in made.settings) == (config.get("n_group", 1) > 1)
    dense_layers(made, config)


@pytest.mark.parametrize(
    ("family", "change", "words"),
    [
        ("mixtral", {"sliding_window": 4096}, "a window of 4096 tokens"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1"),
        ("mixtral", {"num_experts_per_tok": 1}, "one chosen expert"),
        ("qwen3_moe", {"hidden_act": "gelu"}, "the activation gelu"),
        ("qwen3_moe", {"attention_bias": True}, "a bias of attention's result"),
        ("qwen3_moe", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rotary scaling yarn"),
        ("deepseek_v2", {**LIMITED, "topk_method": "group_limited_greedy"}, "groups of"),
        ("deepseek_v3", LIMITED | {"topk_group": 1}, "groups of experts"),
        ("deepseek_v3", {"norm_topk_prob": False}, "not divided by their sum"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func = softmax"),
        ("kimi_k2", {"routed_scaling_factor": None}, "no routed_scaling_factor"),
    ],
)  # fmt: skip
def test_what_megatron_has_no_argument_for_is_refused_by_name(
    family: str, change: dict[str, Any], words: str
) -> None:
    config = drawn(family, random.Random(3)) | change
    with pytest.raises(UnsupportedError, match=words):
        export(plan_of(ALONE, model=model_of(config)), "megatron-lm")


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(RULES)))
def test_a_family_whose_router_is_not_known_is_refused(family: str) -> None:
    config = drawn("qwen3_moe", random.Random(1)) | {"model_type": family, "intermediate_size_mlp": 64}
    config |= {"sliding_window": None}
    config |= {"shared_intermediate_size": 64} if "shared" in family else {}
    assert routing_of(config) is None
    with pytest.raises(UnsupportedError, match=f"how the router of model_type {family} weighs"):
        export(plan_of(ALONE, model=model_of(config)), "megatron-lm")


@pytest.mark.parametrize("name", ROUTED)
@pytest.mark.parametrize("target", sorted(set(TARGETS) - {"megatron-lm"}))
def test_other_software_is_given_the_model_itself_or_refuses(target: str, name: str) -> None:
    """No size of the model is in its settings, so that its own config says them all."""
    degrees = ALONE | {"zero": 3 if target in ("accelerate", "axolotl") else 0}
    made = export(plan_of(degrees, model=name), target)
    model, table = load_model(name), json.dumps(made.settings)
    sizes = (model.hidden, model.ffn_hidden, model.vocab_size)
    assert not any(f" {size}" in table.replace(",", " ") for size in sizes)
    assert any("The model has" in text and "layers = " in text for text in made.left_out)


def test_experts_that_a_tp_plan_does_not_cut_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="no styles for the experts"):
        export(plan_of({"data": 4, "pipeline": 1, "tensor": 2}, model="mixtral-8x7b"), "hf")


@pytest.mark.parametrize("target", ["megatron-lm", "megatron-bridge"])
def test_how_copies_travel_is_told_as_it_is_priced(target: str) -> None:
    for name, words in (("deepep", "deepep"), ("hybridep", "hybridep")):
        made = export(plan_of(ALONE, model="mixtral-8x7b", settings={"dispatcher": name}), target)
        assert "flex" in made.text and words in made.text
    with pytest.raises(UnsupportedError, match="no dispatcher trtllm"):
        export(plan_of(ALONE, model="mixtral-8x7b", settings={"dispatcher": "trtllm_one_sided"}), target)
    with pytest.raises(UnsupportedError, match="sequence parallelism alone"):
        degrees = {"data": 4, "pipeline": 1, "tensor": 2, "strategy": "megatron"}
        export(plan_of(degrees, model="mixtral-8x7b"), target)


@pytest.mark.parametrize("family", sorted(set(RULES) - {"kimi_k2"}))
def test_defaults_are_those_of_transformers(family: str) -> None:
    theirs = pytest.importorskip("transformers").AutoConfig.for_model(family).to_dict()
    assert {key: theirs[key] for key in RULES[family].defaults} == dict(RULES[family].defaults)


@pytest.mark.parametrize("stack", ["ideal", *stack_names()])
@pytest.mark.parametrize("zero", [0, 1])
def test_megatron_overlaps_what_the_price_overlaps(stack: str, zero: int) -> None:
    own = load_stack(stack)
    plan = plan_of(ALONE | {"zero": zero}, settings={} if stack == "ideal" else {"stack": stack})
    settings = export(plan, "megatron-lm").settings
    assert ("--overlap-grad-reduce" in settings) == (own.overlap > 0)
    assert ("--overlap-param-gather" in settings) == (
        zero == 1 and own.overlap > 0 and not own.waits_for_gathers
    )


@pytest.mark.parametrize("hosts", [1, 2, 8])
def test_accelerate_starts_on_all_hosts(hosts: int) -> None:
    plan = plan_of(ALONE | {"data": 8 * hosts, "zero": 3})
    made = export(plan, "accelerate")
    assert made.settings["num_machines"] == hosts and made.settings["num_processes"] == 8 * hosts
    assert any("--machine_rank" in text for text in made.left_out) == (hosts > 1)
    launched = launch_file(made, "torchrun", load_cluster("dgx-h100").with_chips(8 * hosts))
    assert f"--num_machines {hosts} --machine_rank " in launched and "--main_process_ip " in launched


@pytest.mark.slow
def test_accelerate_reads_the_hosts(tmp_path: Any) -> None:
    launch = pytest.importorskip("accelerate.commands.launch")
    prepare = pytest.importorskip("accelerate.utils.launch").prepare_multi_gpu_env
    path = tmp_path / "plan.json"
    path.write_text(export(plan_of(ALONE | {"data": 64, "zero": 3}), "accelerate").text)
    words = [
        "--config_file",
        str(path),
        "--machine_rank",
        "3",
        "--main_process_ip",
        "host",
        "--main_process_port",
    ]
    given = launch.launch_command_parser().parse_args([*words, "29500", "train.py"])
    arguments = launch._validate_launch_command(given)[0]
    prepare(arguments)
    assert (arguments.nnodes, arguments.nproc_per_node) == ("8", "8")


@pytest.mark.parametrize("name", sorted(SAME_STACK))
def test_a_target_names_the_stack_that_runs_it(name: str) -> None:
    assert load_stack(name) == load_stack(SAME_STACK[name])
    plan = mw.plan("llama-3-8b", "dgx-h100:8", batch=8, sequence=4096, tp=2, dp=4, stack=name)
    assert plan.step.stack == SAME_STACK[name] and export(plan, name).priced == ""
    with pytest.raises(DescriptionError, match=name):
        load_stack("megatron")


def test_the_help_lists_all_stacks() -> None:
    shown = CliRunner().invoke(app, ["plan", "--help"]).output
    words = "".join(chain.from_iterable(line.split() for line in shown.splitlines()))
    assert all(name in words for name in (*stack_names(), *SAME_STACK, "ideal"))
