"""A plan as overrides, in Hydra's syntax, of a Megatron Bridge recipe (training/config.py of 0.3.1)."""

from __future__ import annotations

import json
import shlex
from typing import Any

from meshweave.tune.exports.megatron_lm import add_degrees, environment_of
from meshweave.tune.exports.model_words import model_left_out, step_left_out
from meshweave.tune.exports.row import Export, PlannedRow

_SECTIONS = {
    "model": (
        "--seq-length", "--tensor-model-parallel-size", "--pipeline-model-parallel-size",
        "--context-parallel-size", "--expert-model-parallel-size", "--expert-tensor-parallel-size",
        "--sequence-parallel", "--moe-token-dispatcher-type", "--moe-flex-dispatcher-backend",
        "--moe-grouped-gemm", "--pipeline-model-parallel-layout",
        "--recompute-granularity", "--recompute-method", "--recompute-num-layers", "--attention-dropout",
        "--hidden-dropout",
    ),
    "train": ("--micro-batch-size", "--global-batch-size"),
    "ddp": (
        "--use-distributed-optimizer", "--use-megatron-fsdp", "--data-parallel-sharding-strategy",
        "--overlap-grad-reduce", "--overlap-param-gather",
    ),
    "dist": ("--use-tp-pp-dp-mapping",),
    "checkpoint": ("--ckpt-format",),
    "optimizer": ("--optimizer", "--sgd-momentum"),
}  # fmt: skip
"""The section of a recipe that has a field of the name of each argument of Megatron-LM."""
_WITHOUT = {
    "model.sequence_parallel": False,
    "model.recompute_granularity": None,
    "model.recompute_method": None,
    "model.recompute_num_layers": None,
    "model.recompute_modules": None,
    "model.virtual_pipeline_model_parallel_size": None,
    "model.pipeline_model_parallel_layout": None,
    "model.account_for_embedding_in_pipeline_split": False,
    "model.account_for_loss_in_pipeline_split": False,
    "model.num_layers_in_first_pipeline_stage": None,
    "model.num_layers_in_last_pipeline_stage": None,
    "ddp.use_distributed_optimizer": False,
    "ddp.use_megatron_fsdp": False,
    "ddp.data_parallel_sharding_strategy": "no_shard",
    "ddp.overlap_grad_reduce": False,
    "ddp.overlap_param_gather": False,
    "dist.use_tp_pp_dp_mapping": False,
    "dist.use_megatron_fsdp": False,
    "checkpoint.ckpt_format": "torch_dist",
}
"""What a recipe may have and a plan may not, so that it is set in any case."""
_PRECISIONS = {"--bf16": "bf16_mixed", "--fp16": "fp16_mixed"}


def to_megatron_bridge(row: PlannedRow) -> Export:
    """Return the Megatron Bridge overrides of a row of a plan.

    Raises UnsupportedError where Megatron Bridge lacks the row's strategy, schedule, dispatcher of tokens or
    sharded optimizer, or where ranks would get unequal shares of heads, inner features or a sequence.
    """
    arguments: dict[str, Any] = {}
    flags: list[str] = []
    left_out: list[str] = []
    told = add_degrees(row, arguments, flags, left_out, "Megatron Bridge")
    arguments |= dict.fromkeys(flags, True)
    settings: dict[str, Any] = _WITHOUT | {
        f"{section}.{name[2:].replace('-', '_')}": arguments[name]
        for section, names in _SECTIONS.items()
        for name in names
        if name in arguments
    }
    settings["dataset.seq_length"] = row.plan.sequence
    # Bridge turns both on where either is.
    settings["optimizer.use_distributed_optimizer"] = settings["ddp.use_distributed_optimizer"]
    if precision := next((word for name, word in _PRECISIONS.items() if name in arguments), None):
        settings["mixed_precision"] = precision
    elif row.plan.dtype == "float32":
        left_out.append(
            "Products are in float32: recipes compute in bf16_mixed unless another mixed_precision is set."
        )
    if row.degrees.virtual_stages > 1:
        settings["model.virtual_pipeline_model_parallel_size"] = row.degrees.virtual_stages
    if "--attention-dropout" in arguments:
        told |= {"dropout"}
    left_out += model_left_out(row.model, (), "Megatron Bridge, whose recipe names it,")
    left_out += step_left_out(row, told, "Megatron Bridge")
    written = {
        name: value if isinstance(value, str) else json.dumps(value) for name, value in settings.items()
    }
    text = " \\\n".join(shlex.quote(f"{name}={value}") for name, value in written.items())
    return Export("megatron-bridge", settings, text, tuple(left_out), environment_of(row))
