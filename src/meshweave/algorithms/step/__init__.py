"""The time and memory of a whole training step: degrees of parallelism laid on a cluster.

problem      model, cluster, batch, and what the software stack does
parallelism  one choice of degrees, strategy, schedule and recomputation
step         the result: seconds in parts, bytes in parts
"""

from meshweave.algorithms.step.checks import check_step as check_step
from meshweave.algorithms.step.compose import least_step_s as least_step_s
from meshweave.algorithms.step.compose import step as step
from meshweave.algorithms.step.compose import step_of as step_of
from meshweave.algorithms.step.compose import with_defaults as with_defaults
from meshweave.algorithms.step.layers import LayerTime as LayerTime
from meshweave.algorithms.step.layers import layer_time as layer_time
from meshweave.algorithms.step.memory import Memory as Memory
from meshweave.algorithms.step.memory import RankMemory as RankMemory
from meshweave.algorithms.step.problem import Parallelism as Parallelism
from meshweave.algorithms.step.problem import StepProblem as StepProblem
from meshweave.algorithms.step.program import StepSimulation as StepSimulation
from meshweave.algorithms.step.program import simulate_step as simulate_step
from meshweave.algorithms.step.program import step_program as step_program
from meshweave.algorithms.step.result import Step as Step
from meshweave.algorithms.step.result import StepParts as StepParts
from meshweave.algorithms.step.software_stack import SoftwareStack as SoftwareStack
from meshweave.algorithms.step.software_stack import UnfusedKernels as UnfusedKernels
from meshweave.algorithms.step.stacks import load_stack as load_stack
from meshweave.algorithms.step.stacks import stack_names as stack_names
from meshweave.algorithms.step.step_memory import least_memory as least_memory
from meshweave.algorithms.step.step_memory import memory_of as memory_of
from meshweave.algorithms.step.timeline import StepTimeline as StepTimeline
from meshweave.algorithms.step.timeline import layer_timeline as layer_timeline
from meshweave.algorithms.step.timeline import step_timeline as step_timeline
