"""Plans of a step as settings of Megatron-LM, transformers and torchtitan."""

from __future__ import annotations

import inspect
import json
import math
import random
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import meshweave as mw
from meshweave.algorithms.step import Parallelism, StepProblem
from meshweave.base.errors import LayoutError, MeshweaveError, UnsupportedError
from meshweave.base.units import format_bytes, format_s
from meshweave.cli.app import app
from meshweave.describe.machine.cluster import load_cluster
from meshweave.describe.model import Transformer, load_model
from meshweave.describe.model.architecture import Architecture
from meshweave.describe.model.hugging_face import transformer_from_config
from meshweave.tune.exports import LAUNCHERS, TARGETS, export, launch_file
from meshweave.tune.exports.model_words import defining_fields
from meshweave.tune.plan import Plan
from meshweave.tune.plan_description import describe
from meshweave.tune.plan_records import DegreesRecord, StepRecord, StepsRecord
from sampling import examples

DEGREES: dict[str, Any] = {
    "data": 2, "pipeline": 2, "context": 1, "tensor": 4, "strategy": "megatron_sp", "zero": 1, "schedule": "1f1b",
    "virtual_stages": 1, "micro_batch": 1, "recompute": "none", "order": ("tensor", "context", "data", "pipeline"),
}  # fmt: skip


def plan_of(
    *rows: dict[str, Any],
    model: str | Transformer = "llama-3-8b",
    settings: dict[str, Any] | None = None,
    **of_plan: Any,
) -> Plan:
    """A plan with these configurations."""
    records = []
    for row in rows:
        record = DegreesRecord(**(DEGREES | row))
        numbers = {"step_s": 1.0, "tokens_per_s_per_chip": 1.0, "mfu": 0.5, "hfu": 0.5}
        records.append(StepRecord(degrees=record, parts_s={}, memory_bytes=1, memory_parts={}, **numbers))
    own = load_model(model) if isinstance(model, str) else model
    chips = records[0].degrees.num_chips
    cluster = load_cluster("dgx-h100").with_chips(chips if chips % 8 == 0 else 8)
    description = describe(own, cluster).model_copy(update={"settings": settings or {}})
    sizes = {"batch": 64, "sequence": 8192, "dtype": "bfloat16", "overlap": "layers"} | of_plan
    stack = (settings or {}).get("stack", "ideal")
    steps = StepsRecord(
        memory_limit_bytes=1, ranked=tuple(records), overlap=sizes.pop("overlap"), stack=stack
    )
    return Plan(
        kind="step", model=own.name, cluster=cluster.name, num_chips=chips, steps=steps,
        description=description, **sizes,
    )  # fmt: skip


def test_megatron_lm_has_its_arguments() -> None:
    settings = export(plan_of({"virtual_stages": 4, "recompute": "full", "zero": 3}), "megatron-lm").settings
    assert settings["--tensor-model-parallel-size"] == 4 and settings["--sequence-parallel"]
    assert settings["--num-layers-per-virtual-pipeline-stage"] == 4
    assert settings["--num-query-groups"] == 8 and settings["--ffn-hidden-size"] == 14336
    assert settings["--data-parallel-sharding-strategy"] == "optim_grads_params"
    assert settings["--recompute-granularity"] == "full"


def test_a_strategy_that_others_do_not_have_is_refused_and_a_row_is_named() -> None:
    for target in TARGETS:
        plan = plan_of({"strategy": "meshslice_block", "tensor": (2, 2)}, {"zero": 0} | expressible(target))
        with pytest.raises(UnsupportedError, match=r"2x2 ranks.*row 2 of the plan can be"):
            export(plan, target)
        assert export(plan, target, 2).settings
    with pytest.raises(UnsupportedError, match="no row of the plan can be"):
        export(plan_of({"strategy": "atp"}), "torchtitan")
    with pytest.raises(LayoutError, match="no row 3"):
        export(plan_of({}, {}), "hf", 3)


