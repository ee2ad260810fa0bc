"""Plans of a step as settings of Megatron-LM, transformers and torchtitan."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from meshweave.base.errors import LayoutError, MeshweaveError, UnsupportedError
from meshweave.cli.app import app
from meshweave.tune.exports import TARGETS, export_plan
from meshweave.tune.plan import Plan
from meshweave.tune.plan_records import DegreesRecord, StepRecord, StepsRecord

DEGREES: dict[str, Any] = {
    "data": 2, "pipeline": 2, "context": 1, "tensor": 4, "strategy": "megatron_sp", "zero": 1, "schedule": "1f1b",
    "virtual_stages": 1, "micro_batch": 1, "recompute": "none", "order": ("tensor", "context", "data", "pipeline"),
}  # fmt: skip


def plan_of(*rows: dict[str, Any], model: str = "llama-3-8b") -> Plan:
    """A plan with these configurations."""
    records = []
    for row in rows:
        record = DegreesRecord(**(DEGREES | row))
        numbers = {"step_s": 1.0, "tokens_per_s_per_chip": 1.0, "mfu": 0.5, "hfu": 0.5}
        records.append(StepRecord(degrees=record, parts_s={}, memory_bytes=1, memory_parts={}, **numbers))
    return Plan(
        kind="step", model=model, cluster="h100-node", num_chips=records[0].degrees.num_chips, batch=64,
        sequence=8192, dtype="bfloat16", steps=StepsRecord(memory_limit_bytes=1, ranked=tuple(records)),
    )  # fmt: skip


def test_megatron_lm_has_its_arguments() -> None:
    settings = export_plan(
        plan_of({"virtual_stages": 4, "recompute": "full", "zero": 3}), "megatron-lm"
    ).settings
    assert settings["--tensor-model-parallel-size"] == 4 and settings["--sequence-parallel"]
    assert settings["--num-layers-per-virtual-pipeline-stage"] == 4
    assert settings["--num-query-groups"] == 8 and settings["--ffn-hidden-size"] == 14336
    assert settings["--data-parallel-sharding-strategy"] == "optim_grads_params"
    assert settings["--recompute-granularity"] == "full"


def test_a_strategy_that_others_do_not_have_is_refused_and_a_row_is_named() -> None:
    plan = plan_of({"strategy": "meshslice_block", "tensor": (2, 2)}, {"strategy": "megatron", "zero": 0})
    for target in TARGETS:
        with pytest.raises(UnsupportedError, match=r"2x2 ranks.*row 2 of the plan can be"):
            export_plan(plan, target)
        assert export_plan(plan, target, 2).settings
    with pytest.raises(UnsupportedError, match="no row of the plan can be"):
        export_plan(plan_of({"strategy": "atp"}), "torchtitan")
    with pytest.raises(LayoutError, match="no row 3"):
        export_plan(plan, "hf", 3)


def test_what_is_left_out_is_said() -> None:
    left_out = export_plan(plan_of({"recompute": "selective"}), "hf").left_out
    for word in ("megatron_sp", "Data parallelism of 2", "Pipeline parallelism of 2", "ZeRO 1", "Selective"):
        assert any(word in sentence for sentence in left_out), word
    with pytest.raises(UnsupportedError, match="transposed"):
        export_plan(plan_of({}, model="gpt3"), "hf")


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
        export = export_plan(plan, target)
    except MeshweaveError:
        return
    settings = export.settings.get("parallelism", export.settings)
    tensor = degrees["tensor"] if isinstance(degrees["tensor"], int) else math.prod(degrees["tensor"])
    assert tensor == 1 or degrees["strategy"].startswith("megatron")
    names = {
        "megatron-lm": ("--tensor-model-parallel-size", "--pipeline-model-parallel-size"),
        "torchtitan": ("tensor_parallel_degree", "pipeline_parallel_degree"),
        "hf": ("tp_size", ""),
    }[target]
    assert settings[names[0]] == tensor
    assert not names[1] or settings[names[1]] == degrees["pipeline"]
    if target == "hf" and degrees["pipeline"] > 1:
        assert any("Pipeline" in sentence for sentence in export.left_out)
    if target != "hf" and degrees["order"] not in (
        ("tensor", "context", "data", "pipeline"), ("tensor", "context", "pipeline", "data")
    ):  # fmt: skip
        assert any("order of ranks" in sentence for sentence in export.left_out)


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
    plan = export_plan(plan_of({}), "hf").settings["tp_plan"]
    assert set(plan.values()) <= set(styles)
    assert {f"model.{name}": style for name, style in theirs.items()}.items() <= plan.items()


@pytest.mark.slow
def test_overrides_are_fields_of_torchtitan() -> None:
    configs = pytest.importorskip("torchtitan.config.configs", reason="torchtitan is not installed")
    settings = export_plan(plan_of({"schedule": "1f1b", "virtual_stages": 2}), "torchtitan").settings
    for table, config in (("parallelism", configs.ParallelismConfig), ("training", configs.TrainingConfig)):
        assert set(settings[table]) <= {field.name for field in fields(config)}
        config(**settings[table])


OF_TRAINING = {
    "--seq-length", "--max-position-embeddings", "--micro-batch-size", "--global-batch-size", "--swiglu",
    "--group-query-attention", "--untie-embeddings-and-output-weights", "--use-tp-pp-dp-mapping",
    "--num-layers-per-virtual-pipeline-stage",
}  # fmt: skip
"""Arguments of megatron/training/arguments.py, which PyPI does not have; they are no fields of its configs."""


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
    settings = export_plan(plan_of(degrees), "megatron-lm").settings
    named = {name[2:].replace("-", "_"): value for name, value in settings.items() if name not in OF_TRAINING}
    tables: list[dict[str, Any]] = []
    for config in (core.TransformerConfig, ddp):
        known = {field.name for field in fields(config)}
        tables.append({name: value for name, value in named.items() if name in known})
    assert named.keys() == tables[0].keys() | tables[1].keys()
    made = core.TransformerConfig(**tables[0], pipeline_dtype=torch.bfloat16)
    assert made.num_query_groups == 8 and made.sequence_parallel == ("strategy" not in degrees)
    assert ddp(**tables[1]).use_distributed_optimizer
