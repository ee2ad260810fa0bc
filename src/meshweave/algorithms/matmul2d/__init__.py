"""Distributed products on 2D and 3D meshes: one algorithm a file, all of them in `ENTRIES`."""

from __future__ import annotations

from meshweave.algorithms.matmul2d.cannon import CANNON
from meshweave.algorithms.matmul2d.collective import COLLECTIVE
from meshweave.algorithms.matmul2d.common.algorithm import Matmul2d as Matmul2d
from meshweave.algorithms.matmul2d.common.problem import DATAFLOWS as DATAFLOWS
from meshweave.algorithms.matmul2d.common.problem import Dataflow as Dataflow
from meshweave.algorithms.matmul2d.common.problem import Matmul2dConfig as Matmul2dConfig
from meshweave.algorithms.matmul2d.common.problem import Matmul2dProblem as Matmul2dProblem
from meshweave.algorithms.matmul2d.meshslice import MESHSLICE
from meshweave.algorithms.matmul2d.one_dim import FSDP, TENSOR_1D
from meshweave.algorithms.matmul2d.replicated import MESHSLICE_DP
from meshweave.algorithms.matmul2d.summa import SUMMA
from meshweave.algorithms.matmul2d.tapered import MESHSLICE_TAPERED
from meshweave.algorithms.matmul2d.tiled import MESHSLICE_TILED
from meshweave.algorithms.matmul2d.two_half_d import TWO_HALF_D
from meshweave.algorithms.matmul2d.wang import WANG

ENTRIES: tuple[Matmul2d, ...] = (
    COLLECTIVE,
    MESHSLICE,
    MESHSLICE_TAPERED,
    MESHSLICE_TILED,
    WANG,
    SUMMA,
    TENSOR_1D,
    FSDP,
    CANNON,
    TWO_HALF_D,
    MESHSLICE_DP,
)
"""Listing an entry here gives it its tests and a place in every plan."""
