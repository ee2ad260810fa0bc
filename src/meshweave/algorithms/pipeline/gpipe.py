"""GPipe (Huang et al., NeurIPS '19): all forwards of a step, then all backwards.

A stage keeps the stashes of all M micro-batches. The bubble is (P - 1) / (M + P - 1) of the time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from meshweave.algorithms.pipeline.action_times import ActionTimes
from meshweave.algorithms.pipeline.actions import Action, ActionKind, Schedule
from meshweave.algorithms.pipeline.algorithm import PipelineAlgorithm, PipelineConfig
from meshweave.algorithms.pipeline.least_makespan import least_of_looped
from meshweave.algorithms.pipeline.problem import PipelineProblem


class GPipe(PipelineAlgorithm):
    """Runs all forwards, then all backwards, of micro-batches in the same order.

    A rank with several stages runs them one by one, backward the last one first.
    """

    name = "gpipe"
    title = "GPipe"
    source = "Huang et al., GPipe, NeurIPS '19"
    is_searched = False  # never faster than 1F1B, and keeps more
    stages_per_rank = (1,)
    names_elsewhere: ClassVar[Mapping[str, str]] = {"torch": "GPipe"}
    repeats = waits_at_ends = forwards_first = True

    def schedule(self, problem: PipelineProblem, config: PipelineConfig) -> Schedule:
        """Return the schedule of all forwards of each rank, stage by stage, then all backwards, last stage first.

        Each stage takes the micro-batches from 0 on, both times. `config` is not read.
        """
        count = problem.micro_batches
        orders = []
        for rank in range(problem.num_ranks):
            stages = problem.stages_of(rank)
            order = [Action(ActionKind.FORWARD, stage, m) for stage in stages for m in range(count)]
            order += [
                Action(ActionKind.BACKWARD, stage, m) for stage in reversed(stages) for m in range(count)
            ]
            orders.append(tuple(order))
        return Schedule(problem.stage_ranks, count, tuple(orders))

    def num_stashes(self, num_ranks: int, per_rank: int, micro_batches: int) -> tuple[int, ...]:
        """Return for each rank the most stashes that it holds at once: `micro_batches` x `per_rank`."""
        return (micro_batches * per_rank,) * num_ranks

    def takes(self, num_ranks: int, per_rank: int, micro_batches: int) -> bool:
        """Return True: the schedule accepts any numbers of ranks, stages per rank and micro-batches."""
        return True

    def least_makespan(self, num_ranks: int, micro_batches: int, times: ActionTimes) -> int:
        """Return a lower bound of a step's makespan in the ticks of `times`.

        It is the largest sum of a rank's fill (the first micro-batch on its way there), work, and drain (the last
        one on its way back).
        """
        return least_of_looped(num_ranks, micro_batches, times)
