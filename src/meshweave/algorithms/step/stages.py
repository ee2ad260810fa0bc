"""Price one micro-batch on each stage of the pipeline, and the pipeline that they make."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from meshweave.algorithms.pipeline.action_times import ActionTimes
from meshweave.algorithms.step.block_tasks import PartTime
from meshweave.algorithms.step.data_parallel import (
    APART,
    DataParallelTime,
    beside_s,
    data_parallel_time,
    exposed_s,
    sums_after,
)
from meshweave.algorithms.step.hidden_exchanges import overlapped_share
from meshweave.algorithms.step.host import IssueCounts
from meshweave.algorithms.step.layers import (
    LayerTime,
    ends_split,
    ends_time,
    layer_split,
    layer_time,
    mean_layer_time,
)
from meshweave.algorithms.step.memory import boundary_bytes, residual_is_whole
from meshweave.algorithms.step.pipeline import (
    PipelineTime,
    least_makespan_ps,
    ranks_of_stages,
    splits_backward,
    time_pipeline,
)
from meshweave.algorithms.step.placement import boundaries_s
from meshweave.algorithms.step.problem import Parallelism, StepProblem
from meshweave.algorithms.step.sharded_stage import ShardedStage
from meshweave.algorithms.step.sharing import Sharings, beside_messages, sharings
from meshweave.algorithms.step.stage_layers import layer_costs, stage_kinds, stage_layers
from meshweave.base.units import to_ps


@dataclass(frozen=True)
class StageTime:
    """One micro-batch of a stage in seconds.

    Attributes:
        forward_s, backward_s: the two parts, with all that the other attributes name.
        work: the layers, without recomputation.
        recompute_s: recomputation.
        ends_s: embedding, and last norm, logits and loss, where the stage has them.
        data_s: gathers of weights and reductions of gradients that nothing hides.
        reduced_s: of these the reductions, and gathers before the backward part.
        host_s: seconds in which the chip waits for its host.
        bound_s: seconds of whole parts in which the host sets the pace; `host_s` where it does in none.
        issued_s: seconds in which the host issues the two parts; 0 without a known host.
        layer_s: seconds of a layer in the forward part, and in the part beside which gradients are reduced, the
            mean over kinds: without data-parallel collectives, with the layer's share of waits for the host. The
            latter is the backward part with recomputation, or of `split_s` the second.
        data_parallel: the collectives of a layer's weights, the mean over kinds.
        split_s: the backward part in two: gradient of the residual, with recomputation, and gradients of
            weights, with their reductions; None where the schedule has whole backwards alone, or tasks are not
            priced one by one.
    """

    forward_s: float
    backward_s: float
    work: PartTime
    recompute_s: float
    ends_s: float
    data_s: float
    layer_s: tuple[float, float]
    data_parallel: DataParallelTime
    reduced_s: float = 0.0
    host_s: float = 0.0
    bound_s: float = 0.0
    issued_s: tuple[float, float] = (0.0, 0.0)
    split_s: tuple[float, float] | None = None

    @property
    def total_s(self) -> float:
        """Return the seconds of forward and backward of one micro-batch."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class Stages:
    """The stages of a step with their times, and the times that they are made of.

    Attributes:
        layers: the number of layers of each stage.
        times: the time of each stage.
        layer: the time of one layer for one micro-batch, the mean over kinds.
        data_parallel: collectives of one layer's weights, the mean over kinds.
        transfers_s: seconds of the transfer of a micro-batch from each stage to the next, 0 within a rank.
        sends_parts: whether a residual that all tensor-parallel ranks have is sent in parts and gathered.
        sharing: how layers and collectives of weights beside them delay each other on links.
    """

    problem: StepProblem
    parallelism: Parallelism
    layers: tuple[int, ...]
    times: tuple[StageTime, ...]
    layer: LayerTime
    data_parallel: DataParallelTime
    transfers_s: tuple[float, ...]
    sends_parts: bool
    sharing: Sharings

    @property
    def micro_batches(self) -> int:
        """Return the number of micro-batches that go through each pipeline per step."""
        return self.problem.batch // (self.parallelism.data * self.parallelism.micro_batch)

    def action_times(self, with_transfers: bool = True, with_gathers: bool = True) -> ActionTimes:
        """Return the times of stages and of transfers between them, for one micro-batch, in picoseconds.

        Where the two gradients are not timed apart, the input gradient has recomputation and half of the rest,
        the weight gradient the other half. Where a stack waits for its sends (`blocks_transfers`), their time is
        in the stages' and not between them; stages of one rank send nothing to each other.

        Args:
            with_transfers: whether transfers between stages take time.
            with_gathers: whether the first micro-batch waits for weights that are gathered once a step.
        """
        ticks: dict[int, tuple[int, int, int, int]] = {}  # of each time, which many stages share
        for time in self.times:
            if id(time) not in ticks:
                whole, again = to_ps(time.backward_s), to_ps(time.recompute_s)
                late = max(whole - again, 0) // 2
                soon = whole - late
                if time.split_s is not None:
                    soon, late = (to_ps(max(each, 0.0)) for each in time.split_s)
                ticks[id(time)] = to_ps(time.forward_s), soon, late, max(soon + late - whole, 0)
        of_stages = [ticks[id(time)] for time in self.times]
        forward, inputs, weights, saved = (list(each) for each in zip(*of_stages, strict=True))
        sent = [to_ps(each) if with_transfers else 0 for each in self.transfers_s]
        if self.problem.stack.blocks_transfers:
            forward = [ticks + more for ticks, more in zip(forward, (*sent, 0), strict=True)]
            inputs = [ticks + more for ticks, more in zip(inputs, (0, *sent), strict=True)]
            sent = [0] * len(sent)
        earliest = tuple(map(to_ps, self.gathered_s())) if with_gathers else ()
        edges = tuple(sent)
        return ActionTimes(tuple(forward), tuple(inputs), tuple(weights), edges, tuple(saved), earliest)

    def pipeline(self, with_transfers: bool = True, with_gathers: bool = True) -> PipelineTime:
        """Return when each stage ends its last action, in picoseconds from the begin of the step.

        The arguments are those of `action_times`.
        """
        times, p = self.action_times(with_transfers, with_gathers), self.parallelism
        if p.pipeline == 1:
            total = self.micro_batches * (sum(times.forward) + sum(times.backward))
            return PipelineTime((total + sum(times.earliest),), (0,))
        return time_pipeline(p.schedule, p.pipeline, p.virtual_stages, self.micro_batches, times)

    def least_pipeline_ps(self) -> int:
        """Return a lower bound of the pipeline's makespan in picoseconds, much cheaper than `pipeline`.

        Waits for weights that are gathered once a step are left out.
        """
        p = self.parallelism
        if p.pipeline == 1:
            return self.pipeline(with_gathers=False).makespan_ps
        numbers = p.schedule, p.pipeline, p.virtual_stages, self.micro_batches
        return least_makespan_ps(*numbers, self.action_times().joined)

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """Return for each stage its pipeline rank."""
        p = self.parallelism
        return ranks_of_stages(p.schedule, p.pipeline, p.virtual_stages)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a pipeline rank in the model's order; the first one's backward part runs last."""
        return tuple(stage for stage, owner in enumerate(self.stage_ranks) if owner == rank)

    def gathered_s(self) -> tuple[float, ...]:
        """Return for each stage the seconds from the begin of the step until its first micro-batch may begin.

        Until then weights are gathered, except those whose gathers overlap with the stage's layers. A rank gathers
        the weights of its stages one after the other; where no gather overlaps, each waits for all of them.
        () except for ZeRO-1, and for ZeRO-2 where the stack gathers weights once a step.
        """
        p, stack, table_s = self.parallelism, self.problem.stack, self.data_parallel.table_gather_s
        if p.zero not in (1, 2) or (p.zero == 2 and stack.regathers):
            return ()
        overlap = 0.0 if stack.waits_for_gathers else stack.overlap
        out = [0.0] * len(self.times)
        for rank in range(p.pipeline):
            own, lane_s = self.stages_of(rank), 0.0
            for stage in own:
                count, of = self.layers[stage], self.times[stage]
                lane_s += table_s if stage == 0 else 0.0
                queued_s = table_s if self._has_own_head(stage) else 0.0
                gather_s = of.data_parallel.gather_s
                out[stage] = lane_s + exposed_s(
                    count, of.layer_s[0], gather_s, overlap, queued_s, self.sharing.gathers[0]
                )
                lane_s += count * gather_s + queued_s
            for stage in own if overlap == 0 else ():
                out[stage] = lane_s
        return tuple(out)

    def _has_own_head(self, stage: int) -> bool:
        """Return whether a stage has a table of the head that is not the one of its rank's embedding."""
        rank = self.stage_ranks[-1]
        return stage == len(self.layers) - 1 and (rank > 0 or not self.problem.model.tied_embeddings)

    def reductions_s(self, rank: int, ends_s: Sequence[float]) -> float:
        """Return the seconds that reductions of gradients add after a pipeline rank's last backward part.

        They run one after the other, beside the backward parts of the last micro-batch.

        Args:
            rank: the pipeline rank.
            ends_s: seconds from the begin of the step to the end of each stage's last backward part.
        """
        p = self.parallelism
        after_all_s = self.data_parallel.tied_s if rank in (0, self.stage_ranks[-1]) else 0.0
        if p.zero >= 2:
            return after_all_s  # each micro-batch has its own
        overlap, of_stages = self._reduces_beside, self._reduced_s
        own, lane_s = sorted(self.stages_of(rank), key=lambda stage: ends_s[stage]), -math.inf
        for stage in own:
            before_s, layers_s, last_s, shown_s = of_stages[stage]
            lane_s = max(lane_s + overlap * (before_s + layers_s), ends_s[stage] + shown_s)
            lane_s += overlap * last_s
            after_all_s += (1 - overlap) * (before_s + layers_s + last_s)
        return max(lane_s - ends_s[own[-1]], 0.0) + after_all_s

    @property
    def _reduces_beside(self) -> float:
        """Return the share of reductions, those of the last micro-batch, that run beside its backward part."""
        return 0.0 if sums_after(self.problem, self.parallelism) else self.problem.stack.overlap

    @cached_property
    def _reduced_s(self) -> list[tuple[float, float, float, float]]:
        """Return for each stage the seconds of reductions of a head's table, of its layers, and of an embedding.

        The last are the seconds from the stage's end, by `pipeline`, to that of reductions of its layers:
        these make last backward parts longer, of which those of later stages come before.
        """
        overlap, table_s, late_s = self._reduces_beside, self.data_parallel.table_s, 0.0
        out = []
        for stage in reversed(range(len(self.times))):
            count, of = self.layers[stage], self.times[stage]
            head_s, first_s = (table_s if has else 0.0 for has in (self._has_own_head(stage), stage == 0))
            layers_s = count * of.data_parallel.reduce_s
            sharing = self.sharing.sums if of.split_s is None else APART
            moved_s = overlap * layers_s / max(count, 1), overlap * head_s
            after_s, slowed_s = beside_s(count, of.layer_s[1], *moved_s, sharing)
            late_s += slowed_s
            out.append((head_s, layers_s, first_s, late_s + after_s))
        return out[::-1]