def test_what_is_left_out_is_said() -> None:
    left_out = export(plan_of({"recompute": "selective"}), "hf").left_out
    for word in ("megatron_sp", "Data parallelism of 2", "Pipeline parallelism of 2", "ZeRO 1", "Selective"):
        assert any(word in sentence for sentence in left_out), word
    with pytest.raises(UnsupportedError, match="transposed"):
        export(plan_of({}, model="gpt3"), "hf")


@given(
    st.fixed_dictionaries(
        {
            "data": st.sampled_from([1, 2, 8]), "pipeline": st.sampled_from([1, 2, 4, 3]),
            "context": st.sampled_from([1, 2]), "tensor": st.sampled_from([1, 2, 8, (2, 1), (2, 2)]),
            "strategy": st.sampled_from(["megatron", "megatron_sp", "atp", "summa_block"]),
            "zero": st.integers(0, 3), "schedule": st.sampled_from(["1f1b", "gpipe", "zbv", "zb-2p"]),
            "virtual_stages": st.sampled_from([1, 2]), "micro_batch": st.sampled_from([1, 2]),
            "recompute": st.sampled_from(["none", "selective", "full"]),
            "order": st.permutations(["tensor", "context", "data", "pipeline"]).map(tuple),
        }
    ),
    st.sampled_from(sorted(TARGETS)),
)  # fmt: skip
def test_degrees_are_kept_or_spoken_of(degrees: dict[str, Any], target: str) -> None:
    plan = plan_of(degrees)
    try:
        made = export(plan, target)
    except MeshweaveError:
        return
    settings = made.settings.get("parallelism", made.settings)
    tensor = degrees["tensor"] if isinstance(degrees["tensor"], int) else math.prod(degrees["tensor"])
    assert tensor == 1 or degrees["strategy"].startswith("megatron")
    names = {
        "megatron-lm": ("--tensor-model-parallel-size", "--pipeline-model-parallel-size"),
        "torchtitan": ("tensor_parallel_degree", "pipeline_parallel_degree"),
        "megatron-bridge": ("model.tensor_model_parallel_size", "model.pipeline_model_parallel_size"),
        "hf": ("tp_size", ""),
        "maxtext": ("ici_tensor_parallelism", ""),
        "deepspeed": ("tensor_parallel.autotp_size", ""),
        "accelerate": ("parallelism_config.parallelism_config_tp_size", ""),
        "axolotl": ("tensor_parallel_size", ""),
    }[target]
    table, _, name = names[0].rpartition(".")
    own = settings.get(table, {}) if target in ("deepspeed", "accelerate") else settings
    assert own.get(names[0] if own is settings else name, 1) == tensor
    assert (
        settings[names[1]] == degrees["pipeline"] if names[1] else target == "hf" or degrees["pipeline"] == 1
    )
    if target == "hf" and degrees["pipeline"] > 1:
        assert any("Pipeline" in sentence for sentence in made.left_out)
    if target != "hf" and degrees["order"] not in (
        ("tensor", "context", "data", "pipeline"), ("tensor", "context", "pipeline", "data")
    ):  # fmt: skip
        assert any("order of ranks" in sentence for sentence in made.left_out)


SIZES = {
    "num_layers": 40, "hidden": 8192, "num_heads": 64, "num_kv_heads": 16, "head_dim": 64, "ffn_hidden": 9999,
    "vocab_size": 4096, "gated_ffn": False, "tied_embeddings": True,
}  # fmt: skip
OWN = {
    "model_type": "gemma2", "norm": "layer", "norm_eps": 1e-3, "activation": "gelu", "qkv_bias": True,
    "out_bias": True, "ffn_bias": True, "positions": "learned", "max_positions": 9000,
    "rotary_base": 7.5, "rotary_share": 0.5, "rotary_scaling": '{"rope_type": "yarn", "factor": 2.0}',
    "window": 4096, "qk_norm": True, "init_std": 0.1, "others": ("final_logit_softcapping = 30.0",),
    "windowed_layers": 8, "residual": "parallel", "norms": "before and after",
}  # fmt: skip
STEP = {
    "data": 4, "pipeline": 4, "context": 2, "tensor": 2, "strategy": "megatron", "zero": 3, "schedule": "zb-1p",
    "virtual_stages": 2, "micro_batch": 2, "recompute": "full", "order": ("data", "tensor", "context", "pipeline"),
}  # fmt: skip
OF_PLAN = {"batch": 128, "sequence": 4096, "dtype": "float32", "overlap": "sites"}
PRICED_WITH = {
    "gradient_dtype": "bfloat16", "optimizer": "sgd", "precision": "fp8-token", "attention": "plain",
    "loss": "eager", "reserve": 0.1, "attention_share": 0.5, "dropout": True, "stack": "torchtitan",
}  # fmt: skip


