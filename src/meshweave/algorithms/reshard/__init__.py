"""Cross-mesh resharding: tensors move from one mesh to another as many multicasts at once (AlpaComm, MLSys '23).

A problem is cut into unit tasks (`tasks`). A strategy turns them into multicasts (`broadcast`, `send_recv`,
`gather`). An order says which sender serves which multicast, and when (`order`). The plan of all that (`plan`)
becomes a program (`program`).
"""

from meshweave.algorithms.reshard.plan import ReshardPlan as ReshardPlan
from meshweave.algorithms.reshard.plan import plan_reshard as plan_reshard
from meshweave.algorithms.reshard.problem import ReshardProblem as ReshardProblem
from meshweave.algorithms.reshard.problem import TensorMove as TensorMove
from meshweave.algorithms.reshard.program import reshard_program as reshard_program
from meshweave.algorithms.reshard.strategies import STRATEGIES as STRATEGIES
from meshweave.algorithms.reshard.tasks import UnitTask as UnitTask
from meshweave.algorithms.reshard.tasks import unit_tasks as unit_tasks
