"""1F1B (Narayanan et al., PipeDream, SOSP '19): after a warm-up, a stage alternates forwards and backwards.

Stage i of P runs P - i forwards before its first backward, so that it keeps P - i stashes however many
micro-batches there are. The bubble is that of GPipe.
"""

from __future__ import annotations

from collections.abc import Callable

from meshweave.algorithms.pipeline.actions import Action, ActionKind, Schedule
from meshweave.algorithms.pipeline.algorithm import PipelineAlgorithm, PipelineConfig
from meshweave.algorithms.pipeline.problem import PipelineProblem


class OneForwardOneBackward(PipelineAlgorithm):
    """One stage on each pipeline rank."""

    name = "1f1b"
    title = "1F1B"
    source = "Narayanan et al., PipeDream, SOSP '19"

    def refusal(self, problem: PipelineProblem) -> str | None:
        return several_stages(problem)

    def schedule(self, problem: PipelineProblem, config: PipelineConfig) -> Schedule:
        return alternating(problem, lambda stage: problem.num_stages - stage)


def several_stages(problem: PipelineProblem) -> str | None:
    """Return why a schedule of one stage per pipeline rank does not fit, or None."""
    if problem.num_ranks < problem.num_stages:
        return f"it has one stage on each pipeline rank, not {problem.num_stages} on {problem.num_ranks}"
    return None


def alternating(
    problem: PipelineProblem, num_first: Callable[[int], int], delay: int | None = None
) -> Schedule:
    """Return the schedule in which stage i runs `num_first(i)` forwards, then a backward after each forward.

    Args:
        problem: the pipeline, one stage on each rank.
        num_first: the forwards of a stage before its first backward, at most all.
        delay: None for full backwards; else weight gradients are actions of their own, and each follows the input
            gradient `delay` micro-batches later.
    """
    count, orders = problem.micro_batches, []
    for stage in range(problem.num_stages):
        first = min(count, num_first(stage))
        order = [Action(ActionKind.FORWARD, stage, m) for m in range(first)]
        for m in range(count):
            order += _backward(stage, m, delay)
            if first + m < count:
                order.append(Action(ActionKind.FORWARD, stage, first + m))
        for m in range(max(count - (delay or 0), 0), count):
            order.append(Action(ActionKind.WEIGHT_GRAD, stage, m))
        orders.append(tuple(order))
    return Schedule(problem.stage_ranks, count, tuple(orders))


def _backward(stage: int, micro_batch: int, delay: int | None) -> list[Action]:
    if delay is None:
        return [Action(ActionKind.BACKWARD, stage, micro_batch)]
    actions = [Action(ActionKind.INPUT_GRAD, stage, micro_batch)]
    if micro_batch >= delay:
        actions.append(Action(ActionKind.WEIGHT_GRAD, stage, micro_batch - delay))
    return actions
