"""What algorithms share of which one matrix travels around a ring, beside products of its parts."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from meshweave.algorithms.matmul2d.common.algorithm import Matmul2d
from meshweave.algorithms.matmul2d.common.problem import Matmul2dConfig, Matmul2dProblem
from meshweave.algorithms.matmul2d.common.ring import RingProduct, build
from meshweave.algorithms.matmul2d.common.ring_costs import build_skeleton, peak_bytes, traffic
from meshweave.ir.program import Program
from meshweave.ir.skeleton import Skeleton


class RingAlgorithm(Matmul2d):
    """A product in which one matrix travels around a mesh axis.

    The length of a config's `slices` is the number of iterations (`RingProduct`): with more of them communication
    overlaps more finely, and products are smaller.
    """

    estimate_accuracy = "upper_bound"
    config_fields: ClassVar[tuple[str, ...]] = ("slices",)

    @abstractmethod
    def ring(self, problem: Matmul2dProblem, config: Matmul2dConfig) -> RingProduct:
        """Return the ring: which matrix travels along which axis, and in how many iterations."""

    def program(self, problem: Matmul2dProblem, config: Matmul2dConfig) -> Program:
        """Return the program of the ring, with one collective before or after it where another matrix moves."""
        return build(self.ring(problem, config), self.name)

    def skeleton(self, problem: Matmul2dProblem, config: Matmul2dConfig) -> Skeleton:
        """Return the skeleton of the program, with every part as large as the largest."""
        return build_skeleton(self.ring(problem, config))

    def traffic(self, problem: Matmul2dProblem, config: Matmul2dConfig, rank: int) -> dict[str, int]:
        """Return the bytes that a global rank receives, by "mesh.axis", such as "tp.row"."""
        return traffic(self.ring(problem, config), rank)

    def peak_bytes(self, problem: Matmul2dProblem, config: Matmul2dConfig, rank: int = 0) -> int:
        """Return the most bytes that a global rank holds at once, its shards of A, B and C included."""
        if rank != problem.mesh.ranks[0]:
            return super().peak_bytes(problem, config, rank)
        return peak_bytes(self.ring(problem, config))
