"""Dense decoder-only transformers, as far as their matrix products go."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from meshweave.base.errors import DescriptionError, UnsupportedError
from meshweave.describe.catalog import catalog_text, model_names
from meshweave.describe.files import (
    Count,
    FileModel,
    Name,
    check,
    fail,
    is_path,
    load,
    parse,
    printable,
    shown,
)


@dataclass(frozen=True)
class FcLayer:
    """A fully connected layer: Y (tokens, out_features) = X (tokens, in_features) W."""

    name: str
    in_features: int
    out_features: int


@dataclass(frozen=True)
class Transformer:
    """Sizes of a dense decoder-only transformer.

    `vocab_size` is None where the source does not state it. Raises DescriptionError.
    """

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden: int
    vocab_size: int | None
    gated_ffn: bool
    source: str
    tied_embeddings: bool = True

    def __post_init__(self) -> None:
        sizes = {
            "num_layers": self.num_layers,
            "hidden": self.hidden,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "ffn_hidden": self.ffn_hidden,
            "vocab_size": 1 if self.vocab_size is None else self.vocab_size,
        }
        for key, size in sizes.items():
            if size < 1:
                raise DescriptionError(f"model {self.name}: {key} is {size}; give at least 1")
        if self.num_heads % self.num_kv_heads:
            raise DescriptionError(
                f"model {self.name}: num_kv_heads {self.num_kv_heads} does not divide "
                f"num_heads {self.num_heads}; give a divisor"
            )

    def fc_layers(self) -> tuple[FcLayer, ...]:
        """The four fully connected layers of one block; a gated FFN's two input matrices are one layer."""
        heads = self.num_heads * self.head_dim
        return (
            FcLayer("qkv", self.hidden, heads + 2 * self.num_kv_heads * self.head_dim),
            FcLayer("out", heads, self.hidden),
            FcLayer("ff1", self.hidden, self.ffn_hidden * (2 if self.gated_ffn else 1)),
            FcLayer("ff2", self.ffn_hidden, self.hidden),
        )

    @property
    def num_parameters(self) -> int:
        """Weights of the fully connected layers and of the token embeddings, where the vocabulary is known.

        Biases, norms and position embeddings (well under 1 %) are left out.
        """
        block = sum(layer.in_features * layer.out_features for layer in self.fc_layers())
        tables = (self.vocab_size or 0) * self.hidden * (1 if self.tied_embeddings else 2)
        return self.num_layers * block + tables


class _ModelFile(FileModel):
    name: Name = Field(description="the model's name, a string of printable characters")
    source: str = Field(description="where the sizes are from, a string", min_length=1)
    note: str = Field("", description="what to know before use, a string")
    num_layers: Count = Field(description="the number of blocks, a whole number of at least 1")
    hidden: Count = Field(description="the hidden size, a whole number of at least 1")
    num_heads: Count = Field(description="the number of attention heads, a whole number of at least 1")
    num_kv_heads: Count | None = Field(
        None, description="the number of key and value heads (left out: num_heads), at least 1"
    )
    head_dim: Count | None = Field(
        None, description="the size of one head (left out: hidden / num_heads), at least 1"
    )
    ffn_hidden: Count = Field(description="the inner size of the FFN, a whole number of at least 1")
    vocab_size: Count | None = Field(None, description="the number of tokens (left out: unknown), at least 1")
    gated_ffn: bool = Field(description="true for a gated FFN (SwiGLU and kin), else false")
    tied_embeddings: bool = Field(True, description="true where input and output share one embedding")


def _head_dim(hidden: int, num_heads: int, file: str | Path) -> int:
    if hidden % num_heads:
        fail(file, "head_dim", f"missing, and {num_heads} heads do not divide hidden {hidden}; give head_dim")
    return hidden // num_heads


def _model(data: dict[str, Any], file: str | Path) -> Transformer:
    m = check(_ModelFile, data, file)
    if m.num_heads % (m.num_kv_heads or 1):
        fail(
            file, "num_kv_heads", f"{m.num_kv_heads} does not divide the {m.num_heads} heads; give a divisor"
        )
    return Transformer(
        m.name,
        m.num_layers,
        m.hidden,
        m.num_heads,
        m.num_kv_heads or m.num_heads,
        m.head_dim or _head_dim(m.hidden, m.num_heads, file),
        m.ffn_hidden,
        m.vocab_size,
        m.gated_ffn,
        m.source,
        m.tied_embeddings,
    )