def expressible(target: str) -> dict[str, Any]:
    """Degrees that the target has."""
    if target == "axolotl":
        return {"pipeline": 1, "data": 8, "zero": 2, "tensor": 1, "context": 4}
    return {"pipeline": 1, "data": 8, "zero": 2} if target in ("maxtext", "deepspeed", "accelerate") else {}


def changes(degrees: dict[str, Any]) -> dict[str, Plan]:
    """Plans in each of which one field of the model, of its parallelism or of the step is another."""
    model = load_model("llama-3-8b")
    plans = {name: plan_of(degrees, model=replace(model, **{name: value})) for name, value in SIZES.items()}
    for name, value in OWN.items():
        other = replace(model.architecture, **{name: value})
        plans[name] = plan_of(degrees, model=replace(model, architecture=other))
    plans |= {name: plan_of(degrees | {name: value}) for name, value in STEP.items()}
    plans |= {name: plan_of(degrees, **{name: value}) for name, value in OF_PLAN.items()}
    return plans | {name: plan_of(degrees, settings={name: value}) for name, value in PRICED_WITH.items()}


def test_every_field_has_another_value() -> None:
    own = {item.name for item in fields(Architecture)}
    assert own == set(OWN)
    named = {
        "name",
        "source",
        "not_priced",
        "architecture",
        "layers",
        "config",
    }  # exports of layers are refused
    of_model = {item.name for item in fields(Transformer)} - named
    assert of_model == set(SIZES)
    assert set(DegreesRecord.model_fields) - {"expert", "expert_tensor"} == set(STEP)
    # the ranks among which ZeRO shards are no part of what a search chooses
    assert {item.name for item in fields(Parallelism)} - set(STEP) == {
        "zero_group",
        "expert",
        "expert_tensor",
    }
    of_problem = {item.name for item in fields(StepProblem)} - {
        "model",
        "cluster",
        "sequence",
        "batch",
        "dtype",
        "overlap",
    }
    assert of_problem - {"dispatcher", "imbalance"} <= set(PRICED_WITH)  # of experts alone


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_each_field_is_told_or_said_to_be_left_out(target: str) -> None:
    """Changes each field alone: an export that stays the same leaves it out in silence."""
    degrees = expressible(target)
    before = export(plan_of(degrees), target)
    silent = []
    for name, plan in changes(degrees).items():
        try:
            after = export(plan, target)
        except UnsupportedError:
            continue
        if name != "stack":  # what it comes to on the target's own changes with everything
            after = replace(after, priced=before.priced)
        if after == before:
            silent.append(name)
    of_one_rank = {"schedule", "virtual_stages"} if degrees.get("pipeline") == 1 else set()
    of_one_rank |= {"strategy"} if degrees.get("tensor") == 1 else set()
    assert set(silent) <= of_one_rank


