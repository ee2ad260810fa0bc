"""Attention of the heads and tokens that a rank has: causal, grouped, with a window, or in a ring of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from meshweave.algorithms.block.roles import Side
from meshweave.base.errors import UnsupportedError
from meshweave.nn.custom_ops import number_of
from meshweave.nn.parallel.dropout import ShardDropout
from meshweave.nn.parallel.ring import PlacedRing, ring_attention
from meshweave.nn.parallel.strategy import LayerStrategy


@dataclass(frozen=True)
class Heads:
    """The heads of attention in a layer.

    Attributes:
        queries: the number of query heads, over all ranks.
        keys: the number of heads of keys and values, over all ranks.
        width: features of a head.
        scale: what scores are multiplied by before the softmax.
        window: how many keys a query attends to, its own among them; None for all up to its own.
        dropout: the probability with which attention weights are dropped.
    """

    queries: int
    keys: int
    width: int
    scale: float
    window: int | None = None
    dropout: float = 0.0


class AttentionCore:
    """Causal softmax attention of this rank's queries, keys and values, from the projections to their output.

    The strategy splits attention over ranks by batch, by heads, or by sequence in a ring of ranks. Raises
    UnsupportedError for a ring where attention weights are dropped.
    """

    def __init__(self, heads: Heads, strategy: LayerStrategy) -> None:
        self.heads, self.strategy = heads, strategy
        self.dims = strategy.roles.core(True)
        self.dropout = ShardDropout(heads.dropout, strategy, self.dims)
        self.ring = -1
        if strategy.roles.ring_axis is not None:
            if heads.dropout:
                raise UnsupportedError(
                    f"attention in a ring has no dropout, and this model's is {heads.dropout:g}: set it to 0"
                )
            self.ring = number_of(
                PlacedRing(strategy, heads.keys, heads.queries // heads.keys, heads.width, heads.window)
            )

    def positions(self, sequence: int) -> tuple[int, int]:
        """Return (first, end): this rank's queries are those of positions `first` to `end` - 1.

        `sequence` is the global number of tokens of a sequence.
        """
        return self.strategy.span(Side("sequence", sequence), self.dims)

    def __call__(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        batch: int,
        sequence: int,
        training: bool,
    ) -> Tensor:
        """Return the attention (batch, sequence, features) of this rank's heads. Collective in a ring.

        Args:
            queries, keys, values: (batch, sequence, features) of the heads of this rank.
            rotary: cosines and sines (1, sequence, head width) of this rank's positions; None for no rotation.
            batch, sequence: global sizes: the number of sequences, and the tokens of each.
            training: whether attention weights are dropped.
        """
        own = self.heads
        q, k, v = (x.unflatten(-1, (x.shape[-1] // own.width, own.width)) for x in (queries, keys, values))
        if rotary is not None:
            cos, sin = (x.unsqueeze(2) for x in rotary)
            q, k = turned(q, cos, sin), turned(k, cos, sin)
        if self.ring >= 0:
            return self._in_ring(q, k, v, batch, sequence)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        mask = (
            None
            if own.window is None or own.window >= sequence
            else window_mask(sequence, own.window, q.device)
        )
        if training and own.dropout:
            out = self._with_dropout(q, k, v, mask)
        else:
            out = nn.functional.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                is_causal=mask is None,
                scale=own.scale,
                enable_gqa=own.queries != own.keys,
            )
        return out.transpose(1, 2).flatten(2)

    def _in_ring(self, q: Tensor, k: Tensor, v: Tensor, batch: int, sequence: int) -> Tensor:
        """Return attention whose keys and values go round; in groups of heads."""
        own = self.heads
        q = q * (own.scale * own.width**0.5)  # a ring divides scores by the root of the width
        groups = q.unflatten(2, (k.shape[2], own.queries // own.keys)).flatten(3)
        fused = torch.cat((groups, k.to(groups.dtype), v.to(groups.dtype)), -1).flatten(2)
        out: Tensor = ring_attention(fused, self.ring, batch, sequence)[0]
        return out

    def _with_dropout(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        own = self.heads
        group = own.queries // own.keys
        k, v = (x.repeat_interleave(group, 1) if group > 1 else x for x in (k, v))
        scores = q @ k.transpose(-1, -2) * own.scale
        seen = window_mask(q.shape[2], q.shape[2], q.device) if mask is None else mask
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return self.dropout(weights, True).to(v.dtype) @ v


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x (batch, sequence, heads, width) rotated by position (RoPE); feature i pairs with i + width / 2.

    `cos` and `sin`, each (1, sequence, 1, width), are the cosines and sines of this rank's positions.
    """
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


@lru_cache(64)
def window_mask(sequence: int, window: int, device: torch.device) -> Tensor:
    """Return (sequence, sequence) booleans, true where a query (row) attends to a key (column).

    A query attends to its own position and the `window` - 1 positions before it.
    """
    at = torch.arange(sequence, device=device)
    distance = at[:, None] - at[None, :]
    return (distance >= 0) & (distance < window)
