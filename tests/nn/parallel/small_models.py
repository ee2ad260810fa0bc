"""Small random models of each causal language model that the installed transformers lists, by its config alone."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

HIDDEN, HEADS, LAYERS, WORDS, POSITIONS, MOST_PARAMETERS = 32, 4, 2, 48, 64, 4_000_000
_WIDTHS = (
    "hidden_size d_model n_embd embedding_size emb_dim dim_model word_embed_proj_dim lru_width "
    "input_embedding_size output_embedding_size ple_embed_dim backbone_hidden_size attention_hidden_size "
    "encoder_hidden_size embedding_dim"
)
_INNER = (
    "intermediate_size n_inner d_ff ffn_dim ffn_hidden_size dff d_inner decoder_ffn_dim encoder_ffn_dim dim_ff "
    "feed_forward_size intermediate_size_mlp dense_intermediate_size moe_intermediate_size expert_ffn_hidden_size "
    "shared_expert_intermediate_size shared_intermediate_size moe_shared_expert_intermediate_size "
    "shared_experts_intermediate_size mamba_d_ssm"
)
_HEADS = (
    "num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads decoder_attention_heads "
    "num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads index_n_heads mamba_n_heads "
    "mamba_num_heads linear_num_key_heads linear_num_value_heads linear_num_heads num_query_groups n_mamba_heads"
)
_KEY_HEADS = "num_key_value_heads num_kv_heads n_kv_heads swa_num_key_value_heads"
_LAYERS = (
    "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_encoder_layers "
    "num_decoder_layers num_blocks"
)
_HEAD_WIDTHS = (
    "head_dim attention_head_dim d_kv v_head_dim qk_nope_head_dim qk_rope_head_dim rotary_dim swa_head_dim d_head "
    "global_head_dim dim_head kv_channels attention_head_size linear_key_head_dim linear_value_head_dim "
    "linear_head_dim mamba_d_head mamba_head_dim mamba_headdim index_head_dim state_size ssm_state_size "
    "mamba_d_state mamba_d_head d_rel rel_extent head_size query_pre_attn_scalar"
)
_EXPERTS = "num_experts num_local_experts n_routed_experts moe_num_experts num_experts_per_layer"
_CHOSEN = "num_experts_per_tok num_experts_per_token moe_k top_k moe_topk index_topk index_topk_blocks"
_GROUPS = "n_groups mamba_n_groups n_group topk_group num_groups mamba_ngroups"
_WINDOWS = (
    "sliding_window sliding_window_size window_size attention_window_size local_attention keep_window_size "
    "local_attention_window_len attention_chunk_size"
)
_LENGTHS = (
    "max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length model_max_length context_length "
    "original_max_position_embeddings"
)
_WORDS = (
    "vocab_size vocab_size_per_layer_input decoder_vocab_size unpadded_vocab_size pronunciation_vocab_size"
)
_RANKS = "q_lora_rank kv_lora_rank o_lora_rank time_step_rank mamba_dt_rank laurel_rank adapter_rank"
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "sep_token_id")
_SIZES = (
    (_WIDTHS, HIDDEN),
    (_INNER, 64),
    (_HEADS, HEADS),
    (_KEY_HEADS, HEADS),
    (_LAYERS, LAYERS),
    (_HEAD_WIDTHS, 8),
    (_EXPERTS, 4),
    (_CHOSEN, 2),
    (_GROUPS, 1),
    (_WINDOWS, 6),
    (_LENGTHS, POSITIONS),
    (_WORDS, WORDS),
    (_RANKS, 16),
    ("hidden_size_per_layer_input pronunciation_embed_dim shape_embed_dim shape_vocab_size chunk_size", 8),
    ("mamba_chunk_size block_size image_size encoder_hash_byte_group_vocab ngram_vocab_size_base", 32),
    ("expand mamba_expand", 2),
    ("num_memory_blocks n_shared_experts num_nextn_predict_layers", 1),
    ("first_k_dense_replace moe_layer_start_index moe_layer_end_index max_window_layers", 1),
)
SIZES = {name: size for listed, size in _SIZES for name in listed.split()}
"""Fields of configs that are made small wherever a config has them."""


class KeepDoubles(TorchFunctionMode):
    """Leaves doubles as they are where a model narrows what it computes to single precision by name."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, without its narrowing."""
        kwargs = dict(kwargs or {})
        first = args[0] if args else None
        if func is Tensor.float:  # of whole numbers, too: positions are multiplied by frequencies
            return Tensor.double(first)
        if isinstance(first, Tensor) and first.dtype == torch.float64:
            if func in (Tensor.to, Tensor.type):
                args = tuple(torch.float64 if each is torch.float32 else each for each in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def names() -> list[str]:
    """Return the types of models that the installed transformers lists as causal language models."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def classes(kind: str) -> tuple[Any, type[nn.Module]]:
    """Return the classes of config and model of a type of models."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config = CONFIG_MAPPING[kind]
    return config, MODEL_FOR_CAUSAL_LM_MAPPING[config]


def small(fields: Mapping[str, Any], kept: frozenset[str], fills: bool = False) -> dict[str, Any]:
    """Return what makes the model of a config of these fields small; `kept` ones stay, None where it fills."""
    out: dict[str, Any] = {}
    if "do_sample" in fields:  # configs of transformers 4 have the fields of generation, by the same names
        kept |= {"top_k", "num_beam_groups"}
    for name, value in fields.items():
        if value is None and fills and name in SIZES and name not in kept:
            out[name] = SIZES[name]
        if name in kept or name == "rope_parameters":
            continue
        if isinstance(value, dict) and (name.endswith("_config") or name in ("encoder", "decoder")):
            out[name] = {**value, **small(value, kept, fills)}
            out[name].pop("transformers_version", None)
        elif "dropout" in name or name.endswith(("_drop", "pdrop")):
            out[name] = 0.0 if isinstance(value, float) else value
        elif name in SIZES and isinstance(value, int) and not isinstance(value, bool):
            out[name] = min(SIZES[name], value) if value > 0 else value
        elif isinstance(value, list | tuple) and len(value) > LAYERS and not name.endswith("_ids"):
            out[name] = _spread(value)
        elif name in _TOKENS and isinstance(value, int):
            out[name] = 0
    return out


def _spread(values: Any) -> list[Any]:
    """Return as many values as there are layers: the first of each kind there is, in order."""
    kinds = [value for at, value in enumerate(values) if value not in values[:at]]
    return (kinds + list(values))[:LAYERS]


def make_model(kind: str, changes: Mapping[str, Any] | None = None, seed: int = 0) -> nn.Module:
    """Return a small model in double precision with random weights.

    Raises whatever its class does where no small config is found.
    """
    config_class, model_class = classes(kind)
    error: Exception | None = None
    fields = config_class().to_dict()
    for kept, fills in _attempts(fields):
        given = {
            **small(fields, frozenset(kept), fills),
            "experts_implementation": "eager",
            **(changes or {}),
        }
        try:
            with torch.device("meta"):
                size = sum(p.numel() for p in model_class._from_config(config_class(**given)).parameters())
            if size > MOST_PARAMETERS:
                raise ValueError(f"{size} parameters")
            torch.manual_seed(seed)
            model = randomise(model_class._from_config(config_class(**given)), seed)
            loss_of(model, *batch(seed))
        except Exception as found:
            error = error or found
            continue
        return model
    assert error is not None
    raise error


def _attempts(fields: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], bool]]:
    """Yield fields that keep their values, and whether None is replaced: none of them, then one by one."""
    yield (), False
    yield (), True
    for name in small(fields, frozenset()):
        yield (name,), False


