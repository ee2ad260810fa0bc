"""Wang: a 2D product with one direction decomposed and overlapped (Wang et al., ASPLOS '23; MeshSlice, 2.3.4).

The collective of one mesh direction is broken into ring steps that run beside the products of the parts; that
of the other direction stays whole and exposed, before the products or after them. `overlap` says which
direction is hidden, the number of slices into how many products the ring is unrolled. The comparison in the
MeshSlice paper unrolls to MeshSlice's slice count; at its own best a planner may choose another.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from meshweave.algorithms.matmul2d.common.algorithm import Matmul2d
from meshweave.algorithms.matmul2d.common.problem import Config, MatmulProblem, two_d_placements
from meshweave.algorithms.matmul2d.common.ring import Ring, build
from meshweave.algorithms.matmul2d.common.ring_costs import (
    build_skeleton,
    least,
    peak_bytes,
    traffic,
    turn_counts,
)
from meshweave.describe.machine.cluster import Cluster
from meshweave.ir.program import Program
from meshweave.ir.skeleton import Skeleton

OVERLAPS: tuple[Literal["col", "row"], ...] = ("col", "row")


def _ring(problem: MatmulProblem, config: Config) -> Ring:
    moving, other = problem.horizontal, problem.vertical
    if config.overlap == "row":
        moving, other = other, moving
    return Ring(problem, two_d_placements(problem), moving, other, config.slice_count)


class Wang(Matmul2d):
    name = "wang"
    title = "Wang"
    source = "Wang et al., ASPLOS '23; MeshSlice, sections 2.3.4 and 4.2"
    estimate_is = "bound"

    def candidates(self, problem: MatmulProblem, cluster: Cluster | None = None) -> Iterator[Config]:
        for overlap in OVERLAPS:
            for count in turn_counts(problem.axis_size(overlap)):
                yield Config((1,) * count, overlap=overlap)

    def program(self, problem: MatmulProblem, config: Config) -> Program:
        return build(_ring(problem, config), self.name)

    def skeleton(self, problem: MatmulProblem, config: Config) -> Skeleton:
        return build_skeleton(_ring(problem, config))

    def traffic(self, problem: MatmulProblem, config: Config, rank: int) -> dict[str, int]:
        return traffic(_ring(problem, config), rank)

    def least(self, problem: MatmulProblem) -> Iterator[Skeleton]:
        return (least(_ring(problem, Config(overlap=overlap))) for overlap in OVERLAPS)

    def peak_bytes(self, problem: MatmulProblem, config: Config, rank: int = 0) -> int:
        if rank:
            return super().peak_bytes(problem, config, rank)
        return peak_bytes(_ring(problem, config))


WANG = Wang()
