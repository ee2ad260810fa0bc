"""1F1B (Narayanan et al., PipeDream, SOSP '19): after a warm-up, a stage alternates forwards and backwards.

Stage i of P runs P - i forwards before its first backward, so that it keeps P - i stashes however many
micro-batches there are. The bubble is that of GPipe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import numpy as np

from meshweave.algorithms.pipeline.action_table import IntArray
from meshweave.algorithms.pipeline.action_times import ActionTimes
from meshweave.algorithms.pipeline.actions import Action, ActionKind, Schedule
from meshweave.algorithms.pipeline.algorithm import PipelineAlgorithm, PipelineConfig
from meshweave.algorithms.pipeline.interleaved import INTERLEAVED_1F1B
from meshweave.algorithms.pipeline.least_makespan import longest_of_1f1b
from meshweave.algorithms.pipeline.problem import PipelineProblem

# --- slots ------------------------------------------------------------------------------------------------

# When the ranks of 1F1B are done, slot by slot and without a graph: for pipelines of many ranks.
#
# If all actions took one slot, rank i of P would run the forward of micro-batch m in slot i + m as long as
# that is before P, else in slot i + 2 m, and the backward in slot 2 P - 1 - i + 2 m. Whatever actions take,
# each waits for the one before it on its rank, and for what the rank before (forward) or after (backward) did
# last.


def ends_of_1f1b(micro_batches: int, times: ActionTimes) -> tuple[int, ...]:
    """Return for each rank the tick at which it ends a step of 1F1B with one stage per rank.

    All ranks advance together, one slot (a place for one action in a step of equal actions) after the other. A
    whole backward takes both gradients in full: `times.saved` is not subtracted.
    """
    size, most = len(times.forward), 2 * (micro_batches - 1)
    forward, input_grad, weight_grad = (
        np.array(each, np.int64) for each in (times.forward, times.input_grad, times.weight_grad)
    )
    backward, delay = input_grad + weight_grad, np.array((*times.transfer, 0), np.int64)
    ends = np.zeros(size + 2, np.int64)  # of each rank, between two that are always done
    ends[1:-1] = times.earliest or 0
    sends = np.zeros(size + 1, np.int64)  # what each rank waits for a value from the one before
    sends[1:-1] = delay[:-1]
    for slot in range(most + 2 * size):
        before = ends.copy()
        if slot < size:
            ranks = slice(max(0, slot - micro_batches + 1), slot + 1)
        else:
            least = max(2 * size - slot, slot - most, 0)
            ranks = slice(least + (least - slot) % 2, size, 2)
        _advance(ends, before, ranks, -1, sends[:-1], forward)
        least, limit = 2 * size - 1 - slot, most + 2 * size - slot
        least = max(least, (slot + 1) % 2)
        _advance(ends, before, slice(least, min(limit, size), 2), 1, sends[1:], backward)
    return tuple(ends[1:-1].tolist())


def _advance(
    ends: IntArray, before: IntArray, ranks: slice, towards: int, delays: IntArray, ticks: IntArray
) -> None:
    """Advance ranks by one action each, which waits for their neighbour on one side."""
    if ranks.start >= ranks.stop:
        return
    own = slice(ranks.start + 1, ranks.stop + 1, ranks.step)
    other = slice(own.start + towards, own.stop + towards, ranks.step)
    ends[own] = np.maximum(before[own], before[other] + delays[ranks]) + ticks[ranks]


# --- one f one b ------------------------------------------------------------------------------------------


class OneStageEach(PipelineAlgorithm):
    """The base of schedules with one stage on each pipeline rank."""

    def refusal(self, problem: PipelineProblem) -> str | None:
        """Return why the problem does not fit, if a pipeline rank holds several stages; else None."""
        if problem.num_ranks < problem.num_stages:
            return f"it has one stage on each pipeline rank, not {problem.num_stages} on {problem.num_ranks}"
        return None


class OneForwardOneBackward(OneStageEach):
    """1F1B: a few forwards, then a forward and a backward in turn; one stage on each pipeline rank."""

    name = "1f1b"
    title = "1F1B"
    source = "Narayanan et al., PipeDream, SOSP '19"
    stages_per_rank = (1, *INTERLEAVED_1F1B.stages_per_rank)
    repeats = waits_at_ends = True
    names_elsewhere: ClassVar[Mapping[str, str]] = {"torch": "1F1B", "megatron-lm": "1f1b"}

    def schedule(self, problem: PipelineProblem, config: PipelineConfig) -> Schedule:
        """Return 1F1B: stage i of P runs P - i forwards, then a backward and a forward in turn."""
        return alternating(problem, lambda stage: problem.num_stages - stage)

    def for_stages(self, per_rank: int) -> PipelineAlgorithm:
        """Return interleaved 1F1B for several stages per rank, and this schedule for one stage."""
        return INTERLEAVED_1F1B if per_rank > 1 else self

    def takes(self, num_ranks: int, per_rank: int, micro_batches: int) -> bool:
        """Return True for any number of micro-batches; `per_rank` is not read, see `for_stages`."""
        return True

    def num_stashes(self, num_ranks: int, per_rank: int, micro_batches: int) -> tuple[int, ...]:
        """Return for each rank i of P the most stashes that it holds at once: P - i, at most `micro_batches`."""
        return tuple(min(micro_batches, num_ranks - rank) for rank in range(num_ranks))

    def least_makespan(self, num_ranks: int, micro_batches: int, times: ActionTimes) -> int:
        """Return a lower bound of a step's makespan in the ticks of `times`: the longest of some action paths."""
        return longest_of_1f1b(micro_batches, times)

    def ends(self, micro_batches: int, times: ActionTimes) -> tuple[int, ...] | None:
        """Return for each rank the tick at which it ends a step, without subtracting `times.saved`.

        None for fewer than 16 ranks, whose graph is timed as fast.
        """
        return ends_of_1f1b(micro_batches, times) if len(times.forward) >= _MANY_RANKS else None


_MANY_RANKS = 16
"""So many ranks are timed faster slot by slot than by their graph."""


def alternating(
    problem: PipelineProblem, num_first: Callable[[int], int], delay: int | None = None
) -> Schedule:
    """Return the schedule in which stage i runs `num_first(i)` forwards, then a backward and a forward in turn.

    Args:
        problem: the pipeline, one stage on each rank.
        num_first: gives the number of forwards of a stage before its first backward; more than there are
            micro-batches count as all.
        delay: None for whole backwards; else the weight gradient of micro-batch m is an action of its own after
            the input gradient of micro-batch m + `delay`, or at the end.
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
