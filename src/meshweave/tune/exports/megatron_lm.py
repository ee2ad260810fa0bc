"""A plan as arguments of Megatron-LM (megatron/training/arguments.py of core 0.16 to 0.19)."""

from __future__ import annotations

import json
import shlex
from typing import Any

from meshweave.algorithms.step.problem import OPTIMIZERS
from meshweave.algorithms.table import SCHEDULES
from meshweave.base.errors import UnsupportedError, listed
from meshweave.describe.model.latent import LatentAttention
from meshweave.describe.model.memory import OptimizerStates
from meshweave.tune.exports.megatron_experts import add_dispatch, add_routed_model
from meshweave.tune.exports.model_words import MEGATRON_ORDER, model_left_out, order_sentence, step_left_out
from meshweave.tune.exports.row import Export, PlannedRow

_DATA_OUTERMOST = ("tensor", "context", "pipeline", "data")
_TARGET = "megatron-lm"
_DTYPES = {"bfloat16": ("--bf16",), "float16": ("--fp16",), "float32": ()}


def to_megatron_lm(row: PlannedRow) -> Export:
    """Return the arguments for `pretrain_gpt.py`.

    Raises:
        UnsupportedError: Megatron-LM has no such strategy, schedule, dispatcher of tokens or sharded optimizer,
            or no argument for what the model computes; or ranks would get unequal shares of heads, inner
            features or a sequence.
    """
    left_out: list[str] = []
    flags: list[str] = []
    settings: dict[str, Any] = {}
    model_told = _add_model(row, settings, flags, left_out)
    step_told = add_degrees(row, settings, flags, left_out, "Megatron-LM")
    left_out += model_left_out(row.model, model_told, "Megatron-LM")
    left_out += step_left_out(row, ("dropout", *step_told), "Megatron-LM")
    words = [*(f"{name} {shlex.quote(str(value))}" for name, value in settings.items()), *flags]
    table = settings | dict.fromkeys(flags, True)
    return Export(_TARGET, table, " \\\n".join(words), tuple(left_out), environment_of(row))


def environment_of(row: PlannedRow) -> dict[str, str]:
    """Return the environment variables that Megatron-LM demands for a row on Hopper and older chips.

    With tensor or context parallelism and ZeRO 0 or 1 it is CUDA_DEVICE_MAX_CONNECTIONS=1: one hardware queue
    lets the host order products and communication. Else it is {}: Megatron-FSDP (ZeRO 2 and 3) wants several
    queues. The plan's chip is not looked at.
    """
    shares = row.tensor > 1 or row.degrees.context > 1
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if shares and row.degrees.zero < 2 else {}


def add_degrees(
    row: PlannedRow, settings: dict[str, Any], flags: list[str], left_out: list[str], target: str
) -> set[str]:
    """Add Megatron Core's arguments for the degrees, schedule, dtype and optimizer of a row.

    Args:
        settings: options with values, which are added to.
        flags: options without values, which are added to.
        left_out: sentences on what the arguments do not say, which are added to.
        target: the name of the software, for sentences and errors.

    Returns:
        The names of the priced step's settings (`PlannedRow.settings`) that the arguments hold.

    Raises:
        UnsupportedError: Megatron Core has no such strategy or schedule.
    """
    plan, degrees = row.plan, row.degrees
    row.require_megatron(target)
    row.require_even_shares(target)
    row.require_even_features(target)
    settings |= {
        "--seq-length": plan.sequence,
        "--micro-batch-size": degrees.micro_batch,
        "--global-batch-size": plan.batch,
        "--tensor-model-parallel-size": row.tensor,
        "--pipeline-model-parallel-size": degrees.pipeline,
        "--context-parallel-size": degrees.context,
    }
    told = add_dispatch(row, settings, flags, target)
    if degrees.data > 1:
        left_out.append(
            f"Data parallelism of {degrees.data} is what the number of ranks makes of it: start "
            f"{degrees.num_chips}."
        )
    if row.is_sequence_parallel:
        flags.append("--sequence-parallel")
    flags += _zero_flags(row, settings, target)
    _add_schedule(row, settings, target)
    if degrees.recompute != "none":
        settings["--recompute-granularity"] = degrees.recompute
    if degrees.recompute == "full":
        settings |= {"--recompute-method": "uniform", "--recompute-num-layers": 1}
    order = tuple(degrees.order)
    if order == _DATA_OUTERMOST and "--use-megatron-fsdp" not in flags:
        flags.append("--use-tp-pp-dp-mapping")
    elif order != MEGATRON_ORDER:
        beside = ", or the last two exchanged" if order != _DATA_OUTERMOST else " where weights are sharded"
        left_out.append(order_sentence(order, f"{target} has {', '.join(MEGATRON_ORDER)}{beside}"))
    flags += _DTYPES.get(plan.dtype, ())
    if plan.dtype not in _DTYPES:
        left_out.append(f"Products are in {plan.dtype}, for which these arguments have no word.")
    return told | _add_step(row, settings, flags)


