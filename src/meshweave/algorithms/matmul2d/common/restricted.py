"""An entry of the table under another name, with candidates of one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from meshweave.algorithms.matmul2d.common.algorithm import Matmul2d
from meshweave.algorithms.matmul2d.common.problem import Matmul2dConfig, Matmul2dProblem, Placements
from meshweave.describe.machine.cluster import Cluster
from meshweave.ir.program import Program
from meshweave.ir.skeleton import Skeleton


class Restricted(Matmul2d):
    """`base`, called `name` and offering only what `candidates` yields: a rival at slice counts of another."""

    def __init__(
        self, base: Matmul2d, name: str, candidates: Callable[[Matmul2dProblem], Iterator[Matmul2dConfig]]
    ) -> None:
        self.base, self.name, self._candidates = base, name, candidates  # type: ignore[misc]
        self.title, self.source = base.title, base.source  # type: ignore[misc]
        self.dataflows, self.estimate_is = base.dataflows, base.estimate_is  # type: ignore[misc]

    def candidates(
        self, problem: Matmul2dProblem, cluster: Cluster | None = None
    ) -> Iterator[Matmul2dConfig]:
        return self._candidates(problem)

    def program(self, problem: Matmul2dProblem, config: Matmul2dConfig) -> Program:
        return self.base.program(problem, config)

    def skeleton(self, problem: Matmul2dProblem, config: Matmul2dConfig) -> Skeleton:
        return self.base.skeleton(problem, config)

    def mesh_shapes(self, num_chips: int) -> tuple[tuple[int, ...], ...]:
        return self.base.mesh_shapes(num_chips)

    def operand_placements(self, problem: Matmul2dProblem) -> Placements:
        return self.base.operand_placements(problem)

    def floor(self, problem: Matmul2dProblem, config: Matmul2dConfig) -> Skeleton | None:
        return self.base.floor(problem, config)

    def least(self, problem: Matmul2dProblem) -> Iterator[Skeleton] | None:
        return self.base.least(problem)

    def traffic(self, problem: Matmul2dProblem, config: Matmul2dConfig, rank: int) -> dict[str, int]:
        return self.base.traffic(problem, config, rank)

    def peak_bytes(self, problem: Matmul2dProblem, config: Matmul2dConfig, rank: int = 0) -> int:
        return self.base.peak_bytes(problem, config, rank)