def test_a_plan_for_another_stack_says_so_first_and_what_it_comes_to_there(tmp_path: Path) -> None:
    where, file = "dgx-h100:64", tmp_path / "plan.json"
    plan = mw.plan("llama-3-8b", where, batch=256, sequence=8192, dp=32, tp=2, micro_batch=2, zero=2)
    priced = export(plan, "torchtitan").priced
    there = mw.step(
        "llama-3-8b", where, 256, 8192, tp=2, micro_batch=2, stack="torchtitan",
        zero=plan.step.best.degrees.zero, strategy=plan.step.best.degrees.strategy,
        recompute=plan.step.best.degrees.recompute,
    )  # fmt: skip
    assert not there.fits() and plan.step.best.memory_bytes <= plan.step.memory_limit_bytes
    assert f"{format_s(there.time_s)} and {format_bytes(there.memory.total)}" in priced
    assert "does not fit" in priced and "--stack torchtitan" in priced
    assert "There are no predictions for hf" in export(plan, "hf").priced
    other = mw.plan("llama-3-8b", where, batch=256, sequence=8192, zero=1)
    assert "does not run ZeRO level 1" in export(other, "torchtitan").priced
    plan.save(file)
    shown = CliRunner().invoke(app, ["export", str(file), "--to", "torchtitan"])
    assert shown.stderr.splitlines()[0] == f"warning: {priced}"
    own = mw.plan("llama-3-8b", where, batch=256, sequence=8192, stack="torchtitan", tp=2)
    assert export(own, "torchtitan").priced == ""


def parsed(arguments: dict[str, Any]) -> dict[str, Any]:
    """What Megatron-LM makes of arguments, by the names of a description."""
    norm = {"RMSNorm": "rms", "LayerNorm": "layer"}[arguments["--normalization"]]
    is_without = "--disable-bias-linear" in arguments
    positions = {"rope": "rotary", "learned_absolute": "learned"}[arguments["--position-embedding-type"]]
    return {
        "num_layers": arguments["--num-layers"], "hidden": arguments["--hidden-size"],
        "num_heads": arguments["--num-attention-heads"], "head_dim": arguments["--kv-channels"],
        "num_kv_heads": arguments.get("--num-query-groups", arguments["--num-attention-heads"]),
        "ffn_hidden": arguments["--ffn-hidden-size"], "vocab_size": arguments["--vocab-size"],
        "gated_ffn": "--swiglu" in arguments, "activation": "silu" if "--swiglu" in arguments else "gelu_new",
        "tied_embeddings": "--untie-embeddings-and-output-weights" not in arguments,
        "norm": norm, "norm_eps": arguments["--norm-epsilon"], "init_std": arguments["--init-method-std"],
        "qkv_bias": not is_without or "--add-qkv-bias" in arguments, "out_bias": not is_without,
        "ffn_bias": not is_without, "positions": positions, "qk_norm": "--qk-layernorm" in arguments,
        "rotary_base": arguments.get("--rotary-base"), "rotary_share": arguments.get("--rotary-percent"),
        "max_positions": arguments["--max-position-embeddings"],
        "rotary_scaling": arguments.get("--rope-scaling-factor", ""),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["llama-2-70b", "llama-3-8b", "llama-3.1-405b", "gpt3"])
def test_megatron_arguments_read_back_are_the_model(name: str) -> None:
    model = load_model(name)
    plan = plan_of({}, model=name, sequence=2048)
    made = export(plan, "megatron-lm")
    expected = defining_fields(model)
    back = parsed(made.settings)
    scaling = expected["rotary_scaling"]
    expected["rotary_scaling"] = json.loads(scaling)["factor"] if scaling else ""
    assert back == {key: expected[key] for key in back}
    assert not any(sentence.startswith("The model has") for sentence in made.left_out)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@given(st.integers(0, 2**31))
