"""MeshSlice with tapered slices: thin ones first and last, so that prologue and epilogue are short.

A sliced product cannot hide the movement of its first slice before the first product, and the last product (or
what moves after it) at the end. Both shrink with these slices alone, while those between them stay wide, few, and
cheap to launch. The paper's slices are all equal (MeshSlice, section 3.2.2). They are offered as well, so that
the best of them is never slower than `meshslice`.

The widths rise to the widest, which repeats, and fall again: 1:2:2:1, 1:2:3:3:2:1, 1:4:4:1, 1:2:4:2:1.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshweave.algorithms.matmul2d.common.problem import Matmul2dConfig, Matmul2dProblem
from meshweave.algorithms.matmul2d.meshslice import MeshSlice, slice_counts, uniform_slices
from meshweave.describe.machine.cluster import Cluster

BLOCK = 8
"""Elements of a block."""
RAMPS = (((1,), 2), ((1, 2), 3), ((1,), 4), ((1, 2), 4))
"""Widths before the widest, and the widest."""
MAX_WIDEST = 32
"""The most slices of the widest width."""


class MeshSliceTapered(MeshSlice):
    """MeshSlice with more candidates: slices of rising and falling width. The programs are MeshSlice's."""

    name = "meshslice_tapered"
    title = "MeshSlice, tapered"
    source = "MeshSlice, section 3.1, with slices of unequal width"

    def candidates(
        self, problem: Matmul2dProblem, cluster: Cluster | None = None
    ) -> Iterator[Matmul2dConfig]:
        """Yield equal slices, then tapered ones, as 1:2:2:1, whose widths sum to a number in `slice_counts`.

        `cluster` is ignored.
        """
        yield from uniform_slices(problem, BLOCK)
        for blocks in slice_counts(problem, BLOCK):
            for ramp, widest in RAMPS:
                middle, remainder = divmod(blocks - 2 * sum(ramp), widest)
                if remainder == 0 and 1 <= middle <= MAX_WIDEST:
                    yield Matmul2dConfig((*ramp, *(widest,) * middle, *reversed(ramp)), BLOCK)


MESHSLICE_TAPERED = MeshSliceTapered()
