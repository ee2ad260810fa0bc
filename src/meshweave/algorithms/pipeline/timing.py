"""The time of a step by a simple model: actions in order on each pipeline rank, transfers in order on each edge.

It is what schedules choose by. Links are not shared; `simulate` says what a program takes on a machine.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from meshweave.algorithms.pipeline.actions import Action, ActionKind, Schedule
from meshweave.algorithms.pipeline.problem import Edge, PartCost, PipelineProblem, Stage
from meshweave.base.errors import LayoutError
from meshweave.cost.calls import flops_per_s
from meshweave.cost.fabric import HostTopology
from meshweave.describe.machine.cluster import Cluster


@dataclass(frozen=True)
class StepTimes:
    """Seconds of the parts of each stage, and of the transfer of each edge's tensor.

    Attributes:
        forward, input_grad, weight_grad: by stage; the second with a recomputation.
        transfer: by (source stage, target stage), the same in both directions.
    """

    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    transfer: tuple[tuple[tuple[int, int], float], ...]

    @classmethod
    def of(cls, problem: PipelineProblem, cluster: Cluster) -> StepTimes:
        """Return the times on a cluster: FLOPs at the chip's rate, transfers at that of NICs or local links."""
        network = HostTopology.of(cluster, 1 + max(rank for mesh in problem.meshes for rank in mesh.ranks))

        def part_s(stage: Stage, cost: PartCost) -> float:
            flops_s = cost.flops / flops_per_s(cluster.chip, "", stage.dtype)
            return max(flops_s, cost.bytes / cluster.chip.memory_bytes_per_s)

        again = [0.0 if s.recompute is None else part_s(s, s.recompute.cost) for s in problem.stages]
        transfers = []
        for edge in problem.edges:
            transfers.append(((edge.source, edge.target), _transfer_s(problem, edge, network)))
        return cls(
            tuple(part_s(stage, stage.forward) for stage in problem.stages),
            tuple(part_s(s, s.input_grad) + extra for s, extra in zip(problem.stages, again, strict=True)),
            tuple(part_s(stage, stage.weight_grad) for stage in problem.stages),
            tuple(transfers),
        )

    def without_transfers(self) -> StepTimes:
        """Return the same with transfers that take no time."""
        return replace(self, transfer=tuple((edge, 0.0) for edge, _ in self.transfer))

    def action_s(self, action: Action) -> float:
        """Return the seconds of an action."""
        stage = action.stage
        if action.kind is ActionKind.FORWARD:
            return self.forward[stage]
        if action.kind is ActionKind.INPUT_GRAD:
            return self.input_grad[stage]
        if action.kind is ActionKind.WEIGHT_GRAD:
            return self.weight_grad[stage]
        return self.input_grad[stage] + self.weight_grad[stage] if action.kind is ActionKind.BACKWARD else 0.0


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


_Value = tuple[int, int, int, bool]
"""(stage that makes it, stage that reads it, micro-batch, whether a gradient)."""


def step_s(problem: PipelineProblem, schedule: Schedule, times: StepTimes) -> float:
    """Return the seconds of a step of compute actions. Raises LayoutError where an action waits for ever."""
    transfer = dict(times.transfer)
    arrived: dict[_Value, float] = {}
    edge_free: dict[tuple[int, int, bool], float] = defaultdict(float)
    at, free = [0] * schedule.num_ranks, [0.0] * schedule.num_ranks
    leaves = [[leaf for action in order for leaf in action.leaves] for order in schedule.actions]
    goes_on = True
    while goes_on:
        goes_on = False
        for rank, order in enumerate(leaves):
            while at[rank] < len(order):
                action = order[at[rank]]
                needs = _needs(problem, action)
                if any(value not in arrived for value in needs):
                    break
                start = max([free[rank], *(arrived[value] for value in needs)])
                end = free[rank] = start + times.action_s(action)
                for value, edge in _makes(problem, action):
                    key = (*edge, value[3])
                    edge_free[key] = max(end, edge_free[key]) + transfer[edge]
                    arrived[value] = edge_free[key]
                at[rank] += 1
                goes_on = True
    stuck = [rank for rank, order in enumerate(leaves) if at[rank] < len(order)]
    if stuck:
        raise LayoutError(f"pipeline rank {stuck[0]} waits for ever at {leaves[stuck[0]][at[stuck[0]]]}")
    return max(free)


def _needs(problem: PipelineProblem, action: Action) -> list[_Value]:
    stage, of = action.stage, action.micro_batch or 0
    if action.kind is ActionKind.FORWARD:
        return [(edge.source, stage, of, False) for edge in problem.edges_into(stage)]
    if action.kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRAD):
        return [(edge.target, stage, of, True) for edge in problem.edges_out_of(stage)]
    return []


def _makes(problem: PipelineProblem, action: Action) -> list[tuple[_Value, tuple[int, int]]]:
    stage, of = action.stage, action.micro_batch or 0
    if action.kind is ActionKind.FORWARD:
        edges = problem.edges_out_of(stage)
        return [((stage, edge.target, of, False), (edge.source, edge.target)) for edge in edges]
    if action.kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRAD):
        edges = problem.edges_into(stage)
        return [((stage, edge.source, of, True), (edge.source, edge.target)) for edge in edges]
    return []
