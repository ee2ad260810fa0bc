"""A 2D product under another name and with fewer candidates, for fair comparisons."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from meshweave.algorithms.matmul2d.common.algorithm import Matmul2d
from meshweave.algorithms.matmul2d.common.problem import Matmul2dConfig, Matmul2dProblem, Placements
from meshweave.describe.machine.cluster import Cluster
from meshweave.ir.program import Program
from meshweave.ir.skeleton import Skeleton


class Restricted(Matmul2d):
    """The algorithm `base` under the name `name`, with the candidates that a function of the problem yields.

    Comparisons need this: Wang's algorithm at the slice count that was best for MeshSlice, for example.
    """

    def __init__(
        self, base: Matmul2d, name: str, candidates: Callable[[Matmul2dProblem], Iterator[Matmul2dConfig]]
    ) -> None:
        self.base, self.name, self._candidates = base, name, candidates  # type: ignore[misc]
        self.title, self.source = base.title, base.source  # type: ignore[misc]
        self.dataflows, self.estimate_accuracy = base.dataflows, base.estimate_accuracy  # type: ignore[misc]
        self.own_stationary = base.own_stationary  # type: ignore[misc]

    def candidates(
        self, problem: Matmul2dProblem, cluster: Cluster | None = None
    ) -> Iterator[Matmul2dConfig]:
        """Yield the candidates that the restriction allows."""
        return self._candidates(problem)

    def program(self, problem: Matmul2dProblem, config: Matmul2dConfig) -> Program:
        """Return the program of the algorithm that is restricted."""
        return self.base.program(problem, config)

    def skeleton(self, problem: Matmul2dProblem, config: Matmul2dConfig) -> Skeleton:
        """Return the skeleton of the algorithm that is restricted."""
        return self.base.skeleton(problem, config)

    def mesh_shapes(self, num_chips: int) -> tuple[tuple[int, ...], ...]:
        """Return the mesh shapes of the algorithm that is restricted."""
        return self.base.mesh_shapes(num_chips)

    def operand_placements(self, problem: Matmul2dProblem) -> Placements:
        """Return the placements of the operands in the algorithm that is restricted."""
        return self.base.operand_placements(problem)

    def config_lower_bound(self, problem: Matmul2dProblem, config: Matmul2dConfig) -> Skeleton | None:
        """Return a skeleton no slower than one candidate, as the algorithm that is restricted does, or None."""
        return self.base.config_lower_bound(problem, config)

    def lower_bounds(self, problem: Matmul2dProblem) -> Iterator[Skeleton] | None:
        """Return skeletons, the fastest no slower than any candidate of the whole algorithm, or None."""
        return self.base.lower_bounds(problem)

    def traffic(self, problem: Matmul2dProblem, config: Matmul2dConfig, rank: int) -> dict[str, int]:
        """Return the bytes that a rank moves by mesh axis, of one candidate."""
        return self.base.traffic(problem, config, rank)

    def peak_bytes(self, problem: Matmul2dProblem, config: Matmul2dConfig, rank: int = 0) -> int:
        """Return the most bytes that a rank has allocated, of one candidate."""
        return self.base.peak_bytes(problem, config, rank)
