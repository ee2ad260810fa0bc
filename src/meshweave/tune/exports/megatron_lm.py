"""A plan as arguments of Megatron-LM (megatron/training/arguments.py of core 0.12 to 0.16)."""

from __future__ import annotations

from typing import Any

from meshweave.base.errors import UnsupportedError
from meshweave.tune.exports.row import Export, PlannedRow

_ORDERS = {("tensor", "context", "data", "pipeline"): (), ("tensor", "context", "pipeline", "data"): (
    "--use-tp-pp-dp-mapping",
)}  # fmt: skip
_DTYPES = {"bfloat16": ("--bf16",), "float16": ("--fp16",), "float32": ()}


def to_megatron_lm(row: PlannedRow) -> Export:
    """Return the arguments for `pretrain_gpt.py`. Raises UnsupportedError where it has no such strategy."""
    plan, model, degrees = row.plan, row.model, row.degrees
    row.require_megatron("Megatron-LM")
    left_out: list[str] = []
    settings: dict[str, Any] = {
        "--num-layers": model.num_layers,
        "--hidden-size": model.hidden,
        "--ffn-hidden-size": model.ffn_hidden,
        "--num-attention-heads": model.num_heads,
        "--kv-channels": model.head_dim,
        "--seq-length": plan.sequence,
        "--max-position-embeddings": plan.sequence,
        "--micro-batch-size": degrees.micro_batch,
        "--global-batch-size": plan.batch,
        "--tensor-model-parallel-size": row.tensor,
        "--pipeline-model-parallel-size": degrees.pipeline,
        "--context-parallel-size": degrees.context,
    }
    flags: list[str] = []
    if model.num_kv_heads != model.num_heads:
        flags.append("--group-query-attention")
        settings["--num-query-groups"] = model.num_kv_heads
    if model.gated_ffn:
        flags.append("--swiglu")
    if not model.tied_embeddings:
        flags.append("--untie-embeddings-and-output-weights")
    if row.tensor > 1 and degrees.strategy == "megatron_sp":
        flags.append("--sequence-parallel")
    flags += _zero_flags(row, settings)
    _add_schedule(row, settings, left_out)
    if degrees.recompute != "none":
        settings["--recompute-granularity"] = degrees.recompute
    if degrees.recompute == "full":
        settings |= {"--recompute-method": "uniform", "--recompute-num-layers": 1}
    order = tuple(name for name in degrees.order)
    if order in _ORDERS:
        flags += _ORDERS[order]
    else:
        left_out.append(
            f"The order of ranks is {', '.join(order)}, innermost first; Megatron-LM has tensor, context, data, "
            "pipeline, or the last two exchanged."
        )
    flags += _DTYPES.get(plan.dtype, ())
    if plan.dtype not in _DTYPES:
        left_out.append(f"Products are in {plan.dtype}, for which these arguments have no word.")
    words = [*(f"{name} {value}" for name, value in settings.items()), *flags]
    table = settings | dict.fromkeys(flags, True)
    return Export("megatron-lm", table, " \\\n".join(words), tuple(left_out))


def _zero_flags(row: PlannedRow, settings: dict[str, Any]) -> tuple[str, ...]:
    zero = row.degrees.zero
    if zero == 0:
        return ()
    if zero > 1:
        settings["--data-parallel-sharding-strategy"] = "optim_grads" if zero == 2 else "optim_grads_params"
        return "--use-distributed-optimizer", "--use-megatron-fsdp"
    return ("--use-distributed-optimizer",)


def _add_schedule(row: PlannedRow, settings: dict[str, Any], left_out: list[str]) -> None:
    degrees = row.degrees
    if degrees.pipeline == 1:
        return
    if degrees.schedule not in ("1f1b", "interleaved-1f1b"):
        raise UnsupportedError(
            f"Megatron-LM has the schedules 1f1b and interleaved-1f1b, and not {degrees.schedule}; mw.pipeline "
            "runs that"
        )
    if row.num_layers_per_stage is None:
        left_out.append(
            f"{row.model.num_layers} layers are not shared out evenly to {degrees.pipeline} pipeline ranks; say "
            "which has how many with --pipeline-model-parallel-layout."
        )
    elif degrees.virtual_stages > 1:
        settings["--num-layers-per-virtual-pipeline-stage"] = row.num_layers_per_stage
