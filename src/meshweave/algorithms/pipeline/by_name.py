"""Schedules by name and numbers: what the command line offers."""

from __future__ import annotations

from meshweave.algorithms.pipeline.action_times import ActionTimes
from meshweave.algorithms.pipeline.actions import Schedule, folded, looped
from meshweave.algorithms.pipeline.algorithm import ScheduleRequest as ScheduleRequest
from meshweave.algorithms.pipeline.problem import Edge, PartCost, PipelineProblem, Stage
from meshweave.algorithms.table import SCHEDULES
from meshweave.base.errors import LayoutError, UnsupportedError, did_you_mean, printable
from meshweave.describe.layout.mesh import Mesh


def schedule_by_name(name: str, request: ScheduleRequest, times: ActionTimes) -> Schedule:
    """Return the schedule called `name`, on one chip per rank.

    Args:
        name: a name in `SCHEDULES`.
        request: the sizes.
        times: the ticks of each of the request's `num_stages` stages, by which some schedules order actions.

    Raises:
        UnsupportedError: there is no such schedule, or it has over `most_forwards` forwards.
        LayoutError: the schedule does not take these numbers of stages or micro-batches, `per_rank` does not
            divide the stages, or times are of another number of stages.
    """
    if len(times.forward) != request.num_stages:
        raise LayoutError(f"times are of {len(times.forward)} stages, and {request.num_stages} are asked for")
    entry = SCHEDULES.get(name)
    if entry is None:
        raise UnsupportedError(
            f"there is no schedule '{printable(name)}'{did_you_mean(name, SCHEDULES)}; there are "
            f"{', '.join(SCHEDULES)}; a file is named with its .csv"
        )
    reason = ""
    for placement in _placements(request):
        problem = _problem(placement, request.num_micro_batches, times)
        refusal = entry.refusal(problem)
        if refusal is None:
            entry.require_writable(problem)
            return entry.requested(problem, request, times)
        reason = reason or refusal
    raise LayoutError(f"{entry.title}: {reason}")


def _placements(request: ScheduleRequest) -> list[tuple[int, ...]]:
    """Return the ranks of stages that a schedule may want. Raises LayoutError where there are none."""
    stages, placements = request.num_stages, []
    for per_rank in (request.per_rank,) if request.per_rank else (1, 2):
        if per_rank > 0 and stages % per_rank == 0:
            placements.append(looped(stages // per_rank, per_rank))
            if per_rank == 2:
                placements.append(folded(stages // 2))
    if not placements:
        raise LayoutError(f"{stages} stages are not a multiple of {request.per_rank} a rank")
    return list(dict.fromkeys(placements))


def _problem(placement: tuple[int, ...], num_micro_batches: int, times: ActionTimes) -> PipelineProblem:
    """Return stages whose FLOPs are the ticks of their actions."""
    meshes = [Mesh.of(f"p{rank}", (1,), ("x",), rank) for rank in range(max(placement, default=-1) + 1)]
    parts = zip(times.forward, times.input_grad, times.weight_grad, placement, strict=True)
    stages = tuple(
        Stage(meshes[rank], PartCost(forward), PartCost(input_grad), PartCost(weight_grad))
        for forward, input_grad, weight_grad, rank in parts
    )
    edges = tuple(Edge(stage, stage + 1) for stage in range(len(stages) - 1))
    return PipelineProblem(stages, edges, num_micro_batches)
