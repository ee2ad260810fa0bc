"""Eager-1F1B with delayed weight gradients (Zhuang et al., AlpaComm, MLSys '23, section 4).

A backward is cut in two. The input gradient, which the stage before waits for, is sent at once; the weight
gradient, which nobody waits for, runs later, and hides the transfer. With a delay of d, the weight gradient of
micro-batch m follows the input gradient of micro-batch m + d, and d stashes more are kept.

The delay is the least that covers the transfers by a model of time: FLOPs at the rate of the chip, and bytes at
the rate of the NICs, or of local links inside of a host.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshweave.algorithms.pipeline.action_times import ActionTimes
from meshweave.algorithms.pipeline.actions import Schedule
from meshweave.algorithms.pipeline.algorithm import PipelineConfig, network_of
from meshweave.algorithms.pipeline.eager import num_eager
from meshweave.algorithms.pipeline.one_f_one_b import OneStageEach, alternating
from meshweave.algorithms.pipeline.problem import PipelineProblem
from meshweave.algorithms.pipeline.timing import step_ticks, times_on
from meshweave.describe.machine.cluster import Cluster

COVERED = 1.001
"""A delay covers the transfers if the step takes at most so many times what it takes without any."""


class DelayedWeights(OneStageEach):
    """Eager 1F1B whose weight gradients run some micro-batches late (the delay); one stage per pipeline rank."""

    name = "eager-1f1b-delayed"
    title = "Eager-1F1B, delayed weight gradients"
    source = "Zhuang et al., AlpaComm, MLSys '23, section 4"
    is_searched = False  # its gain is that of slow boundaries between meshes, which have plans of their own
    stages_per_rank = (1,)
    config_fields = ("delay",)

    def candidates(
        self, problem: PipelineProblem, cluster: Cluster | None = None
    ) -> Iterator[PipelineConfig]:
        """Yield configs with the delay d of `least_delay`, with d + 1 and d - 1, then d with blocking transfers.

        Without a cluster d is 1. A negative delay is left out.
        """
        least = 1 if cluster is None else least_delay(problem, times_on(problem, cluster))
        network = network_of(problem, cluster)
        for delay in (least, least + 1, least - 1):
            if delay >= 0:
                yield PipelineConfig(delay=delay, network=network)
        yield PipelineConfig("blocking", delay=least, network=network)

    def schedule(self, problem: PipelineProblem, config: PipelineConfig) -> Schedule:
        """Return eager 1F1B whose weight gradients come `config.delay` micro-batches late."""
        return delayed(problem, config.delay)


def delayed(problem: PipelineProblem, delay: int) -> Schedule:
    """Return eager 1F1B whose weight gradients come `delay` micro-batches after their input gradients."""
    return alternating(problem, lambda stage: num_eager(problem, stage), delay)


def least_delay(problem: PipelineProblem, times: ActionTimes) -> int:
    """Return the least delay, in micro-batches, that hides the transfers; if none does, that of the shortest step.

    Delays from 0 to the number of stages are tried. A delay hides the transfers if its step takes at most
    `COVERED` times the step without a delay in which transfers take no time.

    Args:
        problem: the pipeline, one stage on each rank.
        times: the ticks of the stages and of the transfers of `problem.edges`.
    """
    free = replace(times, transfer=(0,) * len(times.transfer))
    bound = step_ticks(problem, delayed(problem, 0), free)
    best, least = 0, 0
    for delay in range(problem.num_stages + 1):
        taken = step_ticks(problem, delayed(problem, delay), times)
        if taken <= COVERED * bound:
            return delay
        if not least or taken < least:
            best, least = delay, taken
    return best