def _add_model(row: PlannedRow, settings: dict[str, Any], flags: list[str], left_out: list[str]) -> set[str]:
    """Add the arguments that define the model; return the fields that they tell."""
    model, own = row.model, row.model.architecture
    is_latent = any(isinstance(node, LatentAttention) for _, graph in model.runs for node in graph.nodes)
    settings |= {
        "--num-layers": model.num_layers,
        "--hidden-size": model.hidden,
        "--ffn-hidden-size": model.ffn_hidden,
        "--num-attention-heads": model.num_heads,
        **({} if is_latent else {"--kv-channels": model.head_dim}),
        "--max-position-embeddings": max(row.plan.sequence, own.max_positions or 0),
    }
    told = {"num_layers", "hidden", "ffn_hidden", "num_heads", "num_kv_heads", "head_dim", "tied_embeddings"}
    if row.plan.sequence <= (own.max_positions or row.plan.sequence):
        told.add("max_positions")
    if model.num_kv_heads != model.num_heads and not is_latent:
        flags.append("--group-query-attention")
        settings["--num-query-groups"] = model.num_kv_heads
    if not model.tied_embeddings:
        flags.append("--untie-embeddings-and-output-weights")
    if model.vocab_size is not None:
        settings |= {"--vocab-size": model.vocab_size, "--make-vocab-size-divisible-by": 1}
        told.add("vocab_size")
        if model.vocab_size % row.tensor:
            left_out.append(
                f"{model.vocab_size} words do not divide among {row.tensor} ranks: Megatron-LM adds words that "
                "are no tokens."
            )
    for name, option, value in (
        ("norm", "--normalization", {"rms": "RMSNorm", "layer": "LayerNorm"}.get(own.norm or "")),
        ("norm_eps", "--norm-epsilon", own.norm_eps),
        ("init_std", "--init-method-std", own.init_std),
    ):
        if value is not None:
            settings[option] = value
            told.add(name)
    if own.qk_norm is not None:
        flags += ["--qk-layernorm"] if own.qk_norm else []
        told.add("qk_norm")
    if model.layers and not model.is_routed:
        raise UnsupportedError(
            f"Megatron-LM has no argument for layers node by node, as {model.name} is described"
        )
    if model.is_routed:
        told |= add_routed_model(row, settings, flags, left_out)
    return told | _activation(row, flags) | _biases(row, flags) | _positions(row, settings, flags)


def _activation(row: PlannedRow, flags: list[str]) -> set[str]:
    """Add what names the activation; return what it tells. A gate whose activation is unknown is SwiGLU.

    Its fused kernel of bias and GELU approximates by tanh. Without biases it computes the exact GELU, so that a
    model that approximates is not told.
    """
    activation, gated = row.model.architecture.activation, row.model.gated_ffn
    words = _ACTIVATIONS.get((gated, activation))
    if words is None:
        return set()
    flags += words
    is_exact = not words and "--disable-bias-linear" in (_bias_words(row) or ())
    return {"gated_ffn"} if activation is None or is_exact else {"gated_ffn", "activation"}


_ACTIVATIONS: dict[tuple[bool, str | None], tuple[str, ...]] = {
    (True, "silu"): ("--swiglu",),
    (True, "swish"): ("--swiglu",),
    (True, None): ("--swiglu",),
    (False, "relu2"): ("--squared-relu", "--no-bias-gelu-fusion"),  # refused beside the fused kernel
    (False, "gelu"): ("--no-bias-gelu-fusion",),
    (False, "gelu_new"): (),
    (False, "gelu_pytorch_tanh"): (),
    (False, "gelu_fast"): (),
    (False, None): (),
}


def _biases(row: PlannedRow, flags: list[str]) -> set[str]:
    words = _bias_words(row)
    flags += words or ()
    return set() if words is None else {"qkv_bias", "out_bias", "ffn_bias"}


