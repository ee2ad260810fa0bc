"""A schedule of pipelines with one micro-batch in flight at a time. A trial of the contract."""

from __future__ import annotations

from meshweave.algorithms.pipeline import (
    Action,
    ActionKind,
    PipelineAlgorithm,
    PipelineConfig,
    PipelineProblem,
    Schedule,
)


class OneInFlight(PipelineAlgorithm):
    """Every stage keeps one stash, and waits most of the time."""

    name = "one_in_flight"
    title = "One micro-batch in flight"
    source = "a trial"

    def schedule(self, problem: PipelineProblem, config: PipelineConfig) -> Schedule:
        orders = []
        for rank in range(problem.num_ranks):
            stages = problem.stages_of(rank)
            order = []
            for m in range(problem.micro_batches):
                order += [Action(ActionKind.FORWARD, stage, m) for stage in stages]
                order += [Action(ActionKind.BACKWARD, stage, m) for stage in reversed(stages)]
            orders.append(tuple(order))
        return Schedule(problem.stage_ranks, problem.micro_batches, tuple(orders))


ENTRY = OneInFlight()