def stages_of(problem: StepProblem, parallelism: Parallelism, *, shares: bool = True) -> Stages:
    """Return the stages of a step and their times.

    Args:
        shares: whether layers and traffic beside them slow each other on shared links; False: no slowdown.

    Raises:
        UnsupportedError: there is no such strategy.
        LayoutError: the strategy does not fit the model or the ranks.
    """
    layers = stage_layers(problem.model.num_layers, parallelism.num_stages, layer_costs(problem))
    beside = overlapped_share(problem, parallelism)
    layer, ends = layer_time(problem, parallelism).beside_others(beside), ends_time(problem, parallelism)
    data_parallel = data_parallel_time(problem, parallelism)
    sharing = sharings(problem, parallelism) if shares else Sharings()
    sent_s: tuple[float, ...] = ()
    in_parts = False
    if parallelism.pipeline > 1:
        ranks = ranks_of_stages(parallelism.schedule, parallelism.pipeline, parallelism.virtual_stages)
        sent, is_whole = boundary_bytes(problem, parallelism), residual_is_whole(parallelism)
        sent_s, in_parts = boundaries_s(problem, parallelism, ranks, sent, is_whole)
    message_s = max(sent_s, default=0.0)
    known: dict[tuple[tuple[int, bool, bool], tuple[float, ...]], StageTime] = {}
    kinds = stage_kinds(problem, layers)
    times = []
    for stage, count in enumerate(layers):
        key = count, stage == 0, stage == len(layers) - 1
        counts = kinds[stage] if kinds else ()
        if (key, counts) not in known:
            own = mean_layer_time(problem, parallelism, counts).beside_others(beside) if counts else layer
            of_replicas = data_parallel_time(problem, parallelism, counts) if counts else data_parallel
            own = beside_messages(own, sharing, message_s / max(count, 1))
            at_ends = [end for end, is_here in zip(ends, key[1:], strict=True) if is_here]
            sharded = ShardedStage(problem, parallelism, key, of_replicas, ends, sharing)
            back_s = own.backward.total_s + own.recompute.total_s
            exposed = sharded.gathers_s(own.forward.total_s), sharded.reduces_s(back_s)
            time = _stage_time(count, own, at_ends, of_replicas, *exposed)
            issued_s = _issued_s(problem, parallelism, count, own, at_ends)
            time = _with_host(time, count, issued_s, pools=not problem.stack.blocks_transfers)
            known[key, counts] = _with_split(sharded, time, counts)
        times.append(known[key, counts])
    return Stages(problem, parallelism, layers, tuple(times), layer, data_parallel, sent_s, in_parts, sharing)


