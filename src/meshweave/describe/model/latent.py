"""The nodes of latent attention, and products that every rank makes for its own tokens.

Queries, keys and values are products of narrow latents (DeepSeek-AI, DeepSeek-V2, 2024, section 2.1). A head's key
has a part of its own, without positions, and one with rotary positions that all heads share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshweave.describe.model.nodes import Attention, Features, Kept, Linear, Norm


@dataclass(frozen=True)
class LocalLinear(Linear):
    """A product with a weight that every rank has whole; each rank multiplies its own tokens."""

    is_product = False
    weight_kind = "whole"

    @property
    def makes_terms(self) -> bool:
        """Return False, always: its result is no partial sum."""
        return False


@dataclass(frozen=True)
class LatentNorm(Norm):
    """A norm of the first `features` features of a latent; the `others` features after them are not read."""

    others: int = 0

    @property
    def takes(self) -> tuple[Features, ...]:
        """Return the `Features` of its input edge: all of the latent."""
        return (Features(self.features.dim, self.features.size + self.others),)


@dataclass(frozen=True)
class LatentAttention(Attention):
    """Causal attention with latent keys and values (DeepSeek-V2).

    A key of a head is its own part, then the part (with rotary positions) that all heads share. The node reads
    queries (for each head features for the own part, then for the shared part), keys and values (for each head
    the own part of the key, then the value), and the latent, which ends in the shared part. `width` is
    `mean_width(own, shared, value)`.

    Attributes:
        own, shared, value: features of the own and of the shared part of a key, and of a value.
        latent: features of the latent of keys and values, without the shared part.
    """

    own: int = 0
    shared: int = 0
    value: int = 0
    latent: int = 0

    @property
    def takes(self) -> tuple[Features, ...]:
        """Return the `Features` of its input edges: queries, keys with values, and the latent."""
        of_queries = Features("heads", self.heads, self.own + self.shared)
        of_keys = Features("heads", self.heads, self.own + self.value)
        return of_queries, of_keys, Features("latent", self.latent + self.shared)

    @property
    def makes(self) -> Features:
        """Return the `Features` of its output edge: the values of all heads."""
        return Features("heads", self.heads, self.value)

    @property
    def kept(self) -> tuple[Kept, ...]:
        """Return the rows of `Attention.kept` except "joint": queries and keys are not one tensor here."""
        return tuple(row for row in super().kept if row.kind != "joint")

    @property
    def counts(self) -> Mapping[str, int]:
        """Return {"heads": features of all values of a token, "keys": features of all its keys}.

        That is {"heads": heads * value, "keys": heads * (own + shared)}: the shared part of a key counts once for
        each head. See `LayerNode.counts`.
        """
        return {"heads": self.makes.size, "keys": self.heads * (self.own + self.shared)}


def mean_width(own: int, shared: int, value: int) -> int:
    """Return the head width of plain attention with as many FLOPs: (own + shared + value) // 2.

    It is the mean of the widths of a key, own + shared, and of a value.
    """
    return (own + shared + value) // 2
