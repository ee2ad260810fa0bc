"""A plan as `tp_plan` and config of Hugging Face transformers 5 (integrations/tensor_parallel.py)."""

from __future__ import annotations

import json
from typing import Any

from meshweave.base.errors import UnsupportedError
from meshweave.describe.model import Transformer
from meshweave.tune.exports.model_words import defining_fields, model_left_out, step_left_out
from meshweave.tune.exports.row import Export, PlannedRow

_LAYERS = {
    "self_attn.q_proj": "colwise",
    "self_attn.k_proj": "colwise",
    "self_attn.v_proj": "colwise",
    "self_attn.o_proj": "rowwise",
    "mlp.gate_proj": "colwise",
    "mlp.up_proj": "colwise",
    "mlp.down_proj": "rowwise",
}
"""The matrices of a layer by the names of their modules, with the styles that transformers has for `_FAMILIES`."""
_HEAD_NORMS = {f"self_attn.{name}_norm": "replicated_with_grad_allreduce" for name in ("q", "k")}
"""Norms of a head, whose weights get gradients of the heads of one rank alone: their sum is needed."""
_WITH_HEAD_NORMS = ("exaone4", "gemma3_text", "qwen3")
_FAMILIES = (
    "", "cohere", "cohere2", "cwm", "ernie4_5", "gemma", "gemma2", "granite", "helium", "hyperclovax", "internlm3",
    "llama", "ministral", "ministral3", "mistral", "olmo", "qwen2", "seed_oss", "smollm3", "vaultgemma",
)  # fmt: skip
"""Values of `model_type` whose layers have these modules and no other matrix, as transformers 5.23 has them."""


def to_hugging_face(row: PlannedRow) -> Export:
    """Return the `tp_plan` for `from_pretrained` of a model whose layers have the modules of Llama's.

    Raises:
        UnsupportedError: transformers has no such strategy, no degrees of experts, or no config of the model; no
            `tp_plan` is known for its layers; or tensor ranks do not divide its heads of keys and values.
    """
    row.require_megatron("transformers")
    row.require_dense("transformers")
    if not row.model.gated_ffn:
        raise UnsupportedError(
            f"transformers has no tensor-parallel style for the layers of {row.model.name}, whose matrices are "
            "stored transposed and fused; mw.parallelize runs them"
        )
    tensor = row.tensor
    if row.model.is_routed and tensor > 1:
        raise UnsupportedError(
            f"the tp_plan written here has no styles for the experts of {row.model.name}; tensor parallelism of "
            "one, or export to megatron-lm"
        )
    if row.model.layers and not row.model.config:
        raise UnsupportedError(
            f"transformers has no config of {row.model.name}, whose layers are described node by node"
        )
    if row.model.num_kv_heads % tensor:
        raise UnsupportedError(
            f"transformers cuts {row.model.num_kv_heads} key/value heads among {tensor} ranks, and they do not "
            "divide; mw.parallelize has copies of them"
        )
    plan = (
        {f"model.layers.*.{name}": style for name, style in _styles(row.model).items()} if tensor > 1 else {}
    )
    if tensor > 1 and not row.model.tied_embeddings:
        plan["lm_head"] = "colwise_gather_output"
    config, told = config_of(row.model)
    left_out = [
        *_degrees_left_out(row),
        f"Sequences of {row.plan.sequence} tokens, the batch of {row.plan.batch} and {row.plan.dtype} are the "
        "Trainer's to set.",
        *model_left_out(row.model, told, "transformers" if config else "transformers, whose name finds it,"),
        *step_left_out(row, (), "transformers"),
    ]
    made = f"config = AutoConfig.for_model(**{config!r})\n" if config else ""
    text = (
        f"{made}tp_plan = {json.dumps(plan, indent=4)}\n"
        f"model = AutoModelForCausalLM.from_pretrained(name, {'config=config, ' if config else ''}tp_plan=tp_plan)"
    )
    settings = {"tp_plan": plan, "tp_size": tensor, "config": config}
    return Export("hf", settings, text, tuple(left_out))


def _styles(model: Transformer) -> dict[str, str]:
    """Return the style of each module of a layer that ranks share.

    Raises:
        UnsupportedError: the modules of the model's family are others, or not known here.
    """
    family = model.architecture.model_type
    if family in _WITH_HEAD_NORMS:
        return _LAYERS | _HEAD_NORMS
    if family not in _FAMILIES or model.architecture.qk_norm:
        norms = " and norms of queries and keys" if family in _FAMILIES else ""
        raise UnsupportedError(
            f"the tp_plan written here has no styles for the layers of model_type {family!r}{norms}; tensor "
            'parallelism of one, or from_pretrained(..., tp_plan="auto") where transformers has styles of its own'
        )
    return _LAYERS


