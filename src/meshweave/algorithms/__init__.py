"""Problems, configs and results of every family, for who asks an algorithm directly or writes one.

    problem = mw.algorithms.Matmul2dProblem(1024, 1024, 1024, (2, 2), "os")
    best = mw.rank(problem, mw.load_cluster("tpu-v4:2x2"))[0]

A family's class is what a new algorithm derives from: `Matmul2d`, `BlockAlgorithm`, and in `meshweave.schedules`
`PipelineAlgorithm`; `meshweave.Algorithm` for a family of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshweave.base.lazy import lazy_names

if TYPE_CHECKING:
    from meshweave.algorithms.block import BLOCK_ROLES as BLOCK_ROLES
    from meshweave.algorithms.block import AxisRole as AxisRole
    from meshweave.algorithms.block import BlockAlgorithm as BlockAlgorithm
    from meshweave.algorithms.block import BlockConfig as BlockConfig
    from meshweave.algorithms.block import BlockProblem as BlockProblem
    from meshweave.algorithms.contract import Gradient as Gradient
    from meshweave.algorithms.experts import ExpertsProblem as ExpertsProblem
    from meshweave.algorithms.experts import Routing as Routing
    from meshweave.algorithms.matmul2d import Matmul2d as Matmul2d
    from meshweave.algorithms.matmul2d import Matmul2dConfig as Matmul2dConfig
    from meshweave.algorithms.matmul2d import Matmul2dProblem as Matmul2dProblem
    from meshweave.algorithms.reshard import ReshardPlan as ReshardPlan
    from meshweave.algorithms.reshard import ReshardProblem as ReshardProblem
    from meshweave.algorithms.reshard import TensorMove as TensorMove
    from meshweave.algorithms.reshard import plan_reshard as plan_reshard
    from meshweave.algorithms.reshard import reshard_program as reshard_program
    from meshweave.algorithms.step import Memory as Memory
    from meshweave.algorithms.step import Step as Step
    from meshweave.algorithms.step import StepParts as StepParts
    from meshweave.algorithms.step import StepProblem as StepProblem
    from meshweave.algorithms.step import step_of as step_of
    from meshweave.algorithms.step import step_program as step_program
    from meshweave.algorithms.table import ALGORITHMS as ALGORITHMS
    from meshweave.algorithms.table import algorithms_for as algorithms_for
    from meshweave.algorithms.universal import StageLimits as StageLimits
    from meshweave.algorithms.universal import UniversalConfig as UniversalConfig
    from meshweave.algorithms.universal import UniversalProblem as UniversalProblem
    from meshweave.algorithms.universal import universal_program as universal_program

__all__ = lazy_names(__name__)
