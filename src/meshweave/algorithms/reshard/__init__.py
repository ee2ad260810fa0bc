"""Cross-mesh resharding: tensors move from one mesh to another as many multicasts at once (AlpaComm, MLSys '23).

A problem is cut into unit tasks (`tasks`). A strategy turns them into multicasts (`broadcast`, `send_recv`,
`gather`). An order says which sender serves which multicast, and when (`order`). The plan of all that (`plan`)
becomes a program (`program`).
"""

from meshweave.algorithms.reshard.plan import ReshardPlan, plan_reshard
from meshweave.algorithms.reshard.problem import ReshardProblem, TensorMove
from meshweave.algorithms.reshard.program import reshard_program
from meshweave.algorithms.reshard.strategies import STRATEGIES
from meshweave.algorithms.reshard.tasks import UnitTask, unit_tasks

__all__ = [
    "STRATEGIES",
    "ReshardPlan",
    "ReshardProblem",
    "TensorMove",
    "UnitTask",
    "plan_reshard",
    "reshard_program",
    "unit_tasks",
]
