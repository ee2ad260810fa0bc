"""Norms of queries and keys, and attention with learned sinks."""

from __future__ import annotations

from dataclasses import dataclass

from meshweave.describe.model.nodes import Attention, Features, LayerNode, NodeWeight


@dataclass(frozen=True)
class HeadNorm(LayerNode):
    """Root-mean-square norms of each head of queries and of keys, as in Qwen3 and Gemma 3; values pass unchanged.

    `groups`, `per_group` and `width` are those of `nodes.Attention`. `gain` names the gains, (2, width).
    """

    groups: int
    per_group: int
    width: int
    gain: str = "GH"

    labels = ("gain",)

    @property
    def makes(self) -> Features:
        """Return the `Features` of its output edge: queries, keys and values."""
        return Features("heads", self.groups, (self.per_group + 2) * self.width)

    @property
    def parameters(self) -> tuple[NodeWeight, ...]:
        """Return the gains of queries and of keys, (2, width)."""
        modules = tuple((f"self_attn.{name}_norm", self.width) for name in ("q", "k"))
        return (NodeWeight(self.gain, (Features("", 2), Features("", self.width)), "norm", modules),)


@dataclass(frozen=True)
class JointNorm(HeadNorm):
    """Root-mean-square norms of all queries of a token and of all its keys, as in OLMoE; values pass unchanged."""

    @property
    def parameters(self) -> tuple[NodeWeight, ...]:
        """Return the gains of all features of queries, then of keys, as one tensor of one dim."""
        sizes = self.groups * self.per_group * self.width, self.groups * self.width
        modules = tuple((f"self_attn.{name}_norm", size) for name, size in zip("qk", sizes, strict=True))
        return (NodeWeight(self.gain, (Features("", sum(sizes)),), "norm", modules),)


@dataclass(frozen=True)
class SinkAttention(Attention):
    """Attention with sinks, as in GPT-OSS: the softmax of each head has one more, learned score."""

    @property
    def parameters(self) -> tuple[NodeWeight, ...]:
        """Return SINK (heads,), the learned scores: one for each head of queries."""
        return (NodeWeight("SINK", (Features("", self.heads),), "bias", (("self_attn.sinks", self.heads),)),)
