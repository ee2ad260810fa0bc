"""The zero-bubble family as entries: ZB-H1, ZB-V, the automatic ZB-1p and ZB-2p, and DualPipeV."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from meshweave.algorithms.pipeline.action_times import ActionTimes
from meshweave.algorithms.pipeline.actions import Schedule, folded
from meshweave.algorithms.pipeline.algorithm import (
    PipelineAlgorithm,
    PipelineConfig,
    ScheduleRequest,
    network_of,
)
from meshweave.algorithms.pipeline.dualpipe import dualpipe_v
from meshweave.algorithms.pipeline.examples import chain_of_ranks
from meshweave.algorithms.pipeline.least_makespan import least_of_split
from meshweave.algorithms.pipeline.problem import PipelineProblem, Stash
from meshweave.algorithms.pipeline.program import stage_flops
from meshweave.algorithms.pipeline.zb_auto import StashLimit, zb_auto
from meshweave.algorithms.pipeline.zb_h1 import zb_h1
from meshweave.algorithms.pipeline.zbv import zbv
from meshweave.base.limits import SEARCHED_FORWARDS
from meshweave.describe.machine.cluster import Cluster

_SOURCE = "Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241"


class _ZeroBubble(PipelineAlgorithm):
    """A schedule whose transfers overlap with the stages; it has no variant without overlap."""

    def candidates(
        self, problem: PipelineProblem, cluster: Cluster | None = None
    ) -> Iterator[PipelineConfig]:
        """Yield one config, with overlapped transfers and reshards that are planned for the cluster."""
        yield PipelineConfig(network=network_of(problem, cluster))

    def refusal(self, problem: PipelineProblem) -> str | None:
        """Return why the stages do not fit, which lie in order, or by two a rank in a V; None where they do."""
        has_one = self.stages_per_rank == (1,)
        in_order = tuple(range(problem.num_ranks))
        if problem.stage_ranks == (in_order if has_one else folded(problem.num_ranks)):
            return None
        wanted = "one stage a rank, in order" if has_one else "two stages a rank, down the ranks and back up"
        return f"{wanted}; the stages are on ranks {problem.stage_ranks}"


class ZeroBubbleH1(_ZeroBubble):
    """1F1B with weight gradients in its bubbles; every rank takes as much memory as the first rank of 1F1B."""

    name = "zb-h1"
    title = "ZB-H1"
    source = _SOURCE
    stages_per_rank = (1,)

    def schedule(self, problem: PipelineProblem, config: PipelineConfig) -> Schedule:
        """Return ZB-H1: 1F1B with weight gradients in its bubbles, and no more stashes than its first rank."""
        return zb_h1(problem.num_ranks, problem.micro_batches)

    def num_stashes(self, num_ranks: int, per_rank: int, micro_batches: int) -> tuple[int, ...] | None:
        """Return for each of P ranks the most stashes that it holds at once: P.

        None for fewer than P micro-batches, of which no closed form is known.
        """
        return (num_ranks,) * num_ranks if micro_batches >= num_ranks else None

    def least_makespan(self, num_ranks: int, micro_batches: int, times: ActionTimes) -> int:
        """Return a lower bound of a step's makespan in the ticks of `times`: no rank waits after its begin."""
        return least_of_split(False, num_ranks, micro_batches, times)


class ZeroBubbleV(_ZeroBubble):
    """Two stages a rank in a V; no bubble where forward, input and weight gradient take the same time."""

    name = "zbv"
    title = "ZB-V"
    source = _SOURCE
    stages_per_rank = (2,)
    names_elsewhere: ClassVar[Mapping[str, str]] = {"torch": "ZBVZeroBubble"}

    def schedule(self, problem: PipelineProblem, config: PipelineConfig) -> Schedule:
        """Return the ZB-V schedule (`zbv`) for the problem's ranks and micro-batches; `config` is not read."""
        return zbv(problem.num_ranks, problem.micro_batches)

    def num_stashes(self, num_ranks: int, per_rank: int, micro_batches: int) -> tuple[int, ...] | None:
        """Return for each of P ranks the most stashes that it holds at once: 2 P.

        None for fewer than 2 P micro-batches, of which no closed form is known.
        """
        return (2 * num_ranks,) * num_ranks if micro_batches >= 2 * num_ranks else None

    def least_makespan(self, num_ranks: int, micro_batches: int, times: ActionTimes) -> int:
        """Return a lower bound of a step's makespan in the ticks of `times`: no rank waits after its begin."""
        return least_of_split(True, num_ranks, micro_batches, times)


