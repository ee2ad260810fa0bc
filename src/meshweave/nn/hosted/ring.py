"""Attention whose keys go round in a ring of ranks, as an attention function that models of transformers call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshweave.base.errors import UnsupportedError
from meshweave.nn.custom_ops import number_of
from meshweave.nn.hosted.residual import Tokens
from meshweave.nn.parallel.ring import PlacedRing, ring_attention

NAME = "meshweave_ring"
"""What configurations call it."""
_ARGUMENTS = ("softcap", "s_aux", "position_bias", "sinks", "head_mask")
"""What changes attention and is not computed in a ring."""


def run_in_ring(module: nn.Module, tokens: Tokens, heads: Mapping[str, int]) -> list[int]:
    """Make a model's attention run as ring attention of its strategy; return [0], to which each call adds 1.

    The configurations of its modules then name `NAME` as their attention.

    Args:
        module: the model, changed in place.
        tokens: the tokens of the step that runs.
        heads: {path of a module of attention: its number of query heads, over all ranks}.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, _in_ring)
    AttentionMaskInterface.register(NAME, _no_mask)
    calls = [0]
    for path, count in heads.items():
        for child in module.get_submodule(path).modules():
            vars(child)["_meshweave_ring"] = (tokens, count, calls)
    for child in module.modules():
        config: Any = vars(child).get("config")
        if config is not None and hasattr(config, "_attn_implementation"):
            for each in (config, *(v for v in vars(config).values() if hasattr(v, "_attn_implementation"))):
                each._attn_implementation = NAME
    return calls


def _no_mask(*given: Any, **named: Any) -> None:
    """Return no mask: positions say which keys a query attends to."""


def _in_ring(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **named: Any,
) -> tuple[Tensor, None]:
    """Return attention (batch, sequence, heads, width) of what is (batch, heads, sequence, width)."""
    if "_meshweave_ring" not in vars(module):
        raise UnsupportedError(
            f"{type(module).__name__} is none of the layers' attention: it runs in no ring"
        )
    tokens, heads, calls = vars(module)["_meshweave_ring"]
    for name in _ARGUMENTS:
        if named.get(name) is not None:
            raise UnsupportedError(f"attention in a ring has no {name}")
    if dropout:
        raise UnsupportedError("attention in a ring has no dropout")
    if attention_mask is not None or is_causal is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedError("attention in a ring is causal, and takes no mask")
    own, width = query.shape[1], query.shape[3]
    groups = key.shape[1]
    per_group = own // groups
    if value.shape[3] != width or own % groups:
        raise UnsupportedError("attention in a ring has values as wide as keys")
    calls[0] += 1
    scale = width**-0.5 if scaling is None else float(scaling)
    ring = number_of(PlacedRing(tokens.strategy, heads // per_group, per_group, width, sliding_window))
    q, k, v = (each.transpose(1, 2) for each in (query * (scale * width**0.5), key, value))
    rows = q.unflatten(2, (groups, per_group)).flatten(3)
    fused = torch.cat((rows, k.to(rows.dtype), v.to(rows.dtype)), -1).flatten(2)
    batch, sequence = tokens.sizes
    out: Tensor = ring_attention(fused, ring, batch, sequence)[0]
    return out.unflatten(-1, (own, width)), None