def _with_split(sharded: ShardedStage, time: StageTime, counts: tuple[float, ...]) -> StageTime:
    """Return the time of a stage with its backward part in two, where its schedule runs them apart.

    Exposed reductions follow the gradients of weights, and gathers precede those of the residual. `counts` are the
    stage's layers of each kind; () for one.
    """
    problem, p, (count, *is_at) = sharded.problem, sharded.parallelism, sharded.key
    if p.pipeline == 1 or not splits_backward(p.schedule, p.pipeline, p.virtual_stages):
        return time
    of_layer, of_ends = layer_split(problem, p, counts), ends_split(problem, p)
    if of_layer is None or of_ends is None:
        return time
    ends = [end for end, is_here in zip(of_ends, is_at, strict=True) if is_here]
    soon, late = (count * of_layer[part].total_s + sum(end[part].total_s for end in ends) for part in (0, 1))
    late = max(late, time.backward_s - time.recompute_s - time.reduced_s - soon)
    late_s, soon_s = of_layer[1].total_s, of_layer[0].total_s + time.recompute_s / max(count, 1)
    soon += time.recompute_s + sharded.reduces_s(soon_s, (True, False))
    late += sharded.reduces_s(late_s, (False, True))
    return replace(time, split_s=(soon, late), layer_s=(time.layer_s[0], late_s))


