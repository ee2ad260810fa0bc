"""Small models of transformers, in double precision throughout, and their logits."""

from __future__ import annotations

from typing import Any

from plain_models import WORDS, PlainGpt, PlainLlama
from small_models import KeepDoubles
from torch import Tensor, nn

SIZES = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 24}
HEADS = {**SIZES, "num_key_value_heads": 4, "intermediate_size": 32, "max_position_embeddings": 32}


def make(kind: str, **options: Any) -> nn.Module:
    """Return a model with random weights: one of the classes of transformers below, or a plain one."""
    if kind.startswith("plain"):
        return _random({"plain gpt": PlainGpt, "plain llama": PlainLlama}[kind](**options))
    import transformers

    if kind == "gpt2":
        sizes = {"n_embd": 16, "n_head": 4, "n_layer": 2, "n_positions": 32, "vocab_size": 24}
        no = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config: Any = transformers.GPT2Config(**{**sizes, **no, **options})
        model: nn.Module = transformers.GPT2LMHeadModel(config)
    else:
        prefix = {"llama": "Llama", "qwen2": "Qwen2", "mistral": "Mistral", "seed_oss": "SeedOss"}[kind]
        own = {
            "mistral": {"sliding_window": 5},
            "seed_oss": {"head_dim": 4, "attention_dropout": 0.0, "residual_dropout": 0.0},
        }.get(kind, {})
        sizes = {**HEADS, **own, **options}
        config = getattr(transformers, f"{prefix}Config")(**sizes)
        model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    return _random(model)


def _random(model: nn.Module) -> nn.Module:
    """Return a model in double precision with random weights, gains around one."""
    model = model.double()
    for name, parameter in model.named_parameters():
        is_gain = name.endswith("weight") and parameter.ndim == 1
        nn.init.normal_(parameter, mean=float(is_gain), std=0.3)
    return model.train()


def words(model: Any) -> int:
    """Return the size of the vocabulary."""
    return WORDS if isinstance(model, PlainGpt | PlainLlama) else int(model.config.vocab_size)


def logits(model: Any, tokens: Tensor) -> Tensor:
    """Return the logits of the model's own forward pass."""
    is_plain = isinstance(model, PlainGpt | PlainLlama)
    with KeepDoubles():
        out: Tensor = model(tokens) if is_plain else model(input_ids=tokens, use_cache=False).logits
    return out
