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

from meshweave.algorithms.matmul2d.common.problem import Matmul2dConfig, Matmul2dProblem, two_d_placements
from meshweave.algorithms.matmul2d.common.ring import RingProduct
from meshweave.algorithms.matmul2d.common.ring_algorithm import RingAlgorithm
from meshweave.algorithms.matmul2d.common.ring_costs import iteration_counts, lower_bound
from meshweave.describe.machine.cluster import Cluster
from meshweave.ir.skeleton import Skeleton

OVERLAPS: tuple[Literal["col", "row"], ...] = ("col", "row")


class Wang(RingAlgorithm):
    """One collective broken into ring steps beside the products, the other whole and exposed.

    A config chooses the mesh axis of the ring (`overlap`) and its number of iterations (the length of `slices`).
    """

    name = "wang"
    title = "Wang"
    source = "Wang et al., ASPLOS '23; MeshSlice, sections 2.3.4 and 4.2"
    config_fields = ("slices", "overlap")

    def ring(self, problem: Matmul2dProblem, config: Matmul2dConfig) -> RingProduct:
        """Return the ring along mesh axis `config.overlap`, with one whole collective along the other axis."""
        moving, exposed = problem.horizontal, problem.vertical
        if config.overlap == "row":
            moving, exposed = exposed, moving
        return RingProduct(problem, two_d_placements(problem), moving, exposed, config.slice_count)

    def num_iterations(self, problem: Matmul2dProblem, config: Matmul2dConfig) -> int:
        """Return the number of iterations that run: the number of slices, but between 2 and P // 2 + 1 on P chips.

        P is the number of chips of the ring; it is 1 iteration if P is 1.
        """
        return 1 + sum(count for count, _, _ in self.ring(problem, config).iteration_sizes)

    def candidates(
        self, problem: Matmul2dProblem, cluster: Cluster | None = None
    ) -> Iterator[Matmul2dConfig]:
        """Yield configs: for each mesh axis of the ring all numbers in `iteration_counts`, ascending.

        `cluster` is ignored.
        """
        for overlap in OVERLAPS:
            for count in iteration_counts(problem.axis_size(overlap)):
                yield Matmul2dConfig((1,) * count, overlap=overlap)

    def lower_bounds(self, problem: Matmul2dProblem) -> Iterator[Skeleton]:
        """Yield a skeleton for each axis of the ring; the fastest takes no longer than any candidate."""
        return (lower_bound(self.ring(problem, Matmul2dConfig(overlap=overlap))) for overlap in OVERLAPS)


WANG = Wang()