def _degrees_left_out(row: PlannedRow) -> list[str]:
    """Return what of the degrees of a step a `tp_plan` cannot say."""
    degrees, tensor, left_out = row.degrees, row.tensor, []
    if row.is_sequence_parallel:
        left_out.append(
            f"{degrees.strategy} shares the tokens between the matrices of a layer; a tp_plan keeps them "
            "whole, so that it sums with all-reduces and needs more memory for norms."
        )
    for name, size in (
        ("data", degrees.data),
        ("context", degrees.context),
        ("pipeline", degrees.pipeline),
    ):
        if size > 1:
            left_out.append(f"{name.capitalize()} parallelism of {size} is not in a tp_plan.")
    if degrees.zero:
        left_out.append(f"ZeRO {degrees.zero} is FSDP's or DeepSpeed's to set, and not in a tp_plan.")
    if degrees.recompute != "none":
        left_out.append(
            f"{degrees.recompute.capitalize()} recomputation is gradient_checkpointing of the Trainer, which "
            "computes whole layers again."
        )
    if row.plan.batch > degrees.micro_batch * degrees.data:
        left_out.append(
            f"A micro-batch of {degrees.micro_batch} is per_device_train_batch_size of the Trainer, with "
            f"gradient_accumulation_steps for the batch of {row.plan.batch}."
        )
    order = tuple(degrees.order)
    if tensor > 1 and order[0] != "tensor":
        left_out.append(f"The order of ranks is {', '.join(order)}, innermost first; a tp_plan has none.")
    if degrees.pipeline > 1:
        stages = (
            f"{degrees.virtual_stages} stages a rank" if degrees.virtual_stages > 1 else "one stage a rank"
        )
        left_out.append(f"The schedule is {degrees.schedule} with {stages}; a tp_plan has none.")
    return left_out


_CONFIGS = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose `config.json` has the names of Llama's."""


def config_of(model: Transformer) -> tuple[dict[str, Any], set[str]]:
    """Return (the contents of a model's `config.json`, the names of the model's fields that they express).

    Names are those of `defining_fields`. Both are empty for a family whose config has other keys than Llama's. A
    model without a family gets the config of a Llama. Fields that the model does not state are in neither.
    """
    own = model.architecture
    if own.model_type not in ("", *_CONFIGS):
        return {}, set()
    family = own.model_type if own.model_type in _CONFIGS else "llama"
    scaling = json.loads(own.rotary_scaling or "{}")
    if "type" in scaling:  # its name in transformers 4; the default of rope_type would go before it
        scaling = {"rope_type": scaling["type"]} | scaling
    rotary = {"rope_theta": own.rotary_base, "rope_type": "default"}
    config = {
        "model_type": family,
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.ffn_hidden,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tied_embeddings,
        "hidden_act": own.activation,
        "rms_norm_eps": own.norm_eps if own.norm == "rms" else None,
        "max_position_embeddings": own.max_positions,
        "initializer_range": own.init_std,
        "rope_parameters": rotary | scaling if own.rotary_base else None,
    }
    told = {"num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim", "ffn_hidden", "vocab_size"}
    told |= {"tied_embeddings", "gated_ffn", "activation", "max_positions", "init_std", "rotary_base"}
    told |= {"rotary_scaling"} if own.rotary_base else set()
    told |= {"norm", "norm_eps"} if own.norm == "rms" else set()
    told |= {"positions"} if own.positions == "rotary" else set()
    told |= {"rotary_share"} if own.rotary_share == 1 else set()
    told |= {"qk_norm"} if own.qk_norm == (family == "qwen3") else set()
    told |= {"model_type"} if own.model_type == family else set()
    biases = own.qkv_bias, own.out_bias, own.ffn_bias
    fixed = {"mistral": (False, False, False), "qwen2": (True, False, False)}
    if family in fixed:
        told |= _BIASES if biases == fixed[family] else set()
    elif own.qkv_bias == own.out_bias and (family == "llama" or not own.ffn_bias):
        config |= {"attention_bias": own.qkv_bias} | ({"mlp_bias": own.ffn_bias} if family == "llama" else {})
        told |= _BIASES
    if family == "mistral":
        config["sliding_window"] = own.window
        told.add("window")
    unknown = {name for name, value in defining_fields(model).items() if value is None}
    kept = {name: value for name, value in config.items() if value is not None or name == "sliding_window"}
    return kept, told - (unknown - {"window"})


_BIASES = {"qkv_bias", "out_bias", "ffn_bias"}
