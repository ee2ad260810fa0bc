"""A plan as the JSON configuration of DeepSpeed (runtime/config.py of 0.19)."""

from __future__ import annotations

import json
from typing import Any

from meshweave.base.errors import UnsupportedError
from meshweave.tune.exports.model_words import MEGATRON_ORDER, model_left_out, order_sentence, step_left_out
from meshweave.tune.exports.row import Export, PlannedRow

_DTYPES = {"bfloat16": "bf16", "float16": "fp16"}


def to_deepspeed(row: PlannedRow) -> Export:
    """Return the DeepSpeed configuration of a row of a plan.

    Raises UnsupportedError for what DeepSpeed lacks: tensor parallelism other than Megatron-LM's or with ZeRO 3,
    expert, pipeline and context parallelism.
    """
    plan, degrees = row.plan, row.degrees
    row.require_megatron("DeepSpeed")
    row.require_dense("DeepSpeed")
    if degrees.pipeline > 1:
        raise UnsupportedError(
            "DeepSpeed's pipelines are of models written as its PipelineModule, which no setting makes; "
            f"mw.pipeline runs {degrees.schedule}"
        )
    if degrees.context > 1:
        raise UnsupportedError(
            "DeepSpeed divides a sequence by heads (Ulysses), and not by rings of context parallelism; "
            "mw.parallelize runs those"
        )
    if row.tensor > 1 and degrees.zero == 3:
        raise UnsupportedError("DeepSpeed's tensor parallelism is for ZeRO 0 to 2, and not 3")
    settings: dict[str, Any] = {
        "train_batch_size": plan.batch,
        "train_micro_batch_size_per_gpu": degrees.micro_batch,
        "gradient_accumulation_steps": row.accumulated,
        "zero_optimization": {"stage": degrees.zero},
    }
    if row.tensor > 1:
        settings["tensor_parallel"] = {"autotp_size": row.tensor}
    left_out = []
    if plan.dtype in _DTYPES:
        settings[_DTYPES[plan.dtype]] = {"enabled": True}
    elif plan.dtype != "float32":
        left_out.append(f"Products are in {plan.dtype}, for which DeepSpeed has no word.")
    if row.is_sequence_parallel:
        left_out.append(
            f"{degrees.strategy} shares the tokens between the matrices of a layer; DeepSpeed keeps them whole, "
            "so that it sums with all-reduces and needs more memory for norms."
        )
    if tuple(degrees.order) != MEGATRON_ORDER:
        left_out.append(order_sentence(degrees.order, "DeepSpeed always has tensor, data"))
    if degrees.recompute != "none":
        left_out.append(
            f"{degrees.recompute.capitalize()} recomputation is the model's gradient_checkpointing_enable(), "
            "which computes whole layers again."
        )
    left_out.append(f"Sequences of {plan.sequence} tokens are the data's.")
    left_out += model_left_out(row.model, (), "DeepSpeed, which is given a model,")
    left_out += step_left_out(row, (), "DeepSpeed")
    return Export("deepspeed", settings, json.dumps(settings, indent=2), tuple(left_out))
