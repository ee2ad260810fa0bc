"""Wang: a 2D product with one direction decomposed and overlapped (Wang et al., ASPLOS '23; MeshSlice, 2.3.4).

The collective along one mesh axis is broken into ring steps that run beside the products of the parts. The
collective along the other axis stays whole and exposed, before the products or after them.
`Matmul2dConfig.overlap` is the axis that is hidden, and the number of slices is that of products into which the
ring is unrolled. The comparison in the MeshSlice paper unrolls to MeshSlice's slice count; a planner may choose
another number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from meshweave.algorithms.matmul2d.common.algorithm import Matmul2d
from meshweave.algorithms.matmul2d.common.problem import Matmul2dConfig, Matmul2dProblem, two_d_placements
from meshweave.algorithms.matmul2d.common.ring import RingProduct, build
from meshweave.algorithms.matmul2d.common.ring_costs import (
    build_skeleton,
    iteration_counts,
    lower_bound,
    peak_bytes,
    traffic,
)
from meshweave.describe.machine.cluster import Cluster
from meshweave.ir.program import Program
from meshweave.ir.skeleton import Skeleton

OVERLAPS: tuple[Literal["col", "row"], ...] = ("col", "row")


def _ring(problem: Matmul2dProblem, config: Matmul2dConfig) -> RingProduct:
    moving, exposed = problem.horizontal, problem.vertical
    if config.overlap == "row":
        moving, exposed = exposed, moving
    return RingProduct(problem, two_d_placements(problem), moving, exposed, config.slice_count)


class Wang(Matmul2d):
    """One collective broken into ring steps beside the products, the other whole and exposed.

    A config chooses the mesh axis of the ring (`overlap`) and the number of products (the length of `slices`).
    """

    name = "wang"
    title = "Wang"
    source = "Wang et al., ASPLOS '23; MeshSlice, sections 2.3.4 and 4.2"
    estimate_accuracy = "upper_bound"

    def candidates(
        self, problem: Matmul2dProblem, cluster: Cluster | None = None
    ) -> Iterator[Matmul2dConfig]:
        """Yield configs by mesh axis of the ring and by number of products that it is divided into."""
        for overlap in OVERLAPS:
            for count in iteration_counts(problem.axis_size(overlap)):
                yield Matmul2dConfig((1,) * count, overlap=overlap)

    def program(self, problem: Matmul2dProblem, config: Matmul2dConfig) -> Program:
        """Return the program of the ring, with one collective before or after it."""
        return build(_ring(problem, config), self.name)

    def skeleton(self, problem: Matmul2dProblem, config: Matmul2dConfig) -> Skeleton:
        """Return the tasks of the program, every part as large as the largest."""
        return build_skeleton(_ring(problem, config))

    def traffic(self, problem: Matmul2dProblem, config: Matmul2dConfig, rank: int) -> dict[str, int]:
        """Return the bytes that a rank receives, by "mesh.axis"."""
        return traffic(_ring(problem, config), rank)

    def lower_bounds(self, problem: Matmul2dProblem) -> Iterator[Skeleton]:
        """Return a skeleton for each axis of the ring; the fastest takes no longer than any candidate."""
        return (lower_bound(_ring(problem, Matmul2dConfig(overlap=overlap))) for overlap in OVERLAPS)

    def peak_bytes(self, problem: Matmul2dProblem, config: Matmul2dConfig, rank: int = 0) -> int:
        """Return the most bytes that a rank holds at once, operands and results included."""
        if rank:
            return super().peak_bytes(problem, config, rank)
        return peak_bytes(_ring(problem, config))


WANG = Wang()
