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
    """A norm of the first `features` features of a latent; the `others` after them are left out."""

    others: int = 0

    @property
    def takes(self) -> tuple[Features, ...]:
        """Return the features of its input: all of the latent."""
        return (Features(self.features.dim, self.features.size + self.others),)


@dataclass(frozen=True)
class LatentAttention(Attention):
    """Causal attention of heads whose keys end in a part that all of them share; `width` is `mean_width`.

    It reads queries (own, then shared part, of each head), keys and values (own part, then value, of each head),
    and the latent that ends in the shared part of the keys.

    Attributes:
        own, shared, value: the widths of the two parts of a key, and of a value.
        latent: the features of the latent of keys and values, without the shared part.
    """

    own: int = 0
    shared: int = 0
    value: int = 0
    latent: int = 0

    @property
    def takes(self) -> tuple[Features, ...]:
        """Return the features of its inputs: queries, keys with values, and the latent."""
        of_queries = Features("heads", self.heads, self.own + self.shared)
        of_keys = Features("heads", self.heads, self.own + self.value)
        return of_queries, of_keys, Features("latent", self.latent + self.shared)

    @property
    def makes(self) -> Features:
        """Return the features of its output: the values of all heads."""
        return Features("heads", self.heads, self.value)

    @property
    def kept(self) -> tuple[Kept, ...]:
        """Return what `Attention.kept` has but for "joint": queries and keys are no one tensor here."""
        return tuple(row for row in super().kept if row.kind != "joint")

    @property
    def counts(self) -> Mapping[str, int]:
        """Return the features of a token by which software stacks count memory traffic.

        "heads": those of all values, heads * value. "keys": those of all keys, heads * (own + shared): the
        shared part counts once for each head.
        """
        return {"heads": self.makes.size, "keys": self.heads * (self.own + self.shared)}


def mean_width(own: int, shared: int, value: int) -> int:
    """Return the head width of plain attention with as many FLOPs: the mean of the widths of keys and values."""
    return (own + shared + value) // 2
