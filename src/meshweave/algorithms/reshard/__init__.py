"""Cross-mesh resharding: tensors from one mesh to another, as many multicasts at once (AlpaComm, MLSys '23).

A problem falls into unit tasks (`tasks`), a strategy makes multicasts of them (`broadcast`, `send_recv`,
`gather`), an order says which sender serves which one when (`order`), and the plan of all that becomes a
program (`program`).
"""

from meshweave.algorithms.reshard.fabric import Fabric
from meshweave.algorithms.reshard.plan import ReshardPlan, plan_reshard
from meshweave.algorithms.reshard.problem import Item, ReshardProblem
from meshweave.algorithms.reshard.program import reshard_program
from meshweave.algorithms.reshard.strategies import STRATEGIES
from meshweave.algorithms.reshard.tasks import UnitTask, unit_tasks

__all__ = [
    "STRATEGIES",
    "Fabric",
    "Item",
    "ReshardPlan",
    "ReshardProblem",
    "UnitTask",
    "plan_reshard",
    "reshard_program",
    "unit_tasks",
]
