"""Price one micro-batch on each stage of the pipeline, and the pipeline that they make."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from meshweave.algorithms.pipeline.action_times import ActionTimes
from meshweave.algorithms.step.block_tasks import PartTime
from meshweave.algorithms.step.data_parallel import (
    DataParallelTime,
    data_parallel_time,
    exposed_s,
    sums_after,
)
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
from meshweave.algorithms.step.placement import boundary_s
from meshweave.algorithms.step.problem import Parallelism, StepProblem
from meshweave.algorithms.step.stage_layers import layer_costs, stage_kinds, stage_layers
from meshweave.base.units import to_ps, to_s


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
        layer_s: seconds of a layer in the forward part, and in the backward part with recomputation, the mean
            over kinds: without data-parallel collectives, with the layer's share of waits for the host.
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
        transfer_s: seconds of the transfer of a micro-batch from one stage to the next; 0 without a pipeline.
        sends_parts: whether a residual that all tensor-parallel ranks have is sent in parts and gathered.
    """

    problem: StepProblem
    parallelism: Parallelism
    layers: tuple[int, ...]
    times: tuple[StageTime, ...]
    layer: LayerTime
    data_parallel: DataParallelTime
    transfer_s: float
    sends_parts: bool

    @property
    def micro_batches(self) -> int:
        """Return the number of micro-batches that go through each pipeline."""
        return self.problem.batch // (self.parallelism.data * self.parallelism.micro_batch)

    def action_times(self, with_transfers: bool = True) -> ActionTimes:
        """Return the times of stages and of transfers between them, for one micro-batch, in picoseconds.

        Where the two gradients are not timed apart, the input gradient has recomputation and half of the rest,
        the weight gradient the other half. Where a stack waits for its sends (`blocks_transfers`), their time is
        in the stages' and not between them; stages of one rank send nothing to each other.

        Args:
            with_transfers: whether transfers take time.
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
        hop = to_ps(self.transfer_s)
        if with_transfers and self.problem.stack.blocks_transfers:
            sent = [hop * (one != other) for one, other in pairwise(self.stage_ranks)]
            forward = [ticks + more for ticks, more in zip(forward, (*sent, 0), strict=True)]
            inputs = [ticks + more for ticks, more in zip(inputs, (0, *sent), strict=True)]
        waits = with_transfers and not self.problem.stack.blocks_transfers
        transfers = (hop if waits else 0,) * (len(self.times) - 1)
        return ActionTimes(tuple(forward), tuple(inputs), tuple(weights), transfers, tuple(saved))

    def pipeline(self, with_transfers: bool = True) -> PipelineTime:
        """Return when the pipeline ranks end their last actions, with or without the time of transfers."""
        times, p = self.action_times(with_transfers), self.parallelism
        if p.pipeline == 1:
            total = self.micro_batches * sum(times.forward)
            total += self.micro_batches * sum(times.backward)
            return PipelineTime(total, (total,), (0,) * len(self.times))
        return time_pipeline(p.schedule, p.pipeline, p.virtual_stages, self.micro_batches, times)

    def least_pipeline_ps(self) -> int:
        """Return a lower bound of the pipeline's makespan in picoseconds, much cheaper than `pipeline`."""
        p = self.parallelism
        if p.pipeline == 1:
            return self.pipeline().makespan_ps
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

    def gathers_s(self) -> float:
        """Return the seconds by which gathers of weights delay a step at its begin: the most of any rank.

        A rank waits from when the first micro-batch reaches it. 0 but for ZeRO-1, and for ZeRO-2 where the stack
        gathers weights once a step.
        """
        p, stack = self.parallelism, self.problem.stack
        overlap = 0.0 if stack.waits_for_gathers else stack.overlap
        once = p.zero == 1 or (p.zero == 2 and not stack.regathers)
        if not once:
            return 0.0
        waits_s = []
        for rank in range(p.pipeline):
            (first, *others), table_s = self.stages_of(rank), self.data_parallel.table_gather_s
            of = self.times[first]
            others_s = sum(self.layers[stage] * self.times[stage].data_parallel.gather_s for stage in others)
            queued_s = table_s if self._has_own_head(rank) else 0.0
            ahead_s = exposed_s(
                self.layers[first], of.layer_s[0], of.data_parallel.gather_s, overlap, queued_s
            )
            reached_s = sum(time.forward_s + self.transfer_s for time in self.times[:first])
            before_s = table_s if rank == 0 else 0.0
            waits_s.append(before_s + ahead_s + others_s * (1 - overlap) - reached_s)
        return max(waits_s)

    def _has_own_head(self, rank: int) -> bool:
        """Return whether a pipeline rank has a table of the head that is not the one of the embedding."""
        head = self.stage_ranks[-1]
        return rank == head and (head > 0 or not self.problem.model.tied_embeddings)

    def reductions_s(self, rank: int) -> float:
        """Return the seconds that reductions of gradients add after a pipeline rank's last backward part."""
        p = self.parallelism
        overlap = 0.0 if sums_after(self.problem, p) else self.problem.stack.overlap
        head = self.stage_ranks[-1]
        head_s = self.data_parallel.table_s if self._has_own_head(rank) else 0.0
        after_all_s = self.data_parallel.tied_s if rank in (0, head) else 0.0
        if p.zero >= 2:
            return after_all_s  # each micro-batch has its own
        after_all_s += self.data_parallel.table_s if rank == 0 else 0.0
        last, *others = self.stages_of(rank)
        of = self.times[last]
        others_s = sum(self.layers[stage] * self.times[stage].data_parallel.reduce_s for stage in others)
        after_s = exposed_s(self.layers[last], of.layer_s[1], of.data_parallel.reduce_s, overlap, head_s)
        return after_s + others_s * (1 - overlap) + after_all_s