def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Return a model in double precision whose parameters are all random, gains around one."""
    model = model.double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            gain = float(name.endswith("weight") and parameter.ndim == 1)
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + gain)
    return model.train()


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return tokens and targets."""
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = (torch.randint(0, WORDS, (4, 16), generator=generator) for _ in range(2))
    return tokens, targets


def loss_of(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of a model of transformers."""
    with KeepDoubles():
        out = model(input_ids=tokens, use_cache=False)
        logits: Tensor = out.logits if hasattr(out, "logits") else out[0]
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def odd_configs(kind: str) -> Iterator[dict[str, Any]]:
    """Yield changes of a config: each field that is a truth value or a share, by another value."""
    fields = small(classes(kind)[0]().to_dict(), frozenset())
    for name, value in {**classes(kind)[0]().to_dict(), **fields}.items():
        if isinstance(value, bool) and name not in _OF_OUTPUTS:
            yield {name: not value}
        elif isinstance(value, float) and "drop" not in name:
            yield {name: round(value * 1.7 + 0.1, 3)}
    yield {"num_key_value_heads": 2}
    yield {"pad_token_id": 3}


_OF_OUTPUTS = ("return_dict", "output_hidden_states", "output_attentions", "is_encoder_decoder", "use_cache")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence what transformers says of small configs."""
    logging.disable(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)