class DualPipeV(_ZeroBubble):
    """Two stages per rank in a V, with forwards that overlap with backwards."""

    name = "dualpipev"
    title = "DualPipeV"
    source = "DeepSeek-AI, DeepSeek-V3, arXiv 2412.19437; github.com/deepseek-ai/DualPipe"
    is_searched = False  # in dense layers it hides no more than ZB-V
    stages_per_rank = (2,)
    names_elsewhere: ClassVar[Mapping[str, str]] = {"torch": "DualPipeV"}

    def examples(self) -> Iterator[PipelineProblem]:
        """Yield problems of two ranks, and of one rank that has both stages."""
        yield chain_of_ranks((0, 1, 1, 0), 4)
        yield chain_of_ranks((0, 0), 2)

    def refusal(self, problem: PipelineProblem) -> str | None:
        """Return why the problem's stages or number of micro-batches do not fit; None if they do."""
        if problem.micro_batches < problem.num_stages:
            return f"{problem.num_stages} stages need as many micro-batches, not {problem.micro_batches}"
        return super().refusal(problem)

    def schedule(self, problem: PipelineProblem, config: PipelineConfig) -> Schedule:
        """Return the DualPipeV schedule (`dualpipe_v`), whose steady state overlaps a forward and a backward."""
        return dualpipe_v(problem.num_ranks, problem.micro_batches)


class ZeroBubbleAuto(_ZeroBubble):
    """The base of schedules that a heuristic (`zb_auto`) finds for the costs of the stages, within a memory limit.

    The times of actions are the FLOPs of the stages; transfers count as nothing. The limit is a number of stashes
    of the stage that keeps the most.
    """

    source = _SOURCE
    is_searched = False  # made anew for each choice
    stages_per_rank = (1,)
    uses_times = True
    config_fields = ("stash_rest",)
    most_forwards = SEARCHED_FORWARDS
    factor: ClassVar[int]
    """A rank's memory limit in whole stashes, divided by the number of pipeline ranks."""

    def examples(self) -> Iterator[PipelineProblem]:
        """Yield problems of two equal stages, three uneven ones, and one alone."""
        yield chain_of_ranks((0, 1), 4, 2)
        yield chain_of_ranks((0, 1, 2), 3, work=(1, 3, 2), skips=((0, 2),), recomputes=(1,))
        yield chain_of_ranks((0,), 2)

    def schedule(self, problem: PipelineProblem, config: PipelineConfig) -> Schedule:
        """Return the best schedule of `zb_auto` within the limit on stashes, as if transfers took no time."""
        durations = stage_flops(problem)
        forward, input_grad, weight_grad = (tuple(part) for part in zip(*durations, strict=True))
        times = ActionTimes(forward, input_grad, weight_grad, (0,) * (problem.num_stages - 1))
        return zb_auto(problem.micro_batches, times, self._limit(problem))

    def requested(self, problem: PipelineProblem, request: ScheduleRequest, times: ActionTimes) -> Schedule:
        """Return the best schedule of `zb_auto` for `times`; of stashes the share `request.stash_rest` stays."""
        # In thousandths of a stash.
        limit = StashLimit(1000 * self.factor * problem.num_ranks, 1000, round(1000 * request.stash_rest))
        return zb_auto(problem.micro_batches, times, limit)

    def _limit(self, problem: PipelineProblem) -> StashLimit:
        """Return the limit in bytes, or in stashes where no stage says how many bytes it keeps."""
        stashes = [stage.stash for stage in problem.stages if stage.stash != Stash()]
        largest = max(stashes, key=lambda stash: stash.from_forward, default=Stash(until_weight_grad=1))
        whole, rest = largest.from_forward, largest.until_weight_grad + largest.from_input_grad
        return StashLimit(max(self.factor * problem.num_ranks * whole, rest), whole, rest)


class ZeroBubble1p(ZeroBubbleAuto):
    """The schedule of `zb_auto` within P stashes on each of P ranks, the memory of 1F1B's first rank."""

    name = "zb-1p"
    title = "ZB-1p"
    factor = 1


class ZeroBubble2p(ZeroBubbleAuto):
    """The schedule of `zb_auto` within 2 P stashes on each of P ranks, twice the memory of 1F1B's first rank."""

    name = "zb-2p"
    title = "ZB-2p"
    factor = 2


ZERO_BUBBLE: tuple[PipelineAlgorithm, ...] = (
    ZeroBubbleH1(),
    ZeroBubbleV(),
    ZeroBubble1p(),
    ZeroBubble2p(),
    DualPipeV(),
)
"""All entries of the family."""
