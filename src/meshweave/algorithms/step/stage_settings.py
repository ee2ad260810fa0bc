"""What the stages of a step share: how buckets are kept, and which collectives overlap with the layers."""

from __future__ import annotations

from dataclasses import dataclass

from meshweave.algorithms.step.memory import ADAM_STEP_BYTES
from meshweave.algorithms.step.units import Unit
from meshweave.describe.layout.mesh import Mesh


@dataclass(frozen=True)
class StageSettings:
    """How the stages of a step keep, gather and reduce buckets (a layer's weights or gradients as a vector).

    Attributes:
        dtype, gradient_dtype: of weights and activations, and of buckets of gradients.
        groups: the names of the axes of replicas on the mesh of replicas; those that ZeRO shards over come first.
        num_sharding: over how many of the groups ZeRO shards.
        zero: the ZeRO level, as `Parallelism.zero`.
        regathers: whether weights are gathered for each forward part although they are kept whole until the
            backward one (ZeRO-2).
        overlap: the share (0 to 1) of each reduction and gather that overlaps with the layers.
        waits_for_gathers: whether gathers overlap with nothing, whatever `overlap` says.
        waits_for_tensor: whether nothing overlaps with the collectives of a layer.
        update_bytes: bytes that the optimizer reads and writes per weight that it updates.
    """

    dtype: str
    gradient_dtype: str
    groups: tuple[str, ...]
    num_sharding: int = 0
    zero: int = 0
    regathers: bool = False
    overlap: float = 1.0
    waits_for_gathers: bool = False
    waits_for_tensor: bool = False
    update_bytes: int = ADAM_STEP_BYTES

    @property
    def is_sharded(self) -> bool:
        """Return whether ZeRO shards at all: over several replicas, and from level 1 on."""
        return self.num_sharding > 0

    @property
    def shards_weights(self) -> bool:
        """Return whether ZeRO-3 shards weights: gathered ones are freed after each part of a layer."""
        return self.is_sharded and self.zero == 3

    @property
    def gathers_beside(self) -> bool:
        """Return whether some share of each gather of weights overlaps with layers."""
        return self.overlap > 0 and not self.waits_for_gathers

    @property
    def gathers_each(self) -> bool:
        """Return whether weights are gathered for each micro-batch, not once per step."""
        return self.shards_weights or (self.is_sharded and self.zero == 2 and self.regathers)

    @property
    def reduces_each(self) -> bool:
        """Return whether gradients are reduced for each micro-batch, not once per step."""
        return self.zero >= 2 and bool(self.groups)


@dataclass(frozen=True)
class BucketRanks:
    """Where a stage's buckets lie: those of experts, or those of all other weights.

    Attributes:
        mesh: the ranks of a stage, with an axis for each group of replicas, and others.
        own: the axes along which ranks have different buckets, such as "tensor".
        settings: how the buckets are sharded, gathered and reduced.
    """

    mesh: Mesh
    own: tuple[str, ...]
    settings: StageSettings

    @property
    def split(self) -> tuple[str, ...]:
        """Return the mesh axes that shard the tensor of a bucket: `own`, and the groups that ZeRO shards over."""
        return (*self.own, *self.settings.groups[: self.settings.num_sharding])


Run = tuple[int, int]
"""(start, stop) of a range of elements of a bucket."""


def runs_of(unit: Unit, settings: StageSettings) -> tuple[Run | None, Run | None]:
    """Return two ranges of a bucket's elements: (those whose collectives overlap with layers, all others).

    Each is (start, stop), or None if it is empty.
    """
    cut = round(settings.overlap * unit.elements / unit.shards) * unit.shards
    return (0, cut) if cut else None, (cut, unit.elements) if cut < unit.elements else None
