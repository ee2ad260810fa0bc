"""The time and memory of a whole training step: degrees of parallelism laid on a cluster.

problem      model, cluster, batch, and what the software stack does
parallelism  one choice of degrees, strategy, schedule and recomputation
step         the result: seconds in parts, bytes in parts
"""

from meshweave.algorithms.step.checks import check_step
from meshweave.algorithms.step.compose import (
    least_step_s,
    step,
    step_of,
    with_defaults,
)
from meshweave.algorithms.step.layers import LayerTime, layer_time
from meshweave.algorithms.step.memory import Memory, RankMemory
from meshweave.algorithms.step.problem import Parallelism, StepProblem
from meshweave.algorithms.step.program import StepSimulation, simulate_step, step_program
from meshweave.algorithms.step.result import Step, StepParts
from meshweave.algorithms.step.software_stack import SoftwareStack, UnfusedKernels
from meshweave.algorithms.step.stacks import load_stack, stack_names
from meshweave.algorithms.step.step_memory import least_memory, memory_of
from meshweave.algorithms.step.timeline import StepTimeline, layer_timeline, step_timeline

__all__ = [
    "LayerTime",
    "Memory",
    "Parallelism",
    "RankMemory",
    "SoftwareStack",
    "Step",
    "StepParts",
    "StepProblem",
    "StepSimulation",
    "StepTimeline",
    "UnfusedKernels",
    "check_step",
    "layer_time",
    "layer_timeline",
    "least_memory",
    "least_step_s",
    "load_stack",
    "memory_of",
    "simulate_step",
    "stack_names",
    "step",
    "step_of",
    "step_program",
    "step_timeline",
    "with_defaults",
]
