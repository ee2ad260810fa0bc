"""The table of all algorithms, and that of each family, with what installed packages add to it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from meshweave.algorithms.contract import Algorithm
from meshweave.algorithms.entries import AlgorithmTable
from meshweave.algorithms.matmul2d.table import PRODUCTS_2D as PRODUCTS_2D

if TYPE_CHECKING:
    from meshweave.algorithms.block.strategy import BlockAlgorithm
    from meshweave.algorithms.fused.product import FusedProduct
    from meshweave.algorithms.pipeline.algorithm import PipelineAlgorithm


ALGORITHMS: AlgorithmTable[Algorithm[Any, Any]] = AlgorithmTable("algorithm", "contract:Algorithm")
"""Every entry by name, family by family."""
FUSED_PRODUCTS: AlgorithmTable[FusedProduct[Any]] = AlgorithmTable(
    "fused product", "fused.product:FusedProduct"
)
SCHEDULES: AlgorithmTable[PipelineAlgorithm] = AlgorithmTable("schedule", "pipeline:PipelineAlgorithm")
STRATEGIES: AlgorithmTable[BlockAlgorithm] = AlgorithmTable("strategy", "block:BlockAlgorithm")


def algorithm(name: str) -> Algorithm[Any, Any]:
    """Return the algorithm called `name`.

    Raises:
        UnsupportedError: there is no such algorithm (the message lists similar names, or all), or the table cannot
            be filled (`AlgorithmTable.entries`).
    """
    return ALGORITHMS.named(name)


def algorithms_for(problem: Hashable) -> dict[str, Algorithm[Any, Any]]:
    """Return the algorithms that can solve a problem, by name.

    They are those whose `problem_type` the problem is an instance of, and whose `refusal` of it is None.
    """
    return {
        name: entry
        for name, entry in ALGORITHMS.items()
        if isinstance(problem, entry.problem_type) and entry.refusal(problem) is None
    }
