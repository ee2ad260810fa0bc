"""What data parallelism adds to a step: gradients reduced, weights gathered, beside the layers or after them.

Ranks that have equal weights (data and context) reduce gradients of each layer as it ends, in a lane of their own
beside the backward part of the layers before it; weights are gathered likewise ahead of the forward part (Li et
al., VLDB '20; Rajbhandari et al., SC '20; Zhao et al., PyTorch FSDP, VLDB '23):

    zero 0    gradients summed in the last micro-batch
    zero 1    reduced and scattered in the last micro-batch; weights gathered once, ahead of the first forward part
    zero 2    reduced and scattered in each micro-batch; weights as in 1
    zero 3    as 2; weights gathered for each forward and backward part of each micro-batch

Two lanes of n equal layers, c seconds of computing and r of communication each, end after n c + r if c > r, else
after c + n r: the recurrence that a skeleton of these tasks has.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshweave.tune.step.memory import layer_parameters, table_parameters
from meshweave.tune.step.placement import collective_s, replica_groups
from meshweave.tune.step.problem import Parallelism, StepProblem


@dataclass(frozen=True)
class LayerSync:
    """Seconds of the collectives of one layer's weights, and of an embedding table's gradient.

    Attributes:
        reduce_s: of the gradient of a layer.
        gather_s: of its weights.
        table_s: of the gradient of a table.
    """

    reduce_s: float
    gather_s: float
    table_s: float


def layer_sync(problem: StepProblem, parallelism: Parallelism) -> LayerSync:
    """Return what the collectives of a layer take."""
    groups = replica_groups(parallelism)
    if not groups:
        return LayerSync(0.0, 0.0, 0.0)
    weights, table = layer_parameters(problem, parallelism), table_parameters(problem, parallelism)
    kind = "reduce_scatter" if parallelism.zero else "all_reduce"
    reversed_groups = groups[::-1]
    return LayerSync(
        collective_s(problem, kind, groups, weights * problem.gradient_bytes),
        collective_s(problem, "all_gather", reversed_groups, weights * problem.item_bytes)
        if parallelism.zero
        else 0.0,
        collective_s(problem, kind, groups, table * problem.gradient_bytes) if table else 0.0,
    )


def exposed_after(layers: int, compute_s: float, communication_s: float, overlap: float) -> float:
    """Return what communication of each layer adds, where it follows the layer's computing.

    Args:
        overlap: the share of the communication that may run beside the computing.
    """
    if not layers:
        return 0.0
    hidden = overlap * communication_s
    tail = hidden if compute_s >= hidden else compute_s + layers * hidden - layers * compute_s
    return tail + layers * (communication_s - hidden)


def exposed_before(layers: int, compute_s: float, communication_s: float, overlap: float) -> float:
    """Return what communication adds that comes before each layer's computing: the same, turned round."""
    return exposed_after(layers, compute_s, communication_s, overlap)
