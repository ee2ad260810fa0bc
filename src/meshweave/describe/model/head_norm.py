"""Norms of the queries and keys of each head, as in Qwen3 and Gemma 3."""

from __future__ import annotations

from dataclasses import dataclass

from meshweave.describe.model.nodes import Features, LayerNode, NodeWeight


@dataclass(frozen=True)
class HeadNorm(LayerNode):
    """Root-mean-square norms of each head of queries and of keys; values pass. The gains are (2, width)."""

    groups: int
    per_group: int
    width: int
    gain: str = "GH"

    labels = ("gain",)

    @property
    def makes(self) -> Features:
        """Return the features of queries, keys and values."""
        return Features("heads", self.groups, (self.per_group + 2) * self.width)

    @property
    def parameters(self) -> tuple[NodeWeight, ...]:
        """Return the gains of queries and of keys."""
        modules = tuple((f"self_attn.{name}_norm", self.width) for name in ("q", "k"))
        return (NodeWeight(self.gain, (Features("", 2), Features("", self.width)), "norm", modules),)
