"""The one table of what keys of a Hugging Face `config.json` mean for a price.

Each key is read as a size (`SIZES`), changes nothing that a price knows (`HARMLESS`), defines the model for
other software alone (`DEFINING`), is said not to be priced (`SAID`), or refuses the model (`REFUSED`). A key
that is none of these is said not to be understood, unless it is off (false, null, 0, empty).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from meshweave.base.errors import printable
from meshweave.describe.files import Problem, format_value
from meshweave.describe.model.architecture import NotPriced, positions_not_priced

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HIDDEN = ("hidden_size", "n_embd", "n_embed", "d_model")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
FFN = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "dff")
ACTIVATION = ("hidden_act", "hidden_activation", "activation_function", "afn", "activation")
MAX_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length")
NORM_EPS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
INIT_STD = ("initializer_range", "init_std")
WINDOWS = ("sliding_window", "sliding_window_size", "attention_window_size", "local_attention", "window_size")
WIDTHS = ("embedding_size", "word_embed_proj_dim", "input_embedding_size", "output_embedding_size")
LAYER_KINDS = ("layer_types", "layers_block_type", "block_types", "attention_layers")
KINDS_OF_WINDOWS = ("sliding_attention", "local", "chunked_attention")
KINDS_OF_ATTENTION = (*KINDS_OF_WINDOWS, "full_attention", "attention", "global")
WINDOW_NUMBERS = (
    "sliding_window_pattern", "_sliding_window_pattern", "max_window_layers", "global_attn_every_n_layers",
    "no_rope_layer_interval",
)  # fmt: skip
"""Keys that say which layers have the window, by the rule of a family (`window_rules`)."""

SIZES = {
    *LAYERS, *HIDDEN, *HEADS, *KV_HEADS, *FFN, *ACTIVATION, *MAX_POSITIONS, *NORM_EPS, *INIT_STD, *WINDOWS,
    *LAYER_KINDS, "head_dim", "vocab_size", "tie_word_embeddings", "multi_query", "new_decoder_architecture",
    "expansion_ratio", "model_type", "attention_types", "use_sliding_window", "rope_theta", "rope_scaling",
    "rope_parameters", "partial_rotary_factor", "rotary_pct", "rotary_emb_base", "rotary_dim",
    "rope_local_base_freq", "original_max_position_embeddings", "attn_config", "num_local_experts", "is_decoder",
    "architectures", "pad_vocab_size_multiple",
}  # fmt: skip
"""Keys that the reader looks at, apart from those of the tables below."""

HARMLESS = {
    "_name_or_path", "transformers_version", "torch_dtype", "dtype", "auto_map", "id2label", "label2id",
    "use_cache", "return_dict", "problem_type", "is_encoder_decoder", "pretraining_tp", "slow_but_exact",
    "init_device", "task_specific_params", "finetuning_task", "prefix", "tokenizer_class", "torchscript",
    "use_bfloat16", "gradient_checkpointing", "chunk_size_feed_forward", "return_dict_in_generate",
    "num_labels", "do_sample", "reorder_and_upcast_attn", "attention_softmax_in_fp32",
    "scale_attention_softmax_in_fp32", "upcast_attn", "num_logits_to_keep", "use_flash_attn",
    "use_flash_attention_2", "layerdrop", "temperature", "top_k", "top_p", "max_length", "min_length",
    "repetition_penalty", "classifier_activation", "classifier_bias", "router_aux_loss_coef",
    "norm_topk_prob", "first_k_dense_replace", "topk_group", "n_group", "routed_scaling_factor", "moe_topk",
    "moe_layer_freq", "scoring_func", "topk_method", "initializer_cutoff_factor", "_attn_implementation",
    "attn_implementation", "_attn_implementation_autoset", "unsloth_version", "unsloth_fixed",
    "cache_implementation", "generation_config", "vocab_file", "use_return_dict", "output_router_logits",
    "lambda_std_dev", "rms_norm",
}  # fmt: skip
_HARMLESS_PATTERN = re.compile(
    r"_token_id$|_token_ids$|_token_index$|_token$|drop(out)?$|_dropout(_prob|_rate|_p)?$|_pdrop$|^output_|^summary_"
    r"|^initializer_|_init$|_init_method$|^_commit|^tokenizer"
)

DEFINING = {
    "attention_bias", "attention_out_bias", "mlp_bias", "use_bias", "bias", "enable_bias", "no_bias",
    "use_qkv_bias", "qkv_bias", "add_bias_linear", "add_qkv_bias", "decoder_bias", "norm_bias",
    "qk_layernorm", "use_qk_norm", "use_parallel_residual", "parallel_attn", "num_ln_in_parallel_attn",
    "alibi", "learned_pos_emb", "norm_type", "logit_scale", "embedding_multiplier", "residual_multiplier",
    "attention_multiplier", "logits_scaling", "query_pre_attn_scalar", "scale_attn_weights",
    "scale_attn_by_inverse_layer_idx", "scale_embedding", "embedding_scale", "scale_depth", "scale_emb",
    "dim_model_base", "no_rope_layers", "no_rope_layer_interval", "do_layer_norm_before",
    "layer_norm_elementwise_affine", "apply_residual_connection_post_layernorm", "use_post_norm",
    "use_sandwich_norm", "embedding_fraction", "rope_interleaved", "layer_rope_theta", "mup_enabled",
    "mup_base_width", "mup_use_scaling", "width_scale", "use_norm", "position_embedding_type",
}  # fmt: skip
"""Keys that change a model, and no product of it nor bytes worth counting."""

FLAGS = (
    "tie_word_embeddings", "multi_query", "new_decoder_architecture", "use_sliding_window", "attention_bias",
    "attention_out_bias", "mlp_bias", "use_bias", "bias", "enable_bias", "no_bias", "use_qkv_bias", "qkv_bias",
    "qk_layernorm", "use_qk_norm", "use_parallel_residual", "parallel_attn", "alibi",
)  # fmt: skip
"""Keys that are read as true or false."""

SAID = {
    "attn_logit_softcapping": "soft cap of {} on attention scores not priced",
    "final_logit_softcapping": "soft cap of {} on logits not priced",
    "logits_soft_cap": "soft cap of {} on logits not priced",
    "softcap": "soft cap of {} not priced",
    "num_nextn_predict_layers": "{} multi-token-prediction layers not priced",
    "num_mtp_layers": "{} multi-token-prediction layers not priced",
    "mtp_num_layers": "{} multi-token-prediction layers not priced",
    "mtp_num_hidden_layers": "{} multi-token-prediction layers not priced",
    "num_medusa_heads": "{} Medusa heads not priced",
    "add_cross_attention": "cross attention not priced",
    "cross_attention_layers": "cross attention not priced",
    "num_kv_shared_layers": "keys and values that {} layers share priced for each of them",
    "clip_qkv": "clipping of queries, keys and values at {} not priced",
    "use_attention_gate": "gate of attention's output not priced, nor its parameters counted",
    "attn_output_gate": "gate of attention's output not priced, nor its parameters counted",
    "quantization_config": "quantised weights priced in the dtype of the plan",
    "compression_config": "compressed weights priced in the dtype of the plan",
    "attention_chunk_size": "attention within chunks of {} tokens not priced: attention is that of all pairs",
    "attention_sinks": "attention sinks not priced",
    "use_double_wide_mlp": "FFNs of twice the size in some layers not priced, nor their parameters counted",
    "attention_k_eq_v": "keys that serve as values priced as both",
    "num_codebooks": "{} codebooks priced as one vocabulary",
}
"""What is said of a key that is on; {} stands for its value."""

REFUSED = {
    "is_encoder_decoder": "only decoder-only models are supported",
    "kv_lora_rank": "latent attention is not supported; give a model without it",
    "q_lora_rank": "latent attention is not supported; give a model without it",
    "use_bidirectional_attention": "an encoder; only causal decoders are supported",
    "hidden_size_per_layer_input": "embeddings in each layer are not supported",
    "per_layer_config": "layers of different sizes are not supported",
    "block_configs": "layers of different sizes are not supported",
    "num_attention_heads_per_layer": "layers of different sizes are not supported",
    "num_layers_per_stack": "stacks of layers that run several times are not supported",
    "depth_decoder_config": "a decoder within the decoder is not supported",
    "type_vocab_size": "an encoder of segments; only causal decoders are supported",
    "image_size": "a model of images; only decoders of text are supported",
    "patch_size": "a model of patches; only decoders of text are supported",
    "num_mel_bins": "a model of audio; only decoders of text are supported",
}
"""Why a model is refused for which a key is on."""
_STATE_SPACE = re.compile(
    r"^mamba_|^ssm_|^linear_num_|^linear_key_|^lru_|^state_size$|^conv_L_cache$|^n_mamba_"
)
_EXPERTS = re.compile(r"^(moe_)?(num|n)_(\w+_)?experts$")
_CAUSAL = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def is_off(value: object) -> bool:
    """Return whether a config's value means that the feature of its key is absent or turned off."""
    return value is None or value is False or value in (0, "", [], {}, "none")