def _stage_time(
    count: int,
    layer: LayerTime,
    ends: list[LayerTime],
    data_parallel: DataParallelTime,
    gathers_s: float,
    reduces_s: float,
) -> StageTime:
    back_s = layer.backward.total_s + layer.recompute.total_s
    ends_s = [sum(end.forward.total_s for end in ends), sum(end.backward.total_s for end in ends)]
    work = layer.forward + layer.backward
    return StageTime(
        count * layer.forward.total_s + ends_s[0] + gathers_s,
        count * back_s + ends_s[1] + reduces_s,
        count * work,
        count * layer.recompute.total_s,
        sum(ends_s),
        gathers_s + reduces_s,
        (layer.forward.total_s, back_s),
        data_parallel,
        reduces_s,
        count * work.host_s,
    )


def _issued_s(
    problem: StepProblem, parallelism: Parallelism, count: int, layer: LayerTime, ends: list[LayerTime]
) -> tuple[float, float]:
    """Return the seconds in which the host issues the forward and the backward part of a stage."""
    host, zero = problem.host, parallelism.zero
    if host is None:
        return 0.0, 0.0
    gathers = zero == 3 or (zero == 2 and problem.stack.regathers)
    messages = 2 * (parallelism.pipeline > 1)
    more = count * gathers, count * ((zero > 1) + (zero == 3))
    forward_s, backward_s = (IssueCounts(0, each, messages).seconds(host) for each in more)
    forward_s += count * layer.issued_s[0] + sum(end.issued_s[0] for end in ends)
    backward_s += count * layer.issued_back_s + sum(end.issued_s[1] for end in ends)
    return forward_s, backward_s


def _with_host(time: StageTime, count: int, issued_s: tuple[float, float], *, pools: bool) -> StageTime:
    """Return the time of a micro-batch whose parts, of `count` layers, take no less than their host issues them.

    Where the host waits for nothing in between (`pools`), what it is ahead in one part it has in the next, so that
    both parts together take at least as long as it issues both.
    """
    time = replace(time, issued_s=issued_s)
    own_s = time.forward_s, time.backward_s
    short = [max(issued - own, 0.0) for issued, own in zip(issued_s, own_s, strict=True)]
    waits_s = sum(short)
    if not waits_s:
        return replace(time, bound_s=time.host_s)
    if pools:
        excess_s = max(sum(issued_s) - sum(own_s), 0.0)
        short = [each * excess_s / waits_s for each in short]
        waits_s = excess_s
    bound_s = sum(own + more for own, more in zip(own_s, short, strict=True) if more)
    forward_s, backward_s = (
        own + more / max(count, 1) for own, more in zip(time.layer_s, short, strict=True)
    )
    return replace(
        time,
        forward_s=own_s[0] + short[0],
        backward_s=own_s[1] + short[1],
        layer_s=(forward_s, backward_s),
        host_s=time.host_s + waits_s,
        bound_s=max(bound_s, time.host_s),
    )
