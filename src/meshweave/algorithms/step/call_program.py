"""Write a step as one Program whose layers are calls: pipelines of all replicas, messages and collectives.

Each layer is a stage of a pipeline (`algorithms.pipeline`), so that its gradients are reduced as soon as its
backward part ends, in the lane of parameters. A call takes as long as the estimate of its layer, with the
communication inside the layer. Messages between pipeline ranks and collectives of replicas are ops, so that
simulation shares links between them. The gradient of a table that the first and the last pipeline rank share is
not summed here.

Ranks of a tensor-parallel group do the same at the same time, each with its own chip, port and share of NICs.
Where they are neighbours in a host and the NICs of a host divide evenly over them, one of them is simulated in a
host with that many times fewer chips and NICs: a fold, which takes as long to the picosecond.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from meshweave.algorithms.pipeline.action_times import ActionTimes
from meshweave.algorithms.pipeline.actions import Action, ActionKind, Schedule
from meshweave.algorithms.pipeline.by_name import ScheduleRequest, schedule_by_name
from meshweave.algorithms.pipeline.problem import Edge, PartCost, PipelineProblem, Stage
from meshweave.algorithms.pipeline.program import pipeline_program
from meshweave.algorithms.step.laid import LaidStep
from meshweave.algorithms.step.layers import ends_time
from meshweave.algorithms.step.memory import boundary_bytes, layer_parameters, table_parameters
from meshweave.algorithms.step.placement import replica_groups, sharding_groups
from meshweave.algorithms.step.problem import Parallelism
from meshweave.algorithms.step.result import Step
from meshweave.base.errors import UnsupportedError
from meshweave.cost.calls import flops_per_s
from meshweave.cost.machine import Machine
from meshweave.describe.layout import Replicate, Shard
from meshweave.describe.layout.layouts import Placement
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.machine.network import HostsNetwork
from meshweave.ir.program import Program

_LAST = (ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD)


def lay_call_step(step: Step, *, folds: bool = True) -> LaidStep:
    """Return the program of a step whose layers are calls, and its machine.

    Args:
        folds: whether one rank of each tensor-parallel group stands for all, where they are alike.

    Raises:
        UnsupportedError: ZeRO-2 or 3, ZeRO-1 over ranks that are not evenly apart, a share of overlap between 0
            and 1, or transfers that ranks wait for.
    """
    fold = _fold(step) if folds else 1
    program = _program(step, fold)
    machine = Machine.of(_folded(step.problem.priced_cluster, fold), program, logical=True)
    return LaidStep(program, machine, fold)


def _fold(step: Step) -> int:
    """Return for how many tensor-parallel ranks one simulated rank can stand."""
    p, network = step.parallelism, step.problem.cluster.network
    size = p.tensor_size
    if not isinstance(network, HostsNetwork) or p.stride("tensor") > 1 or step.stages.sends_parts:
        return 1
    return 1 if network.chips_per_host % size or network.nics_per_host % size else size


def _folded(cluster: Cluster, fold: int) -> Cluster:
    """Return a cluster whose hosts have a `fold`-th of the chips and NICs."""
    network = cluster.network
    if fold == 1 or not isinstance(network, HostsNetwork):
        return cluster
    chips, nics = network.chips_per_host // fold, network.nics_per_host // fold
    return replace(cluster, network=replace(network, chips_per_host=chips, nics_per_host=nics))


def _program(step: Step, fold: int) -> Program:
    problem, schedule = step_pipeline(step, fold)
    return pipeline_program(problem, schedule, title="step")


def step_pipeline(step: Step, fold: int = 1) -> tuple[PipelineProblem, Schedule]:
    """Return the pipeline of a step, whose stages are layers, and the actions of its ranks with reductions.

    Each rank stands for `fold` tensor-parallel ranks. Raises UnsupportedError, as `lay_call_step` does.
    """
    p, stack = step.parallelism, step.problem.stack
    if p.zero >= 2:
        raise UnsupportedError(f"the program of a step has zero 0 or 1, not {p.zero}")
    if p.zero == 1 and len(sharding_groups(p)[0]) > 1:
        raise UnsupportedError(
            "the program of a step shards over one group; put context beside data in the order"
        )
    if stack.overlap not in (0, 1) or stack.blocks_transfers:
        raise UnsupportedError(
            "the program of a step overlaps all of its reductions or none, and its transfers"
        )
    stages, first_layers = _stages(step, _meshes(p, fold))
    edges = tuple(_edge(step, number) for number in range(len(stages) - 1))
    problem = PipelineProblem(stages, edges, step.num_micro_batches, rows=p.replicas)
    return problem, _schedule(step, problem, first_layers)


def _meshes(p: Parallelism, fold: int) -> list[Mesh]:
    """Return the mesh of each pipeline rank: axes for groups of replicas, and one for tensor parallelism."""
    axes = [(f"replica{number}", size, stride // fold) for number, (size, stride) in enumerate(_groups(p))]
    axes = sorted([*axes, ("tensor", p.tensor_size // fold, p.stride("tensor"))], key=lambda axis: -axis[2])
    shape = tuple(size for _, size, _ in axes)
    names = tuple(name for name, *_ in axes)
    meshes = []
    for rank in range(p.pipeline):
        base = rank * p.stride("pipeline") // fold
        places = product(*(range(0, size * stride, stride) for _, size, stride in axes))
        ranks = tuple(base + sum(place) for place in places)
        meshes.append(Mesh(f"p{rank}", shape, names, ranks))
    return meshes


def _groups(p: Parallelism) -> tuple[tuple[int, int], ...]:
    """Return (size, stride) of the groups of replicas, those that shard first."""
    return tuple(group for groups in sharding_groups(p) for group in groups) if p.zero else replica_groups(p)


def _stages(step: Step, meshes: list[Mesh]) -> tuple[tuple[Stage, ...], list[int]]:
    """Return a stage for each layer, or for an end without layers, and the first one of each stage of the step."""
    problem, p = step.problem, step.parallelism
    ranks, layer = step.stages.stage_ranks, step.stages.layer
    first, last = ends_time(problem, p)
    rate = flops_per_s(problem.cluster.chip, "", problem.dtype)
    weights, table = layer_parameters(problem, p), table_parameters(problem, p)
    stages: list[Stage] = []
    starts: list[int] = []
    for number, count in enumerate(step.stage_layers):
        mesh = meshes[ranks[number]]
        starts.append(len(stages))
        for place in range(max(count, 1)):
            times = [layer.forward.total_s, layer.backward.total_s] if count else [0.0, 0.0]
            again_s, parameters = (layer.recompute.total_s, weights) if count else (0.0, 0)
            ends = [first] if number == 0 and place == 0 else []
            ends += [last] if number == len(step.stage_layers) - 1 and place == max(count, 1) - 1 else []
            for end in ends:
                times = [times[0] + end.forward.total_s, times[1] + end.backward.total_s]
                parameters += table
            forward, input_grad, weight_grad = (
                PartCost(max(round(seconds * rate), 1))
                for seconds in (times[0], times[1] / 2 + again_s, times[1] / 2)
            )
            stages.append(
                Stage(
                    mesh, forward, input_grad, weight_grad, _divided(parameters, p),
                    data_axes=tuple(f"replica{group}" for group in range(len(_groups(p)))),
                    is_sharded=p.zero == 1 and p.shards > 1, dtype=problem.dtype,
                    parameter_dtype=problem.dtype, gradient_dtype=problem.gradient_dtype,
                )
            )  # fmt: skip
    return tuple(stages), starts


def _divided(parameters: int, p: Parallelism) -> int:
    """Return a number of parameters that divides over replicas, at least one for each."""
    return max(-(-parameters // p.replicas), 1) * p.replicas


def _edge(step: Step, source: int) -> Edge:
    """Return the edge that carries the residual from a layer to the next, one row for each replica.

    Tensor-parallel ranks send equal sizes: each its own part of the residual, or a part of what all of them have.
    """
    problem, p = step.problem, step.parallelism
    elements = -(-boundary_bytes(problem, p) // problem.item_bytes)
    own: Placement = Replicate()
    if step.stages.sends_parts:
        elements, own = -(-elements // p.tensor_size) * p.tensor_size, Shard(1)
    placements = tuple(own if axis == "tensor" else Shard(0) for axis in _meshes(p, 1)[0].axes)
    return Edge(source, source + 1, (elements,), placements, placements, problem.dtype)


def _schedule(step: Step, problem: PipelineProblem, starts: list[int]) -> Schedule:
    """Return the schedule of the step with each action once for each layer, and with reductions."""
    p = step.parallelism
    name = p.schedule_entry.name
    times: ActionTimes = step.stages.action_times()
    request = ScheduleRequest(p.num_stages, step.num_micro_batches, p.virtual_stages)
    whole = schedule_by_name(name, request, times)
    stops = [*starts[1:], problem.num_stages]
    orders = []
    for order in whole.actions:
        actions = [each for action in order for each in _of_layers(action, starts, stops)]
        if p.replicas > 1:
            beside = step.problem.stack.overlap == 1
            actions = list(_with_reductions(actions)) if beside else _gathered_first(actions)
        orders.append(tuple(actions))
    return Schedule(problem.stage_ranks, whole.num_micro_batches, tuple(orders))


def _of_layers(action: Action, starts: list[int], stops: list[int]) -> Iterator[Action]:
    """Yield an action of a stage once for each of its layers: in order for a forward, else in reverse."""
    if action.parts:
        raise UnsupportedError(f"the program of a step has no actions beside each other, such as {action}")
    layers = range(starts[action.stage], stops[action.stage])
    for layer in layers if action.kind is ActionKind.FORWARD else reversed(layers):
        yield replace(action, stage=layer)


def _gathered_first(actions: list[Action]) -> list[Action]:
    """Return actions after gathers of all weights, the first layer's last, so that all are waited for."""
    layers = sorted({action.stage for action in actions}, reverse=True)
    return [*(Action(ActionKind.UNSHARD, layer) for layer in layers), *actions]


def _with_reductions(actions: list[Action]) -> Iterator[Action]:
    """Yield actions with the reduction of each layer's gradients after its last micro-batch."""
    last = {action.stage: number for number, action in enumerate(actions) if action.kind in _LAST}
    for number, action in enumerate(actions):
        yield action
        if last.get(action.stage) == number:
            yield Action(ActionKind.REDUCE_GRAD, action.stage)
