"""GPipe (Huang et al., NeurIPS '19): all forwards of a step, then all backwards.

A stage keeps the stashes of all M micro-batches. The bubble is (P - 1) / (M + P - 1) of the time.
"""

from __future__ import annotations

from meshweave.algorithms.pipeline.actions import Action, ActionKind, Schedule
from meshweave.algorithms.pipeline.algorithm import PipelineAlgorithm, PipelineConfig
from meshweave.algorithms.pipeline.problem import PipelineProblem


class GPipe(PipelineAlgorithm):
    """All forwards, then all backwards in the same order. A rank with several stages runs them one by one."""

    name = "gpipe"
    title = "GPipe"
    source = "Huang et al., GPipe, NeurIPS '19"

    def schedule(self, problem: PipelineProblem, config: PipelineConfig) -> Schedule:
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
