"""Collective 2D product (Schatz et al., SIAM J. Sci. Comput. 2016; MeshSlice, section 2.3.4).

One all-gather per moving input, one local product, one reduce-scatter of a moving output. It moves the least and
launches the least, and hides nothing: all communication is before or after the product. It is MeshSlice with a
single slice, which needs no copy into slices, and is written as such.
"""

from __future__ import annotations

from meshweave.algorithms.matmul2d.common.algorithm import Matmul2d
from meshweave.algorithms.matmul2d.common.problem import Matmul2dConfig, Matmul2dProblem
from meshweave.algorithms.matmul2d.common.slices import Slices
from meshweave.algorithms.matmul2d.meshslice import build, build_skeleton
from meshweave.ir.program import Program
from meshweave.ir.skeleton import Skeleton


def _one_slice(problem: Matmul2dProblem) -> Slices:
    return Slices(problem.sliced_size, (1,), 1)


class CollectiveProduct(Matmul2d):
    """One all-gather per moving input, one local product, one reduce-scatter of a moving output.

    It has a single config. Its traffic is the least of all 2D products: each moving matrix crosses its axis once.
    """

    name = "collective"
    title = "Collective"
    source = "Schatz et al. 2016; MeshSlice, section 2.3.4"

    def program(self, problem: Matmul2dProblem, config: Matmul2dConfig) -> Program:
        """Return the program: all-gathers of moving inputs, the product, reduce-scatter of a moving output."""
        return build(problem, _one_slice(problem), self.name)

    def skeleton(self, problem: Matmul2dProblem, config: Matmul2dConfig) -> Skeleton:
        """Return the skeleton of the program: the tasks of the rank with the largest shards."""
        return build_skeleton(problem, _one_slice(problem))

    def traffic(self, problem: Matmul2dProblem, config: Matmul2dConfig, rank: int) -> dict[str, int]:
        """Return a global rank's bytes of communication, by "mesh.axis", such as "tp.row".

        Each moving matrix crosses its axis once: an all-gather counts bytes received, a reduce-scatter bytes sent.
        """
        return problem.traffic_bytes(rank)


COLLECTIVE = CollectiveProduct()