@examples(20)
def test_a_config_read_back_is_the_model(family: str, seed: int) -> None:
    draw = random.Random(seed)
    heads, groups = draw.choice([(8, 8), (8, 2), (12, 4)])
    config = {
        "model_type": family, "num_hidden_layers": draw.randint(1, 40), "num_attention_heads": heads,
        "num_key_value_heads": groups, "head_dim": draw.choice([64, 128]), "hidden_size": heads * 64,
        "intermediate_size": draw.randint(1, 9999), "vocab_size": draw.randint(1, 99999), "rms_norm_eps": 1e-5,
        "rope_theta": draw.choice([1e4, 5e5]), "tie_word_embeddings": draw.random() < 0.5,
        "max_position_embeddings": 16384, "initializer_range": draw.choice([0.01, 0.02]),
    }  # fmt: skip
    if draw.random() < 0.5:
        config["rope_scaling"] = {"rope_type": "linear", "factor": 2.0}
    if family in ("llama", "qwen3"):
        config["attention_bias"] = draw.random() < 0.5
    if family == "mistral":
        config["sliding_window"] = draw.choice([None, 4096])
    model = transformer_from_config(config, "folder/config.json")
    made = export(plan_of({"tensor": 1, "strategy": "megatron"}, model=model), "hf")
    back = transformer_from_config(json.loads(json.dumps(made.settings["config"])), "folder/config.json")
    assert back == model
    assert not any("not told" in sentence and "The model has" in sentence for sentence in made.left_out)


