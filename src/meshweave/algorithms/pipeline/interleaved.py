"""Interleaved 1F1B (Narayanan et al., Megatron-LM, SC '21): stages dealt out in turn, several on a rank.

With V stages on each of P ranks the bubble is 1 / V of that of 1F1B, for V times the transfers. Micro-batches go
through in rounds: a rank runs its first stage on all micro-batches of a round, then its second stage, and so on.
The rounds are those of torch's ScheduleInterleaved1F1B, max(1, M // P) of them; where they do not divide the
micro-batches, which torch refuses, the first rounds have one more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from meshweave.algorithms.pipeline.action_times import ActionTimes
from meshweave.algorithms.pipeline.actions import Action, ActionKind, Schedule, looped
from meshweave.algorithms.pipeline.algorithm import PipelineAlgorithm, PipelineConfig
from meshweave.algorithms.pipeline.least_makespan import least_of_looped
from meshweave.algorithms.pipeline.problem import PipelineProblem


class InterleavedOneForwardOneBackward(PipelineAlgorithm):
    """1F1B over several stages per rank, dealt out in turn: stage s is on pipeline rank s mod P."""

    name = "interleaved-1f1b"
    title = "Interleaved 1F1B"
    source = "Narayanan et al., Megatron-LM, SC '21"
    is_searched = False  # 1F1B with several stages a rank is this one
    stages_per_rank = (2, 3, 4, 6, 8, 12)
    repeats = waits_at_ends = True
    names_elsewhere: ClassVar[Mapping[str, str]] = {"torch": "Interleaved1F1B", "megatron-lm": "interleaved"}

    def refusal(self, problem: PipelineProblem) -> str | None:
        """Return why the problem does not fit, if its stages are not dealt out to ranks in turn; else None."""
        per_rank = problem.num_stages // problem.num_ranks
        if problem.stage_ranks != looped(problem.num_ranks, per_rank):
            return f"its stages are dealt out in turn, not on pipeline ranks {problem.stage_ranks}"
        return None

    def schedule(self, problem: PipelineProblem, config: PipelineConfig) -> Schedule:
        """Return 1F1B over the stages of each rank, in rounds of about as many micro-batches as ranks."""
        ranks, count = problem.num_ranks, problem.micro_batches
        rounds = round_sizes(count, ranks)
        orders = tuple(_order(rank, problem.stages_of(rank), ranks, rounds) for rank in range(ranks))
        return Schedule(problem.stage_ranks, count, orders)

    def takes(self, num_ranks: int, per_rank: int, micro_batches: int) -> bool:
        """Return whether `num_ranks` divides the micro-batches, as Megatron-LM requires (section 2.2).

        `per_rank` makes no difference.
        """
        return micro_batches % num_ranks == 0

    def num_stashes(self, num_ranks: int, per_rank: int, micro_batches: int) -> tuple[int, ...]:
        """Return for each rank the most stashes that it holds at once: its forwards before its first backward.

        A stash is what one of its `per_rank` stages keeps of a micro-batch.
        """
        ahead = (per_rank - 1) * round_sizes(micro_batches, num_ranks)[0] + 1
        most = micro_batches * per_rank
        return tuple(min(most, ahead + 2 * (num_ranks - 1 - rank)) for rank in range(num_ranks))

    def least_makespan(self, num_ranks: int, micro_batches: int, times: ActionTimes) -> int:
        """Return a lower bound of a step's makespan in the ticks of `times`.

        It is the largest sum of a rank's fill (the first micro-batch on its way there), work, and drain (the last
        one on its way back).
        """
        return least_of_looped(num_ranks, micro_batches, times)


INTERLEAVED_1F1B = InterleavedOneForwardOneBackward()


def round_sizes(micro_batches: int, ranks: int) -> list[int]:
    """Return the number of micro-batches in each of max(1, micro_batches // ranks) rounds.

    It is `ranks` in each where that divides the micro-batches. Else the first rounds have one more than the last
    ones, as 7 micro-batches on 3 ranks give [4, 3]; fewer micro-batches than ranks are one round.
    """
    rounds = max(1, micro_batches // ranks)
    size, left = divmod(micro_batches, rounds)
    return [size + (number < left) for number in range(rounds)]


def _order(rank: int, stages: tuple[int, ...], ranks: int, rounds: list[int]) -> tuple[Action, ...]:
    """Return the actions of a rank: forwards of a warm-up, then one forward and one backward in turn."""
    forwards, backwards, first = list[Action](), list[Action](), 0
    for size in rounds:
        of_round = range(first, first + size)
        forwards += [Action(ActionKind.FORWARD, stage, m) for stage in stages for m in of_round]
        backwards += [Action(ActionKind.BACKWARD, stage, m) for stage in reversed(stages) for m in of_round]
        first += size
    ahead = (len(stages) - 1) * rounds[0] + 2 * (ranks - 1 - rank)
    ahead = min(ahead, len(forwards))
    order = forwards[:ahead]
    for number, backward in enumerate(backwards):
        order += forwards[ahead + number : ahead + number + 1]
        order.append(backward)
    return tuple(order)
