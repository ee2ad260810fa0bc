"""What `meshweave.pipeline` was called with: its schedule, its meshes, its options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshweave.algorithms.pipeline.actions import Action, ActionKind, Schedule
from meshweave.algorithms.pipeline.algorithm import PipelineAlgorithm, PipelineConfig
from meshweave.algorithms.pipeline.problem import PipelineProblem
from meshweave.algorithms.pipeline.torch_csv import schedule_from_csv
from meshweave.algorithms.table import algorithm
from meshweave.base.errors import DescriptionError, LayoutError, printable
from meshweave.describe.layout.mesh import Mesh
from meshweave.nn.dtensor import kind_text
from meshweave.nn.pipelining.stage_functions import LossFunction, TensorKind


@dataclass(frozen=True)
class PipelineOptions:
    """The arguments of `meshweave.pipeline`, checked; `meshweave.pipeline` documents each."""

    plan: PipelineAlgorithm | Schedule
    micro_batches: int
    loss_fn: LossFunction | None
    config: PipelineConfig
    recompute: frozenset[int]
    scale_grads: bool
    outputs: Mapping[int, Sequence[Tensor]]
    has_local_batch: bool
    trace: bool
    count_memory: bool


def plan_of(plan: str | Path | Schedule) -> PipelineAlgorithm | Schedule:
    """Return the schedule that a plan gives, or for the name of a pipeline algorithm the algorithm.

    A `Schedule` is returned as it is; a path, or text that ends in ".csv", is read as a CSV file of torch's.

    Raises:
        DescriptionError: there is no such file, or it is none of torch's schedules.
        UnsupportedError: there is no algorithm of that name.
        LayoutError: the algorithm is no schedule of a pipeline.
    """
    if isinstance(plan, Schedule):
        return plan
    if isinstance(plan, Path) or plan.endswith(".csv"):
        try:
            text = Path(plan).read_text()
        except OSError as error:
            raise DescriptionError(f"{plan}: {error.strerror or error}") from None
        return schedule_from_csv(text, str(plan))
    entry = algorithm(plan)
    if not isinstance(entry, PipelineAlgorithm):
        raise LayoutError(f"'{plan}' is no schedule of a pipeline")
    return entry


def micro_batches_of(plan: PipelineAlgorithm | Schedule, given: int | None) -> int:
    """Return the number of micro-batches: `given`, or that of a schedule if `given` is None.

    Raises LayoutError where `given` is None and the plan an algorithm, `given` is no whole number from 1 on, or
    the schedule has another number.
    """
    if given is None and isinstance(plan, PipelineAlgorithm):
        raise LayoutError(f"give `micro_batches` with the name of a schedule, '{plan.name}'")
    if given is not None and (not isinstance(given, int) or isinstance(given, bool) or given < 1):
        raise LayoutError(f"micro_batches is {printable(given)}; give a whole number from 1 on")
    if isinstance(plan, PipelineAlgorithm):
        return given  # type: ignore[return-value]
    if given not in (None, plan.num_micro_batches):
        raise LayoutError(
            f"the schedule has {plan.num_micro_batches} micro-batches, and micro_batches is {given}"
        )
    return plan.num_micro_batches


def kind_of_micro_batch(value: Any, micro_batches: int, parts: int, *, trains: bool) -> TensorKind:
    """Return the kind of one micro-batch over all data-parallel ranks, of a batch or target as a rank gives it.

    Args:
        value: a tensor with the samples as dim 0.
        micro_batches: the number of them in a step.
        parts: the number of data-parallel ranks that have rows of their own; 1 where each gives all rows.
        trains: whether gradients are computed.

    Raises:
        LayoutError: it is no tensor with rows, micro-batches do not divide these, or it is to have a gradient,
            which is neither scaled nor summed over ranks.
    """
    if not isinstance(value, Tensor) or not value.ndim:
        raise LayoutError(f"a batch or target is {kind_text(value)}; give tensors with a row for each sample")
    if trains and value.requires_grad:
        raise LayoutError(
            "a batch or target requires a gradient, and a step has those of parameters of stages alone: let the "
            "first stage compute it, or give it detached"
        )
    rows = len(value) * parts
    if not rows or rows % micro_batches:
        raise LayoutError(f"{micro_batches} micro-batches do not divide a batch of {rows} rows")
    return TensorKind((rows // micro_batches, *value.shape[1:]), value.dtype)


def check_stage_numbers(name: str, given: Iterable[int], num_stages: int) -> None:
    """Raise LayoutError where a stage number in `given` is not one of 0 to `num_stages` - 1.

    `name` is the argument that gave them, for the error.
    """
    for stage in given:
        if stage not in range(num_stages):
            raise LayoutError(
                f"{name} names stage {printable(stage)}; there are stages 0 to {num_stages - 1}"
            )


def meshes_of(meshes: DeviceMesh | Sequence[Mesh]) -> tuple[Mesh, ...]:
    """Return the given meshes as they are; of a DeviceMesh one mesh for each index along its first dim.

    Each is the mesh of one pipeline rank, with axes named as the other dims: a DeviceMesh (2, 4) with dims ("pp",
    "tp") -> 2 meshes of 4 ranks with axis "tp".
    """
    if not isinstance(meshes, DeviceMesh):
        return tuple(meshes)
    ranks = meshes.mesh.reshape(meshes.mesh.shape[0], -1).tolist()
    shape = tuple(meshes.mesh.shape[1:]) or (1,)
    names = meshes.mesh_dim_names or tuple(f"d{dim}" for dim in range(meshes.ndim))
    axes = tuple(names[1:]) or ("x",)
    return tuple(Mesh(f"p{number}", shape, axes, tuple(each)) for number, each in enumerate(ranks))


def schedule_of(
    plan: PipelineAlgorithm | Schedule, problem: PipelineProblem, config: PipelineConfig
) -> Schedule:
    """Return a given schedule, or the one an algorithm writes, with pipeline ranks numbered as in the problem.

    Raises LayoutError where the plan does not take the problem, or puts stages on one pipeline rank whose modules
    are on different ones, or the other way round.
    """
    if isinstance(plan, PipelineAlgorithm):
        refusal = plan.refusal(problem)
        if refusal is not None:
            raise LayoutError(f"{plan.name}: {refusal}")
        return plan.schedule(problem, config)
    if plan.num_stages != problem.num_stages:
        raise LayoutError(
            f"the schedule has {plan.num_stages} stages, and there are {problem.num_stages} modules"
        )
    number_of: dict[int, int] = {}
    for stage, (planned, placed) in enumerate(zip(plan.stage_ranks, problem.stage_ranks, strict=True)):
        if number_of.setdefault(planned, placed) != placed:
            other = plan.stage_ranks.index(planned)
            raise LayoutError(
                f"the schedule has stages {other} and {stage} on one pipeline rank, and the modules of these "
                "stages are on different ranks"
            )
    if len(set(number_of.values())) < len(number_of):
        raise LayoutError("the schedule has stages on different pipeline ranks whose modules are on one")
    actions: list[tuple[Action, ...]] = [()] * len(number_of)
    for planned, placed in number_of.items():
        actions[placed] = plan.actions[planned]
    return Schedule(problem.stage_ranks, plan.num_micro_batches, tuple(actions))


def forwards_of(schedule: Schedule) -> Schedule:
    """Return the schedule without training: each rank's forwards in order, then a RESHARD action per stage.

    The RESHARD, after the last forward of a stage, says when data-parallel ranks may sum the losses: forwards add
    to the losses, which the program does not know.
    """
    actions = []
    for order in schedule.actions:
        leaves = [leaf for action in order for leaf in action.leaves]
        forwards = [leaf for leaf in leaves if leaf.kind is ActionKind.FORWARD]
        stages = dict.fromkeys(leaf.stage for leaf in forwards)
        actions.append((*forwards, *(Action(ActionKind.RESHARD, stage) for stage in stages)))
    return replace(schedule, actions=tuple(actions))