def test_the_verb_prints_settings_and_what_they_leave_out(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan_of({}).save(path)
    result = CliRunner().invoke(app, ["export", str(path), "--to", "torchtitan"])
    assert result.exit_code == 0, result.output
    assert "--parallelism.tensor-parallel-degree 4" in result.stdout
    assert "--parallelism.enable-sequence-parallel" in result.stdout
    assert "left out: ZeRO 1" in result.stderr


@pytest.mark.slow
def test_styles_are_those_of_transformers() -> None:
    styles = pytest.importorskip("transformers.integrations.tensor_parallel").ALL_PARALLEL_STYLES
    theirs = pytest.importorskip("transformers").LlamaConfig.base_model_tp_plan
    plan = export(plan_of({}), "hf").settings["tp_plan"]
    assert set(plan.values()) <= set(styles)
    assert {f"model.{name}": style for name, style in theirs.items()}.items() <= plan.items()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-2-7b", "llama-3-8b", "llama-3.1-405b"])
def test_the_config_is_one_of_transformers(name: str) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    exported = export(plan_of({"strategy": "megatron"}, model=name), "hf").settings["config"]
    config = transformers.AutoConfig.for_model(**exported)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == pytest.approx(load_model(name).num_parameters, rel=1e-3)
    read = json.loads(config.to_json_string(use_diff=False))
    assert transformer_from_config(read, "f/config.json").architecture == load_model(name).architecture


@pytest.mark.slow
def test_overrides_are_fields_of_torchtitan() -> None:
    configs = pytest.importorskip("torchtitan.config.configs", reason="torchtitan is not installed")
    settings = export(plan_of({"schedule": "1f1b", "virtual_stages": 2}), "torchtitan").settings
    for table, config in (("parallelism", configs.ParallelismConfig), ("training", configs.TrainingConfig)):
        assert set(settings[table]) <= {field.name for field in fields(config)}
        config(**settings[table])


OF_TRAINING = {
    "--seq-length", "--max-position-embeddings", "--micro-batch-size", "--global-batch-size", "--swiglu",
    "--group-query-attention", "--untie-embeddings-and-output-weights", "--use-tp-pp-dp-mapping",
    "--num-layers-per-virtual-pipeline-stage", "--norm-epsilon", "--position-embedding-type", "--rotary-base",
    "--rotary-percent", "--vocab-size", "--make-vocab-size-divisible-by", "--disable-bias-linear", "--optimizer",
    "--bf16", "--use-megatron-fsdp", "--ckpt-format",
}  # fmt: skip
"""Arguments of megatron/training/arguments.py that are no fields of its configs."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "degrees",
    [
        {"virtual_stages": 4, "recompute": "full"},
        {"zero": 3, "recompute": "selective", "strategy": "megatron"},
        {"zero": 2, "order": ("tensor", "context", "pipeline", "data")},
    ],
)
def test_arguments_are_fields_of_megatron_core(degrees: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    core = pytest.importorskip(
        "megatron.core.transformer.transformer_config", reason="megatron-core is missing"
    )
    ddp = pytest.importorskip("megatron.core.distributed").DistributedDataParallelConfig
    settings = export(plan_of(degrees), "megatron-lm").settings
    named = {name[2:].replace("-", "_"): value for name, value in settings.items() if name not in OF_TRAINING}
    tables: list[dict[str, Any]] = []
    for config in (core.TransformerConfig, ddp):
        known = {field.name for field in fields(config)}
        tables.append({name: value for name, value in named.items() if name in known})
    assert named.keys() == tables[0].keys() | tables[1].keys()
    made = core.TransformerConfig(**tables[0], pipeline_dtype=torch.bfloat16, layernorm_epsilon=1e-5)
    assert made.normalization == "RMSNorm" and made.hidden_dropout == 0.0 and made.init_method_std == 0.02
    words = inspect.signature(pytest.importorskip("megatron.core.models.gpt.gpt_model").GPTModel).parameters
    of_model = {"position_embedding_type", "rotary_base", "rotary_percent", "vocab_size"}
    assert of_model <= set(words) and "rope" in str(words["position_embedding_type"].annotation)
    assert made.num_query_groups == 8 and made.sequence_parallel == ("strategy" not in degrees)
    assert ddp(**tables[1]).use_distributed_optimizer


def test_degrees_of_experts_are_exported_or_refused() -> None:
    degrees = {"expert": 4, "data": 4, "pipeline": 1, "tensor": 2}
    mixtral = load_model("mixtral-8x7b")
    for target in TARGETS:
        try:
            made = export(plan_of(degrees, model=mixtral), target)
        except UnsupportedError as error:
            assert "degrees of experts" in str(error) or target in ("hf", "axolotl")
        else:
            assert 4 in (made.settings.get("parallelism") or made.settings).values()
            is_told = made.settings.get("--num-experts") == 8
            assert is_told or any("layers = " in sentence for sentence in made.left_out)


def test_the_saved_exports_are_those_of_today() -> None:
    """What parsers accepted (test_export_parsers.py) is what a plan of these degrees gives, for every target."""
    saved = Path(__file__).parents[2] / "validation" / "results" / "exports.json"
    rows = json.loads(saved.read_text())["rows"]
    assert {row["target"] for row in rows} == set(TARGETS)
    for row in rows:
        degrees = {name: tuple(v) if isinstance(v, list) else v for name, v in row["degrees"].items()}
        assert export(plan_of(degrees), row["target"]).text == row["export"], (row["target"], degrees)


@pytest.mark.parametrize("target", ["megatron-lm", "megatron-bridge"])
def test_what_megatron_refuses_a_step_without_is_exported(target: str) -> None:
    """validate_args of megatron-core 0.19.2 ends where one of both is missing."""
    shared, whole = plan_of({"tensor": 2, "zero": 1}), plan_of({"tensor": 1, "pipeline": 2, "zero": 1})
    assert export(shared, target).environment == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert export(whole, target).environment == {}
    sharded = export(plan_of({"pipeline": 1, "zero": 3}), target)
    assert "fsdp_dtensor" in sharded.text and sharded.environment == {}
    assert "fsdp_dtensor" not in export(shared, target).text
    for launcher in LAUNCHERS:
        text = launch_file(export(shared, target), launcher, load_cluster("dgx-h100:16"))
        assert "export CUDA_DEVICE_MAX_CONNECTIONS=1" in text


def test_rings_of_axolotl_have_the_attention_that_they_ask_for() -> None:
    """axolotl 0.19 refuses context_parallel_size > 1 without it (check_context_parallel_size)."""
    ring = export(plan_of({"pipeline": 1, "tensor": 1, "context": 2}), "axolotl")
    assert ring.settings["attn_implementation"] == "flash_attention_2"
    assert any("ring-flash-attn" in sentence for sentence in ring.left_out)
    whole = export(plan_of({"pipeline": 1, "tensor": 1}), "axolotl")
    assert "attn_implementation" not in whole.settings
