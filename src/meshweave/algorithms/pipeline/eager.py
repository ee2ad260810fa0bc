"""Eager-1F1B (Zhuang et al., AlpaComm, MLSys '23, section 4): 1F1B with forwards that run ahead.

Stage i of P runs min(M, 2 (P - i) - 1) forwards before its first backward, stages counted from 0. In 1F1B a stage
needs an activation as soon as it is made; here another micro-batch stands between, so that its transfer is hidden.
It takes P - i - 1 stashes more than 1F1B. Gradients are not hidden: see `delayed`.
"""

from __future__ import annotations

from meshweave.algorithms.pipeline.actions import Schedule
from meshweave.algorithms.pipeline.algorithm import PipelineConfig
from meshweave.algorithms.pipeline.one_f_one_b import OneStageEach, alternating
from meshweave.algorithms.pipeline.problem import PipelineProblem


class EagerOneForwardOneBackward(OneStageEach):
    """1F1B with more forwards before the first backward, so that transfers overlap; one stage on each rank."""

    name = "eager-1f1b"
    title = "Eager-1F1B"
    source = "Zhuang et al., AlpaComm, MLSys '23, section 4"
    is_searched = False  # its gain is that of slow boundaries between meshes, which have plans of their own
    stages_per_rank = (1,)

    def schedule(self, problem: PipelineProblem, config: PipelineConfig) -> Schedule:
        """Return 1F1B in which stage i of P runs min(M, 2 (P - i) - 1) of M forwards before its first backward."""
        return alternating(problem, lambda stage: num_eager(problem, stage))


def num_eager(problem: PipelineProblem, stage: int) -> int:
    """Return how many forwards stage i of P runs before its first backward: 2 (P - i) - 1.

    It runs fewer where there are fewer micro-batches.
    """
    return 2 * (problem.num_stages - stage) - 1