def stages_of(problem: StepProblem, parallelism: Parallelism) -> Stages:
    """Return the stages of a step and their times. Raises LayoutError where a strategy does not fit."""
    layers = stage_layers(problem.model.num_layers, parallelism.num_stages, layer_costs(problem))
    layer, ends = layer_time(problem, parallelism), ends_time(problem, parallelism)
    data_parallel = data_parallel_time(problem, parallelism)
    known: dict[tuple[tuple[int, bool, bool], tuple[float, ...]], StageTime] = {}
    kinds = stage_kinds(problem, layers)
    times = []
    for stage, count in enumerate(layers):
        key = count, stage == 0, stage == len(layers) - 1
        counts = kinds[stage] if kinds else ()
        if (key, counts) not in known:
            own = mean_layer_time(problem, parallelism, counts) if counts else layer
            of_replicas = data_parallel_time(problem, parallelism, counts) if counts else data_parallel
            at_ends = [end for end, is_here in zip(ends, key[1:], strict=True) if is_here]
            exposed = _sharded_s(problem, parallelism, count, own, of_replicas, *key[1:])
            time = _stage_time(count, own, at_ends, of_replicas, *exposed)
            issued_s = _issued_s(problem, parallelism, count, own, at_ends)
            time = _with_host(time, count, issued_s, pools=not problem.stack.blocks_transfers)
            known[key, counts] = replace(time, split_s=_split_s(problem, parallelism, time, counts, *key))
        times.append(known[key, counts])
    transfer_s, sends_parts = 0.0, False
    if parallelism.pipeline > 1:
        sent = boundary_bytes(problem, parallelism)
        is_whole = residual_is_whole(parallelism)
        transfer_s, sends_parts = boundary_s(problem, parallelism, sent, is_whole)
    return Stages(problem, parallelism, layers, tuple(times), layer, data_parallel, transfer_s, sends_parts)


def _sharded_s(
    problem: StepProblem,
    parallelism: Parallelism,
    count: int,
    layer: LayerTime,
    data_parallel: DataParallelTime,
    is_first: bool,
    is_last: bool,
) -> tuple[float, float]:
    """Return the seconds that gathers and reductions of each micro-batch add to the forward and backward parts."""
    zero, stack = parallelism.zero, problem.stack
    gathers_s = reduces_s = 0.0
    has_both = is_first and is_last
    head = int(is_last and not (has_both and problem.model.tied_embeddings))
    before, queued = (is_first + head, 0) if stack.sharding != "zero" else (int(is_first), head)
    if zero == 3 or (zero == 2 and stack.regathers):
        of_table_s = data_parallel.table_gather_s
        numbers = count, layer.forward.total_s, data_parallel.gather_s, stack.overlap
        gathers_s = before * of_table_s + exposed_s(*numbers, queued * of_table_s)
    if zero >= 2:
        back_s = layer.backward.total_s + layer.recompute.total_s
        again_s = data_parallel.gather_s if zero == 3 else 0.0
        of_table_s = data_parallel.table_s
        numbers = count, back_s, data_parallel.reduce_s + again_s, stack.overlap
        reduces_s = before * of_table_s + exposed_s(*numbers, queued * of_table_s)
    return gathers_s, reduces_s


def _split_s(
    problem: StepProblem,
    parallelism: Parallelism,
    time: StageTime,
    counts: tuple[float, ...],
    count: int,
    is_first: bool,
    is_last: bool,
) -> tuple[float, float] | None:
    """Return the seconds of the backward part of a stage in two, where its schedule runs them apart.

    Exposed reductions follow the gradients of weights. `counts` are the stage's layers of each kind; () for one.
    """
    p = parallelism
    if p.pipeline == 1 or not splits_backward(p.schedule, p.pipeline, p.virtual_stages):
        return None
    of_layer, of_ends = layer_split(problem, p, counts), ends_split(problem, p)
    if of_layer is None or of_ends is None:
        return None
    ends = [end for end, is_here in zip(of_ends, (is_first, is_last), strict=True) if is_here]
    soon, late = (count * of_layer[part].total_s + sum(end[part].total_s for end in ends) for part in (0, 1))
    joint_s = time.backward_s - time.recompute_s - time.reduced_s
    late = max(late, joint_s - soon)
    return soon + time.recompute_s, late + time.reduced_s


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
    more = (
        IssueCounts(0, count * gathers, messages),
        IssueCounts(0, count * ((zero > 1) + (zero == 3)), messages),
    )
    forward_s, backward_s = (each.seconds(host) for each in more)
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


def makespan_s(time: PipelineTime) -> float:
    """Return the makespan of a pipeline in seconds."""
    return to_s(time.makespan_ps)
