"""One product for all layouts: any partitioning and replication of A, B and C, by slicing.

Slicing Is All You Need (Brock and Golin): keep one matrix where it is, compute by index arithmetic which parts
of the others its tiles meet, fetch those, and accumulate what belongs elsewhere. See `slicing` for the
arithmetic and `program` for what comes of it.
"""

from __future__ import annotations

from meshweave.algorithms.universal.algorithm import ENTRIES, AnyLayoutProduct
from meshweave.algorithms.universal.config import UniversalConfig, universal_configs
from meshweave.algorithms.universal.problem import Operand, UniversalProblem
from meshweave.algorithms.universal.program import universal_program
from meshweave.algorithms.universal.schedule import StageLimits
from meshweave.algorithms.universal.slicing import Slicing

__all__ = [
    "ENTRIES",
    "AnyLayoutProduct",
    "Operand",
    "Slicing",
    "StageLimits",
    "UniversalConfig",
    "UniversalProblem",
    "universal_configs",
    "universal_program",
]
