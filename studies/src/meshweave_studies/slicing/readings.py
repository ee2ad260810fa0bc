"""Readings of Slicing Is All You Need: which replication factors its experiments try.

Section 3 calls every factor valid that divides the number of processes, so that with 12 of 12 processes each holds
all of a matrix. Section 5.2 tries "all valid replication factors" of row block, column block and 2D block. Its
text on MLP-2 speaks of larger tiles and of a happy medium between two extremes, not of matrices that are no longer
cut. Both are readings.

Its cost model, and ours, has products at their peak rate whatever their shape. With `shapes` they come in tiles
of the sizes of libraries' kernels, in whole waves over the units of a device; nothing is fitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshweave.describe.layout.shapes import near_square
from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.machine.kernels import ChipKernels, ProductConstants
from meshweave_studies.published import NamedReading, by_name
from meshweave_studies.slicing.partitionings import BlockKind

ALL_FACTORS = "all-factors"


@dataclass(frozen=True)
class SlicingReading(NamedReading):
    """A choice for what the paper leaves open.

    Attributes:
        cuts_everything: whether only replication factors are tried that leave each copy of a matrix cut, a 2D
            block along both dims.
        by_shape: whether products take whole waves of tiles.
    """

    cuts_everything: bool = False
    by_shape: bool = False

    def machine(self, cluster: Cluster) -> Cluster:
        """Return a machine as the reading has it."""
        return with_waves(cluster) if self.by_shape else cluster

    def allows(self, cuts: Sequence[BlockKind], copies: int, num_ranks: int) -> bool:
        """Return whether matrices with these cuts may have so many copies on so many ranks."""
        if not self.cuts_everything:
            return True
        parts = num_ranks // copies
        return all(min(near_square(parts)) > 1 if cut == "2d" else parts > 1 for cut in cuts)


UNITS = {"H100-SXM5-80GB": 132, "Intel Max 1550, one tile": 64}
"""SMs, and Xe cores: NVIDIA's data sheet; Intel's product page of the Max 1550 has 128 for both tiles."""
_UNIT_BYTES_PER_S = 1e12
"""Operands of a unit: so many that they never bound one in fp32."""
DTYPE = "float32"


def with_waves(cluster: Cluster) -> Cluster:
    """Return a machine whose products take whole waves of tiles at its peak, or what its memory takes if longer.

    There are no launches and no costs of a tile. A machine of another chip stays as it is.
    """
    chip = cluster.chip
    if chip.name not in UNITS:
        return cluster
    rates = chip.peak(DTYPE), _UNIT_BYTES_PER_S, 0.0, 0.0, chip.memory_bytes_per_s
    kernels = ChipKernels(
        chip.name, "whole waves of tiles", ((DTYPE, ProductConstants("gpu", UNITS[chip.name], *rates)),)
    )
    return replace(cluster, chip=replace(chip, kernels=kernels))


READINGS: dict[str, SlicingReading] = by_name(
    SlicingReading(ALL_FACTORS, "all replication factors that divide the number of devices"),
    SlicingReading(
        "cut",
        "replication factors that leave every matrix cut: 1D blocks into two parts at least, 2D blocks along "
        "both dims",
        cuts_everything=True,
    ),
    SlicingReading(
        "shapes",
        "as all-factors, with products in whole waves of tiles over the units of a device",
        by_shape=True,
    ),
)
"""By name, the default first."""
