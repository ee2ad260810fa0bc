"""Distributed matrix products: the table of algorithms. A new one gets its tests by being listed here."""

from __future__ import annotations

from meshweave.algorithms.matmul2d.cannon import CANNON
from meshweave.algorithms.matmul2d.collective import COLLECTIVE
from meshweave.algorithms.matmul2d.common.problem import DATAFLOWS, Algorithm, Config, Dataflow, MatmulProblem
from meshweave.algorithms.matmul2d.meshslice import MESHSLICE
from meshweave.algorithms.matmul2d.one_dim import FSDP, TENSOR_1D
from meshweave.algorithms.matmul2d.replicated import MESHSLICE_DP
from meshweave.algorithms.matmul2d.summa import SUMMA
from meshweave.algorithms.matmul2d.tapered import MESHSLICE_TAPERED
from meshweave.algorithms.matmul2d.two_half_d import TWO_HALF_D
from meshweave.algorithms.matmul2d.wang import WANG
from meshweave.base.errors import UnsupportedError, nearest

ALGORITHMS: dict[str, Algorithm] = {
    entry.name: entry
    for entry in (
        COLLECTIVE,
        MESHSLICE,
        MESHSLICE_TAPERED,
        WANG,
        SUMMA,
        TENSOR_1D,
        FSDP,
        CANNON,
        TWO_HALF_D,
        MESHSLICE_DP,
    )
}


def algorithm(name: str) -> Algorithm:
    """The table entry called `name`. Raises UnsupportedError naming the nearest one."""
    if name not in ALGORITHMS:
        raise UnsupportedError(f"there is no algorithm '{name}'{nearest(name, ALGORITHMS)}")
    return ALGORITHMS[name]


__all__ = ["ALGORITHMS", "DATAFLOWS", "Algorithm", "Config", "Dataflow", "MatmulProblem", "algorithm"]
