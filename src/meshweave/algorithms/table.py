"""All algorithms of all families by name, with those that installed packages add."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from meshweave.algorithms import block, fused, matmul2d, pipeline, universal
from meshweave.algorithms.contract import Algorithm, algorithm_table, lookup
from meshweave.algorithms.reshard import algorithm as reshard

ALGORITHMS: dict[str, Algorithm[Any, Any]] = algorithm_table(
    Algorithm,  # type: ignore[type-abstract]
    *matmul2d.ENTRIES,
    *universal.ENTRIES,
    *fused.ENTRIES,
    *reshard.ENTRIES,
    *pipeline.ENTRIES,
    *block.ENTRIES,
)
"""Every entry by name, families in the order in which they are listed here."""


def algorithm(name: str) -> Algorithm[Any, Any]:
    """Return the entry called `name`. Raises UnsupportedError naming the nearest one."""
    return lookup(name, ALGORITHMS)


def algorithms_for(problem: Hashable) -> dict[str, Algorithm[Any, Any]]:
    """Return the entries that can solve a problem: those of its type that do not refuse it."""
    return {
        name: entry
        for name, entry in ALGORITHMS.items()
        if isinstance(problem, entry.problem_type) and entry.refusal(problem) is None
    }
