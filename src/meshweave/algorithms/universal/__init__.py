"""One product for all layouts: any partitioning and replication of A, B and C, by slicing.

Slicing Is All You Need (Brock and Golin): keep one matrix where it is, compute by index arithmetic which parts
of the others its tiles meet, fetch those, and accumulate what belongs elsewhere. See `slicing` for the
arithmetic and `program` for what comes of it.
"""

from __future__ import annotations

from meshweave.algorithms.universal.config import StageLimits as StageLimits
from meshweave.algorithms.universal.config import UniversalConfig as UniversalConfig
from meshweave.algorithms.universal.config import universal_configs as universal_configs
from meshweave.algorithms.universal.problem import Operand as Operand
from meshweave.algorithms.universal.problem import UniversalProblem as UniversalProblem
from meshweave.algorithms.universal.program import universal_program as universal_program
from meshweave.algorithms.universal.slicing import Slicing as Slicing