def _bias_words(row: PlannedRow) -> tuple[str, ...] | None:
    own = row.model.architecture
    return _BIASES.get((own.qkv_bias, own.out_bias, own.ffn_bias))


_BIASES: dict[tuple[bool | None, ...], tuple[str, ...]] = {
    (True, True, True): (),
    (False, False, False): ("--disable-bias-linear",),
    (True, False, False): ("--disable-bias-linear", "--add-qkv-bias"),
}


def _positions(row: PlannedRow, settings: dict[str, Any], flags: list[str]) -> set[str]:
    own = row.model.architecture
    if own.positions == "learned":
        settings["--position-embedding-type"] = "learned_absolute"
        return {"positions"}
    if own.positions != "rotary":
        return set()
    settings["--position-embedding-type"] = "rope"
    told = {"positions"}
    if own.rotary_base is not None and own.rotary_base.is_integer():
        settings["--rotary-base"] = int(own.rotary_base)
        told.add("rotary_base")
    if own.rotary_share is not None:
        settings["--rotary-percent"] = own.rotary_share
        told.add("rotary_share")
    scaling = json.loads(own.rotary_scaling) if own.rotary_scaling else {}
    factor = scaling.pop("factor", None)
    kind = scaling.pop("type", scaling.get("rope_type"))  # its name in transformers 4
    if factor and {**scaling, "rope_type": kind} == _LLAMA3_SCALING:
        flags.append("--use-rope-scaling")
        settings["--rope-scaling-factor"] = factor
        told.add("rotary_scaling")
    return told


_LLAMA3_SCALING = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""What --use-rope-scaling has beside a factor (megatron/core/models/common/embeddings/rotary_pos_embedding.py)."""


def _add_step(row: PlannedRow, settings: dict[str, Any], flags: list[str]) -> set[str]:
    """Add dropout, optimizer and overlap of a step; return the settings of the price that they tell."""
    has_dropout = row.settings.get("dropout", not row.model.gated_ffn)
    if not has_dropout:
        settings |= {"--attention-dropout": 0.0, "--hidden-dropout": 0.0}
    states = _states(row)
    settings["--optimizer"] = "adam" if states.count == _ADAM.count else "sgd"
    if not states.count:
        settings["--sgd-momentum"] = 0.0
    stack = row.stack
    if row.degrees.data > 1 and stack.overlap:
        flags.append("--overlap-grad-reduce")
        if row.degrees.zero and not stack.waits_for_gathers:
            flags.append("--overlap-param-gather")
    return {"optimizer"} if states.num_bytes == _ADAM.num_bytes else set()


_ADAM = OPTIMIZERS["adam"]


def _states(row: PlannedRow) -> OptimizerStates:
    """Return the states of the optimizer of a row."""
    return OPTIMIZERS[row.settings.get("optimizer", "adam")]


def _zero_flags(row: PlannedRow, settings: dict[str, Any], target: str) -> tuple[str, ...]:
    zero = row.degrees.zero
    if zero == 0:
        return ()
    if _states(row).count < _ADAM.count:
        raise UnsupportedError(
            f"{target} shards the states of Adam alone, and not those of {row.settings['optimizer']}; plan with "
            "zero=0"
        )
    if zero > 1:
        settings["--data-parallel-sharding-strategy"] = "optim_grads" if zero == 2 else "optim_grads_params"
        settings["--ckpt-format"] = "fsdp_dtensor"  # any other is refused with Megatron-FSDP
        return "--use-distributed-optimizer", "--use-megatron-fsdp"
    return ("--use-distributed-optimizer",)


def _add_schedule(row: PlannedRow, settings: dict[str, Any], target: str) -> None:
    degrees = row.degrees
    if degrees.pipeline == 1:
        return
    if _TARGET not in row.schedule.names_elsewhere:
        here = [name for name, entry in SCHEDULES.items() if _TARGET in entry.names_elsewhere]
        raise UnsupportedError(
            f"{target} has the schedules {listed(here)}, and not {degrees.schedule}; mw.pipeline runs that"
        )
    if row.num_layers_per_stage is None:
        settings["--pipeline-model-parallel-layout"] = _layout(row.stage_layers)
    elif degrees.virtual_stages > 1:
        settings["--num-layers-per-virtual-pipeline-stage"] = row.num_layers_per_stage


def _layout(stages: tuple[int, ...]) -> str:
    """Return the layers of each stage as Megatron Core writes them, with the embedding (E) and the loss (L)."""
    return f"E{'|'.join(f't*{count}' if count else '' for count in stages)}L"
