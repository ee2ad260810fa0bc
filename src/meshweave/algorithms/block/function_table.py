"""Which functions a problem calls."""

from __future__ import annotations

from meshweave.algorithms.block.functions import BlockFunctions
from meshweave.algorithms.block.integer_functions import IntegerFunctions
from meshweave.algorithms.block.problem import BlockProblem
from meshweave.algorithms.block.real_functions import RealFunctions


def functions_of(problem: BlockProblem) -> BlockFunctions:
    """Return the functions of a problem: real ones, or those of integers."""
    return IntegerFunctions(problem) if problem.exact else RealFunctions(problem)
