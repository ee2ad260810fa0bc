"""Readings of Slicing Is All You Need: which replication factors its experiments try.

Section 3 calls every factor valid that divides the number of processes, so that with 12 of 12 processes each holds
all of a matrix. Section 5.2 tries "all valid replication factors" of row block, column block and 2D block. Its
text on MLP-2 speaks of larger tiles and of a happy medium between two extremes, not of matrices that are no longer
cut. Both are readings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshweave.describe.layout.shapes import near_square
from meshweave_studies.slicing.partitionings import BlockKind

ALL_FACTORS = "all-factors"


@dataclass(frozen=True)
class SlicingReading:
    """A choice for what the paper leaves open.

    Attributes:
        title: the choice in a few words.
        cuts_everything: whether a copy of every matrix is cut, a 2D block along both dims.
    """

    name: str
    title: str
    cuts_everything: bool = False

    def allows(self, cuts: Sequence[BlockKind], copies: int, num_ranks: int) -> bool:
        """Return whether matrices with these cuts may have so many copies on so many ranks."""
        if not self.cuts_everything:
            return True
        parts = num_ranks // copies
        return all(min(near_square(parts)) > 1 if cut == "2d" else parts > 1 for cut in cuts)


READINGS: dict[str, SlicingReading] = {
    reading.name: reading
    for reading in (
        SlicingReading(ALL_FACTORS, "all replication factors that divide the number of devices"),
        SlicingReading(
            "cut",
            "replication factors that leave every matrix cut: 1D blocks into two parts at least, 2D blocks along "
            "both dims",
            cuts_everything=True,
        ),
    )
}
"""By name, the default first."""
