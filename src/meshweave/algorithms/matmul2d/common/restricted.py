"""A 2D product under another name and with fewer candidates, for fair comparisons."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

from meshweave.algorithms.matmul2d.common.algorithm import Matmul2d
from meshweave.algorithms.matmul2d.common.problem import Matmul2dConfig, Matmul2dProblem
from meshweave.describe.machine.cluster import Cluster


def restricted(
    base: Matmul2d, name: str, chosen: Callable[[Matmul2dProblem], Iterator[Matmul2dConfig]]
) -> Matmul2d:
    """Return the algorithm `base` under another name, with the candidates that `chosen` yields for a problem.

    Comparisons need this: Wang's algorithm at the slice count that was best for MeshSlice, for example.
    """

    def candidates(problem: Matmul2dProblem, cluster: Cluster | None = None) -> Iterator[Matmul2dConfig]:
        return chosen(problem)

    entry = copy.copy(base)
    entry.name, entry.candidates = name, candidates  # type: ignore[misc, method-assign]
    return entry
