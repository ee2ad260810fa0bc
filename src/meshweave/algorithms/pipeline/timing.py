"""The times of a problem's stages and transfers on a cluster, and of a step by them, to choose schedules by.

Links are not shared here; `simulate` says what a program takes on a machine.
"""

from __future__ import annotations

from meshweave.algorithms.pipeline.action_graph import TransferRuntime
from meshweave.algorithms.pipeline.action_times import ActionTimes, time_schedule
from meshweave.algorithms.pipeline.actions import Schedule
from meshweave.algorithms.pipeline.problem import Edge, PartCost, PipelineProblem, Stage
from meshweave.algorithms.pipeline.transfer_order import list_transfers
from meshweave.base.units import to_ps
from meshweave.cost.calls import flops_per_s
from meshweave.cost.fabric import HostTopology
from meshweave.describe.machine.cluster import Cluster


def times_on(problem: PipelineProblem, cluster: Cluster) -> ActionTimes:
    """Return the picoseconds of stages and transfers on a cluster, each for one micro-batch.

    A part takes the time of its FLOPs or of its bytes in memory, whichever is longer; a transfer that of its bytes
    through NICs, or through local links inside of a host. An input gradient's time includes that of the stage's
    recomputation. Transfers are those of `problem.edges`.
    """
    network = HostTopology.of(cluster, 1 + max(rank for mesh in problem.meshes for rank in mesh.ranks))

    def part_ps(stage: Stage, cost: PartCost) -> int:
        flops_s = cost.flops / flops_per_s(cluster.chip, "", stage.dtype)
        return to_ps(max(flops_s, cost.bytes / cluster.chip.memory_bytes_per_s))

    again = [0 if s.recompute is None else part_ps(s, s.recompute.cost) for s in problem.stages]
    return ActionTimes(
        tuple(part_ps(stage, stage.forward) for stage in problem.stages),
        tuple(part_ps(s, s.input_grad) + extra for s, extra in zip(problem.stages, again, strict=True)),
        tuple(part_ps(stage, stage.weight_grad) for stage in problem.stages),
        tuple(to_ps(_transfer_s(problem, edge, network)) for edge in problem.edges),
    )


def step_ticks(problem: PipelineProblem, schedule: Schedule, times: ActionTimes) -> int:
    """Return the makespan of a step under a schedule, transfers included, in the ticks of `times`.

    Transfers from one pipeline rank to another run one after another. Those of other pairs of ranks, and of the
    other direction, run concurrently with them.

    Args:
        problem: the pipeline, of which only the edges are read.
        schedule: compute actions.
        times: the ticks of the stages and of the transfers of `problem.edges`.

    Raises:
        LayoutError: the schedule lists transfers already or is not complete, or `times` have other numbers of
            stages or edges.
        ScheduleDeadlock: actions wait for each other for ever.
    """
    edges = [(edge.source, edge.target) for edge in problem.edges]
    listed = list_transfers(schedule, times, edges)
    timed = time_schedule(listed, times, TransferRuntime.BUFFERED, edges)
    return max(max(ends, default=0) for ends in timed.ends)


def _transfer_s(problem: PipelineProblem, edge: Edge, network: HostTopology) -> float:
    """Return the seconds in which the NICs of the smaller mesh pass one copy of a tensor, or local links do."""
    if problem.is_local(edge):
        return 0.0
    sides = [problem.stages[stage].mesh.ranks for stage in (edge.source, edge.target)]
    hosts = [{network.host_of[rank] for rank in ranks} for ranks in sides]
    size = problem.edge_bytes(edge)
    if hosts[0] == hosts[1] and len(hosts[0]) == 1:
        return size / (network.local_bytes_per_s * min(map(len, sides)))
    nics = [{(network.host_of[rank], network.nic_of[rank]) for rank in ranks} for ranks in sides]
    return size / (network.nic_bytes_per_s * min(map(len, nics)))