def wrong_types(data: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield an error for each key of a config whose value has a wrong type and would otherwise be ignored.

    Keys are the flags (`FLAGS`: true, false or null) and the windows and maximum positions (a whole number; -1
    means none; lists and tables are let pass).
    """
    for key in FLAGS:
        if not isinstance(data.get(key, False), bool | None):
            yield Problem(key, f"{format_value(data[key])} is not valid; give true or false")
    for key in (*WINDOWS, *MAX_POSITIONS):
        value = data.get(key)
        is_whole = type(value) is int and value >= -1
        if isinstance(value, str | bool | int | float) and value is not False and not is_whole:
            yield Problem(key, f"{format_value(value)} is not valid; give a whole number of tokens")


def refusal(data: Mapping[str, Any], *, is_known: bool) -> str | None:
    """Return why a config is refused, as text that begins with the key at fault; None for a supported decoder.

    Args:
        is_known: whether the config's `model_type` is a family known to be causal, which may have
            `is_decoder = false`, as gpt_neox has.
    """
    for key, value in data.items():
        if _EXPERTS.match(key) and (most := _most(value)) > 1:
            return other_layers(data) or (
                f"{key}: a mixture of {format_value(most)} experts of a family that is not known; give one that is"
            )
    for key, reason in REFUSED.items():
        if not is_off(data.get(key)):
            return f"{key}: {reason}"
    if isinstance(data.get("text_config"), dict) and "hidden_size" not in data:
        return "text_config: a multimodal model; give its text_config as a file of its own"
    if data.get("is_decoder") is False and not is_known:
        return "is_decoder: false; an encoder, and only causal decoders are supported"
    architectures = data.get("architectures")
    if isinstance(architectures, list) and architectures:
        named = [name for name in architectures if isinstance(name, str)]
        if named and not any(name.endswith((*_CAUSAL, "Model")) for name in named):
            return f"architectures: {format_value(named[0])} is no causal language model; give one"
    return other_layers(data)


def _most(value: object) -> float:
    """Return the greatest number of a value, or of a list of one for each layer."""
    values = value if isinstance(value, list) else [value]
    return max((x for x in values if isinstance(x, int | float)), default=0)


def other_layers(data: Mapping[str, Any]) -> str | None:
    """Return why a config is refused for layers without attention; None for a config without such layers."""
    kinds = layer_kinds(data)
    for key, names in kinds.items():
        other = next((name for name in names if name not in KINDS_OF_ATTENTION), None)
        if other is not None:
            return (
                f"{key}: layers of {format_value(other)} are not supported; give a model of attention alone"
            )
    marks = (key for key, value in data.items() if _STATE_SPACE.match(key) and not is_off(value))
    mark = None if kinds else next(marks, None)
    return f"{mark}: state-space layers are not supported; give a model of attention alone" if mark else None


def layer_kinds(data: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return {key: kind of each layer, in order} of a config's lists of layer kinds, such as `layer_types`."""
    lists = {key: data[key] for key in LAYER_KINDS if isinstance(data.get(key), list)}
    return {key: list(map(str, names)) for key, names in lists.items()}


def window_of(data: Mapping[str, Any]) -> int | None:
    """Return the attention window in tokens that a config gives some or all layers; None where it gives none."""
    if data.get("use_sliding_window") is False:
        return None
    kinds = layer_kinds(data)
    if kinds and not any(name in KINDS_OF_WINDOWS for names in kinds.values() for name in names):
        return None
    values = (data.get(key) for key in WINDOWS)
    return next((value for value in values if type(value) is int and 0 < value <= _MOST_TOKENS), None)


def windowed_layers_of(data: Mapping[str, Any]) -> int | None:
    """Return the number of layers that have the window, by the config's list of kinds of layers.

    None where all layers have it, or none, or the config has no such list.
    """
    kinds = next(iter(layer_kinds(data).values()), [])
    windowed = sum(name in KINDS_OF_WINDOWS for name in kinds)
    return windowed if window_of(data) is not None and 0 < windowed < len(kinds) else None


def max_positions_of(data: Mapping[str, Any]) -> int | None:
    """Return the most tokens of a sequence that a model is made for; None where its config does not say."""
    values = (data.get(key) for key in MAX_POSITIONS)
    return next((value for value in values if type(value) is int and 0 < value <= _MOST_TOKENS), None)


_MOST_TOKENS = 2**31


def not_priced(data: Mapping[str, Any], hidden: int, *, is_known: bool, learned: bool) -> Iterator[NotPriced]:
    """Yield a note for each property of a config that predictions leave out.

    An unknown family has a note too, and so have all keys together that are not understood.

    Args:
        data: the content of a `config.json`.
        hidden: the hidden size, with which widths of embeddings are compared.
        is_known: whether the config's `model_type` is one that this library knows.
        learned: whether position embeddings are learned.
    """
    positions = max_positions_of(data)
    if positions is not None:
        yield positions_not_priced(positions, learned=learned)
    for key, text in SAID.items():
        if not is_off(data.get(key)):
            yield NotPriced(text.format(format_value(data[key])))
    for key in WIDTHS:
        if not is_off(data.get(key)) and data[key] != hidden:
            yield NotPriced(
                f"embeddings of width {format_value(data[key])} priced as of the hidden size, {hidden}"
            )
    towers = [
        key for key, value in data.items() if key.endswith("_config") and value and isinstance(value, dict)
    ]
    for key in towers:
        if key not in SIZES and key not in SAID and key not in HARMLESS:
            yield NotPriced(f"{printable(key[:60])} not priced: only the decoder of text is")
    if not is_known:
        named = format_value(data.get("model_type", "")) if data.get("model_type") else "missing"
        yield NotPriced(
            f"model_type {named}: not one that is known; priced as a causal decoder of the sizes of its config"
        )
    has_kinds = bool(layer_kinds(data)) or window_of(data) is None
    unknown = sorted(
        key
        for key, value in data.items()
        if not is_off(value) and not _is_understood(key) and not (has_kinds and key in WINDOW_NUMBERS)
    )
    if unknown:
        more = f" and {len(unknown) - 8} more" if len(unknown) > 8 else ""
        keys = ", ".join(printable(key[:60]) for key in unknown[:8])
        yield NotPriced(f"keys of the config that are not understood: {keys}{more}")


def _is_understood(key: str) -> bool:
    known = key in SIZES or key in HARMLESS or key in DEFINING or key in SAID or key in REFUSED
    return (
        known
        or key in WIDTHS
        or key.endswith("_config")
        or bool(_HARMLESS_PATTERN.search(key) or _STATE_SPACE.match(key) or "expert" in key)
    )
