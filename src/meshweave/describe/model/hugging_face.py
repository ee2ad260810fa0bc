"""Transformers from a Hugging Face `config.json`, whose families name the same sizes differently.

The names are those of the `configuration_*.py` of each family in Hugging Face's transformers. A key that says
nothing about sizes is ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshweave.base.errors import UnsupportedError, printable
from meshweave.describe.files import Problem, fail_with_all, format_value
from meshweave.describe.model.transformer import Transformer

MAX_SIZE = 2**31

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HIDDEN = ("hidden_size", "n_embd", "n_embed", "d_model")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_FFN = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
_ACTIVATION = ("hidden_act", "hidden_activation", "activation_function")

# `model_type`s whose FFN is gated whatever the activation, and ones whose FFN is plain.
_GATED = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "olmo", "olmo2"),
    *("granite", "cohere", "stablelm", "internlm2", "baichuan", "glm"),
)
_PLAIN = (
    *("gpt2", "gptj", "gpt_neo", "gpt_neox", "gpt_bigcode", "opt", "bloom", "falcon", "phi", "starcoder2"),
    *("codegen", "mpt", "xglm"),
)
_GATED_ACTIVATIONS = ("silu", "swish", "swiglu", "geglu", "reglu")
_TIED = ("gpt2", "gpt_neo", "gpt_bigcode", "opt", "bloom", "falcon", "mpt", "gemma", "gemma2", "cohere")
_MULTI_QUERY = ("gpt_bigcode", "falcon")
"""Families whose `multi_query` is true where the config leaves it out."""
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def transformer_from_config(data: dict[str, Any], file: str | Path) -> Transformer:
    """Return the model of a Hugging Face config.

    Raises:
        DescriptionError: sizes are missing or wrong; the error lists all of them.
        UnsupportedError: the model is not a dense decoder-only transformer.
    """
    _refuse_other_architectures(data, file)
    config = _ConfigReader(data)
    layers = config.required(_LAYERS, "the number of blocks")
    hidden = config.required(_HIDDEN, "the hidden size")
    heads = config.required(_HEADS, "the number of heads")
    kv_heads, head_dim = config.kv_heads(), config.optional("head_dim")
    ffn, vocab_size = config.ffn_hidden(hidden), config.optional("vocab_size")
    if not config.problems:
        config.problems += head_problems(hidden, heads, kv_heads, head_dim, "num_key_value_heads")
    if config.problems:
        fail_with_all(file, config.problems)
    tied, name = data.get("tie_word_embeddings"), data.get("_name_or_path")
    return Transformer(
        printable(name if isinstance(name, str) and name else config.model_type or "model"),
        layers,
        hidden,
        heads,
        kv_heads or heads,
        head_dim or hidden // heads,
        ffn,
        vocab_size,
        config.has_gated_ffn,
        printable(file),
        tied if isinstance(tied, bool) else config.model_type in _TIED,
    )


def head_problems(
    hidden: int, num_heads: int, num_kv_heads: int | None, head_dim: int | None, kv_key: str
) -> Iterator[Problem]:
    """Yield what is wrong with the heads of a model: each group and each head has a whole size."""
    if num_heads % (num_kv_heads or num_heads):
        yield Problem(kv_key, f"{num_kv_heads} does not divide the {num_heads} heads; give a divisor")
    if head_dim is None and hidden % num_heads:
        yield Problem(
            "head_dim", f"missing, and {num_heads} heads do not divide hidden {hidden}; give head_dim"
        )


class _ConfigReader:
    """A config whose sizes are read one by one, and the problems that this has shown so far."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data
        self.problems: list[Problem] = []
        model_type = data.get("model_type")
        self.model_type = model_type if isinstance(model_type, str) else ""

    def optional(self, *keys: str) -> int | None:
        """Return the value of the first of `keys` that the config has and that is not null."""
        for key in keys:
            value = self.data.get(key)
            if value is None:
                continue
            size = int(value) if isinstance(value, float) and value.is_integer() else value
            if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MAX_SIZE:
                message = f"{format_value(value)} is not valid; give a whole number from 1 to {MAX_SIZE}"
                self.problems.append(Problem(key, message))
                return 1
            return size
        return None

    def required(self, keys: tuple[str, ...], what: str) -> int:
        """Return the value of the first of `keys` that the config has, or note that `what` is missing."""
        size = self.optional(*keys)
        if size is None:
            self.problems.append(Problem(keys[0], f"missing; give {what} as {' or '.join(keys)}"))
            return 1
        return size

    def kv_heads(self) -> int | None:
        """Return the number of key and value heads, None if there are as many as query heads."""
        attention = self.data.get("attn_config")  # of MPT
        if isinstance(attention, dict):
            if attention.get("attn_type") == "multiquery_attention":
                return 1
            grouped = _ConfigReader({"attn_config.kv_n_heads": attention.get("kv_n_heads")})
            kv_heads = grouped.optional("attn_config.kv_n_heads")
            self.problems += grouped.problems
        else:
            kv_heads = self.optional(*_KV_HEADS)
        is_multi_query = self.data.get("multi_query", self.model_type in _MULTI_QUERY) is True
        return 1 if is_multi_query and not self.data.get("new_decoder_architecture") else kv_heads

    def ffn_hidden(self, hidden: int) -> int:
        """Return the inner size of the FFN; plain families default to four times the hidden size."""
        ffn = self.optional(*_FFN)
        if ffn is not None:
            return ffn
        if self.model_type not in _PLAIN and not {"n_embd", "n_embed"} & self.data.keys():
            self.problems.append(Problem(_FFN[0], "missing; give the inner size of the FFN"))
        return (self.optional("expansion_ratio") or 4) * hidden

    @property
    def has_gated_ffn(self) -> bool:
        """Whether the FFN is gated, by the family or else by the activation."""
        activation = next((self.data[key] for key in _ACTIVATION if key in self.data), None)
        return self.model_type in _GATED or (
            self.model_type not in _PLAIN and activation in _GATED_ACTIVATIONS
        )


def _refuse_other_architectures(data: dict[str, Any], file: str | Path) -> None:
    """Raise UnsupportedError for a mixture of experts, an encoder-decoder, latent attention or several modes."""

    def refuse(message: str) -> None:
        raise UnsupportedError(f"{printable(file)}: {message}")

    for key in _EXPERTS:
        experts = data.get(key)
        if isinstance(experts, list):  # some families give one number per layer
            experts = max((e for e in experts if isinstance(e, int | float)), default=0)
        if isinstance(experts, int | float) and experts > 1:
            refuse(
                f"{key}: a mixture of {format_value(experts)} experts is not supported; give a dense model"
            )
    if data.get("is_encoder_decoder") is True:
        refuse("is_encoder_decoder: only decoder-only models are supported")
    if data.get("kv_lora_rank") is not None:
        refuse("kv_lora_rank: latent attention is not supported; give a model without it")
    if isinstance(data.get("text_config"), dict) and "hidden_size" not in data:
        refuse("text_config: a multimodal model; give its text_config as a file of its own")
