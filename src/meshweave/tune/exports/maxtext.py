"""A plan as settings of MaxText (configs/base.yml of 2026), whose axes XLA lays on the chips of one slice."""

from __future__ import annotations

from typing import Any

from meshweave.base.errors import UnsupportedError
from meshweave.tune.exports.model_words import model_left_out, step_left_out
from meshweave.tune.exports.row import Export, PlannedRow

_REMAT = {"none": "minimal_with_context", "selective": "minimal", "full": "full"}
"""Policies that keep what a plan keeps: results of products and attention, of products alone, inputs of layers."""


def to_maxtext(row: PlannedRow) -> Export:
    """Return the MaxText settings of a row of a plan.

    Raises UnsupportedError for what MaxText lacks: tensor parallelism other than Megatron-LM's, expert and
    pipeline parallelism, and unequal shares of heads, inner features, the vocabulary or a sequence.
    """
    plan, degrees = row.plan, row.degrees
    row.require_megatron("MaxText")
    row.require_dense("MaxText")
    row.require_even_shares("MaxText")
    row.require_even_features("MaxText")
    if row.model.vocab_size is not None and row.model.vocab_size % row.tensor:
        raise UnsupportedError(
            f"MaxText gives each tensor rank as many words, and {row.model.vocab_size} words do not divide among "
            f"{row.tensor} ranks; pad the vocabulary"
        )
    if degrees.pipeline > 1:
        raise UnsupportedError(
            f"MaxText's pipelines are circular, all forward passes first, and not "
            f"{degrees.schedule}; mw.pipeline runs that"
        )
    settings: dict[str, Any] = {
        "max_target_length": plan.sequence,
        "per_device_batch_size": degrees.micro_batch / (row.tensor * degrees.context),
        "gradient_accumulation_steps": row.accumulated,
        "ici_data_parallelism": 1 if degrees.zero == 3 else degrees.data,
        "ici_fsdp_parallelism": degrees.data if degrees.zero == 3 else 1,
        "ici_context_parallelism": degrees.context,
        "ici_tensor_parallelism": row.tensor,
        "remat_policy": _REMAT[degrees.recompute],
    }
    left_out = []
    if degrees.zero in (1, 2):
        settings["shard_optimizer_over_data"] = True
        if degrees.zero == 2:
            left_out.append(
                "ZeRO 2 shards gradients; MaxText shards the optimizer's states, and XLA the rest."
            )
    if plan.dtype in ("bfloat16", "float32"):
        settings["dtype"] = plan.dtype
    else:
        left_out.append(f"Products are in {plan.dtype}, for which MaxText has no word here.")
    if row.is_sequence_parallel:
        left_out.append(
            f"{degrees.strategy} shares the tokens between the matrices of a layer; XLA chooses it there."
        )
    left_out.append(
        f"The order of ranks is {', '.join(degrees.order)}, innermost first; XLA lays the axes on the slice. Axes "
        "that leave a slice are dcn_ instead of ici_ ones."
    )
    left_out += model_left_out(row.model, (), "MaxText, whose model_name names it,")
    left_out += step_left_out(row, (), "MaxText")
    words = [f"{name}={value}" for name, value in settings.items()]
    return Export("maxtext", settings, " \\\n".join(words), tuple(left_out))
