"""Schedules by name and numbers: what the command line offers."""

from __future__ import annotations

from dataclasses import dataclass

from meshweave.algorithms.pipeline.action_times import ActionTimes
from meshweave.algorithms.pipeline.actions import Schedule, folded, looped
from meshweave.algorithms.pipeline.algorithm import PipelineConfig
from meshweave.algorithms.pipeline.problem import Edge, PartCost, PipelineProblem, Stage
from meshweave.algorithms.pipeline.zb_auto import StashLimit, zb_auto
from meshweave.algorithms.pipeline.zero_bubble import ZeroBubbleAuto
from meshweave.algorithms.table import SCHEDULES
from meshweave.base.errors import LayoutError, UnsupportedError, did_you_mean, printable
from meshweave.describe.layout.mesh import Mesh


@dataclass(frozen=True)
class ScheduleRequest:
    """The sizes of a schedule that `schedule_by_name` makes.

    Attributes:
        num_stages: stages of the model.
        num_micro_batches: micro-batches of a step.
        per_rank: stages per rank; 0: one if the schedule accepts that, else two.
        delay: micro-batches by which weight gradients are put off, for `eager-1f1b-delayed`.
        stash_rest: share (0 to 1) of a micro-batch's stash that stays from the input gradient to the weight
            gradient; for the automatic schedules `zb-1p` and `zb-2p`.
    """

    num_stages: int
    num_micro_batches: int
    per_rank: int = 0
    delay: int = 0
    stash_rest: float = 1.0


def schedule_names() -> tuple[str, ...]:
    """Return the names of the schedules that `schedule_by_name` makes."""
    return tuple(SCHEDULES)


def schedule_by_name(name: str, request: ScheduleRequest, times: ActionTimes) -> Schedule:
    """Return the schedule called `name`, on one chip per rank.

    Args:
        name: a name of `schedule_names`.
        request: the sizes.
        times: the ticks of each of the request's `num_stages` stages, by which some schedules order actions.

    Raises:
        UnsupportedError: there is no such schedule.
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
            if isinstance(entry, ZeroBubbleAuto):
                limit = _limit(entry.factor * problem.num_ranks, request.stash_rest)
                return zb_auto(request.num_micro_batches, times, limit)
            return entry.schedule(problem, PipelineConfig(delay=request.delay))
        reason = reason or refusal
    raise LayoutError(f"{entry.title}: {reason}")


def _limit(stashes: int, rest: float) -> StashLimit:
    """Return a limit of so many whole stashes, in thousandths of one."""
    return StashLimit(1000 * stashes, 1000, round(1000 * rest))


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