# Hugging Face `model_type`s whose FFN is gated whatever the activation, and ones whose FFN is plain.
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
_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def _unsupported(file: str | Path, message: str) -> UnsupportedError:
    return UnsupportedError(f"{printable(file)}: {message}")


def _count(data: dict[str, Any], file: str | Path, *keys: str) -> int | None:
    """The value of the first of `keys` that the config has and that is not null."""
    for key in keys:
        value = data.get(key)
        if value is None:
            continue
        whole = int(value) if isinstance(value, float) and value.is_integer() else value
        if isinstance(whole, bool) or not isinstance(whole, int) or not 1 <= whole <= 2**31:
            fail(file, key, f"{shown(value)} is not valid; give a whole number from 1 to {2**31}")
        return whole
    return None


def _need(data: dict[str, Any], file: str | Path, what: str, *keys: str) -> int:
    value = _count(data, file, *keys)
    if value is None:
        fail(file, keys[0], f"missing; give {what} as {' or '.join(keys)}")
    return value


def _refuse_other_architectures(data: dict[str, Any], file: str | Path) -> None:
    for key in _EXPERT_KEYS:
        experts = data.get(key)
        if isinstance(experts, list):  # some families give one number per layer
            experts = max((e for e in experts if isinstance(e, int | float)), default=0)
        if isinstance(experts, int | float) and experts > 1:
            raise _unsupported(
                file, f"{key}: a mixture of {shown(experts)} experts is not supported; give a dense model"
            )
    if data.get("is_encoder_decoder") is True:
        raise _unsupported(file, "is_encoder_decoder: only decoder-only models are supported")
    if data.get("kv_lora_rank") is not None:
        raise _unsupported(file, "kv_lora_rank: latent attention is not supported; give a model without it")
    if isinstance(data.get("text_config"), dict) and "hidden_size" not in data:
        raise _unsupported(file, "text_config: a multimodal model; give its text_config as a file of its own")


def _hugging_face(data: dict[str, Any], file: str | Path) -> Transformer:
    """A Hugging Face `config.json`; keys that say nothing about sizes are ignored."""
    _refuse_other_architectures(data, file)
    model_type = data.get("model_type")
    model_type = model_type if isinstance(model_type, str) else ""
    layers = _need(
        data, file, "the number of blocks", "num_hidden_layers", "n_layer", "n_layers", "num_layers"
    )
    hidden = _need(data, file, "the hidden size", "hidden_size", "n_embd", "d_model")
    heads = _need(data, file, "the number of heads", "num_attention_heads", "n_head", "n_heads")
    kv_heads = _count(data, file, "num_key_value_heads", "num_kv_heads")
    if data.get("multi_query") is True and not data.get("new_decoder_architecture"):
        kv_heads = 1
    ffn = _count(data, file, "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
    if ffn is None:
        if model_type not in _PLAIN and "n_embd" not in data:
            fail(file, "intermediate_size", "missing; give the inner size of the FFN")
        ffn = 4 * hidden
    kv_heads = heads if kv_heads is None else kv_heads
    if heads % kv_heads:
        fail(file, "num_key_value_heads", f"{kv_heads} does not divide the {heads} heads; give a divisor")
    activation = next(
        (data[key] for key in ("hidden_act", "hidden_activation", "activation_function") if key in data), None
    )
    gated = model_type in _GATED or (model_type not in _PLAIN and activation in _GATED_ACTIVATIONS)
    tied = data.get("tie_word_embeddings")
    name = data.get("_name_or_path")
    return Transformer(
        printable(name if isinstance(name, str) and name else model_type or "model"),
        layers,
        hidden,
        heads,
        kv_heads,
        _count(data, file, "head_dim") or _head_dim(hidden, heads, file),
        ffn,
        _count(data, file, "vocab_size"),
        gated,
        printable(file),
        tied if isinstance(tied, bool) else model_type in _TIED,
    )


def load_model(name_or_path: str | Path) -> Transformer:
    """The model of a catalog name, of a TOML file, or of a Hugging Face `config.json` (or its directory).

    Raises DescriptionError, and UnsupportedError for a model that is understood and not dense decoder-only.
    """
    given = str(name_or_path)
    if not isinstance(name_or_path, Path) and (given in model_names() or not is_path(given)):
        return _model(parse(catalog_text("models", given), f"{given}.toml", "toml"), f"{given}.toml")
    if os.path.isdir(given):  # noqa: PTH112  (unlike Path.is_dir, never raises)
        given = str(Path(given) / "config.json")
    data = load(given)
    return _hugging_face(data, given) if given.lower().endswith(".json") else _model(data, given)
