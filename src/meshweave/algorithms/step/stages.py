"""Price one micro-batch on each stage of the pipeline, and the pipeline that they make."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from meshweave.algorithms.pipeline.action_times import ActionTimes
from meshweave.algorithms.step.block_time import PartTime
from meshweave.algorithms.step.data_parallel import (
    DataParallelTime,
    data_parallel_time,
    exposed_after,
    exposed_before,
)
from meshweave.algorithms.step.layers import LayerTime, ends_split, ends_time, layer_split, layer_time
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
from meshweave.base.units import to_ps, to_s


@dataclass(frozen=True)
class StageTime:
    """One micro-batch of a stage in seconds.

    Attributes:
        forward_s, backward_s: the two parts, with all that follows.
        work: the layers, without recomputation.
        recompute_s: recomputation.
        ends_s: embedding and loss.
        data_s: gathers of weights and reductions of gradients that nothing hides.
        reduced_s: of these the reductions, and gathers before the backward part.
        split_s: the backward part in two: gradient of the residual, with recomputation, and gradients of weights;
            None where nobody runs them apart, or it is not known.
    """

    forward_s: float
    backward_s: float
    work: PartTime
    recompute_s: float
    ends_s: float
    data_s: float
    reduced_s: float = 0.0
    split_s: tuple[float, float] | None = None

    @property
    def total_s(self) -> float:
        """Return forward and backward."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class Stages:
    """The stages of a step with their times, and the times that they are made of.

    Attributes:
        layers: the number of layers of each stage.
        times: the time of each stage.
        layer: the time of one layer.
        data_parallel: collectives of one layer's weights.
        transfer_s: seconds of the transfer from one stage to the next.
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
        """Return the times of the stages and of the transfers between them, in picoseconds.

        Where nobody runs gradients apart, or it is not known, that of inputs has recomputation and half of the
        rest, that of weights the other half. A stack that waits for what it sends has transfers in the times of
        stages.
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
            forward = [ticks + hop for ticks in forward[:-1]] + forward[-1:]
            inputs = inputs[:1] + [ticks + hop for ticks in inputs[1:]]
        waits = with_transfers and not self.problem.stack.blocks_transfers
        transfers = (hop if waits else 0,) * (len(self.times) - 1)
        return ActionTimes(tuple(forward), tuple(inputs), tuple(weights), transfers, tuple(saved))

    def pipeline(self, with_transfers: bool = True) -> PipelineTime:
        """Return when the pipeline ranks are done, with or without the time of transfers."""
        times, p = self.action_times(with_transfers), self.parallelism
        if p.pipeline == 1:
            total = self.micro_batches * sum(times.forward)
            total += self.micro_batches * sum(times.backward)
            return PipelineTime(total, (total,), (0,) * len(self.times))
        return time_pipeline(p.schedule, p.pipeline, p.virtual_stages, self.micro_batches, times)

    def least_pipeline_ps(self) -> int:
        """Return a lower bound of the makespan of the pipeline in picoseconds, much cheaper than `pipeline`."""
        p = self.parallelism
        if p.pipeline == 1:
            return self.pipeline().makespan_ps
        numbers = p.schedule, p.pipeline, p.virtual_stages, self.micro_batches
        return least_makespan_ps(*numbers, self.action_times().joined)

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """Return for each stage the pipeline rank that has it."""
        p = self.parallelism
        return ranks_of_stages(p.schedule, p.pipeline, p.virtual_stages)

    def layers_of_rank(self, rank: int) -> int:
        """Return the layers of a pipeline rank."""
        p = self.parallelism
        numbers = p.schedule, p.pipeline, p.virtual_stages
        return rank_layers(self.problem.model.num_layers, *numbers, layer_costs(self.problem))[rank]

    def gathers_s(self) -> float:
        """Return the seconds by which gathers of weights on the first rank delay the step (ZeRO-1 and 2)."""
        p, stack = self.parallelism, self.problem.stack
        overlap = 0.0 if stack.waits_for_gathers else stack.overlap
        once = p.zero == 1 or (p.zero == 2 and not self.problem.stack.regathers)
        if not once:
            return 0.0
        first, others = self.layers[0], self.layers_of_rank(0) - self.layers[0]
        of = self.data_parallel
        has_head = self.stage_ranks[-1] == 0 and not self.problem.model.tied_embeddings
        head_s = of.table_gather_s if has_head else 0.0
        ahead_s = exposed_before(first, self.layer.forward.total_s, of.gather_s, overlap, head_s)
        return of.table_gather_s + ahead_s + others * of.gather_s * (1 - overlap)

    def reductions_s(self, rank: int) -> float:
        """Return the seconds that reductions add after the last backward part of a pipeline rank."""
        p, overlap = self.parallelism, self.problem.stack.overlap
        head = self.stage_ranks[-1]
        has_head = rank == head and (head > 0 or not self.problem.model.tied_embeddings)
        head_s = self.data_parallel.table_s if has_head else 0.0
        after_all_s = self.data_parallel.tied_s if rank in (0, head) else 0.0
        if p.zero >= 2:
            return after_all_s  # each micro-batch has its own
        after_all_s += self.data_parallel.table_s if rank == 0 else 0.0
        back_s = self.layer.backward.total_s + self.layer.recompute.total_s
        last, others = self.layers[rank], self.layers_of_rank(rank) - self.layers[rank]
        after_s = exposed_after(last, back_s, self.data_parallel.reduce_s, overlap, head_s)
        return after_s + others * self.data_parallel.reduce_s * (1 - overlap) + after_all_s


@lru_cache(maxsize=4096)
def stage_layers(num_layers: int, num_stages: int, costs: tuple[int, int] | None = None) -> tuple[int, ...]:
    """Return the layers of each stage: equal but for layers left over, which go to the middle.

    So embedding and loss lie on stages with fewer layers (Qi et al., Zero Bubble).

    Args:
        costs: of a layer and of the head, where stages are divided by them instead: a stage ends with the layer
            that takes the sum above its share of all, as in nanotron (`build_model`).
    """
    if costs is not None:
        return _layers_by_cost(num_layers, num_stages, *costs)
    each, more = divmod(num_layers, num_stages)
    begin = (num_stages - more) // 2
    return tuple(each + (begin <= stage < begin + more) for stage in range(num_stages))


def _layers_by_cost(num_layers: int, num_stages: int, layer: int, head: int) -> tuple[int, ...]:
    counts, stage, total = [0] * num_stages, 0, num_layers * layer + head
    for number in range(1, num_layers + 1):
        counts[stage] += 1
        stage += number * layer * num_stages > total * (stage + 1)
    return tuple(counts)


def layer_costs(problem: StepProblem) -> tuple[int, int] | None:
    """Return the multiplications a token of a layer and of the head, by which layers are divided; None: evenly."""
    model = problem.model
    if not problem.stack.layers_by_cost:
        return None
    counts = model.layer.counts
    products = 4 * counts["heads"] + (3 if model.gated_ffn else 2) * counts["ffn"]
    return products * model.hidden, (model.vocab_size or 0) * model.hidden


@lru_cache(maxsize=4096)
def rank_layers(
    num_layers: int,
    schedule: str,
    num_ranks: int,
    virtual_stages: int,
    costs: tuple[int, int] | None = None,
) -> tuple[int, ...]:
    """Return the layers of each pipeline rank of a schedule; `costs` as for `stage_layers`."""
    counts = [0] * num_ranks
    layers = stage_layers(num_layers, num_ranks * virtual_stages, costs)
    for rank, count in zip(ranks_of_stages(schedule, num_ranks, virtual_stages), layers, strict=True):
        counts[rank] += count
    return tuple(counts)


def stages_of(problem: StepProblem, parallelism: Parallelism) -> Stages:
    """Return the stages of a step. Raises LayoutError where a strategy does not fit."""
    layers = stage_layers(problem.model.num_layers, parallelism.num_stages, layer_costs(problem))
    layer, ends = layer_time(problem, parallelism), ends_time(problem, parallelism)
    data_parallel = data_parallel_time(problem, parallelism)
    known: dict[tuple[int, bool, bool], StageTime] = {}
    times = []
    for stage, count in enumerate(layers):
        key = count, stage == 0, stage == len(layers) - 1
        if key not in known:
            at_ends = [end for end, is_here in zip(ends, key[1:], strict=True) if is_here]
            gathers_s, reduces_s = _sharded_s(problem, parallelism, count, layer, data_parallel, *key[1:])
            time = _stage_time(count, layer, at_ends, gathers_s, reduces_s)
            known[key] = replace(time, split_s=_split_s(problem, parallelism, time, *key))
        times.append(known[key])
    transfer_s, sends_parts = 0.0, False
    if parallelism.pipeline > 1:
        sent = boundary_bytes(problem, parallelism)
        is_whole = residual_is_whole(problem, parallelism)
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
        gathers_s = before * of_table_s + exposed_before(*numbers, queued * of_table_s)
    if zero >= 2:
        back_s = layer.backward.total_s + layer.recompute.total_s
        again_s = data_parallel.gather_s if zero == 3 else 0.0
        of_table_s = data_parallel.table_s
        numbers = count, back_s, data_parallel.reduce_s + again_s, stack.overlap
        reduces_s = before * of_table_s + exposed_after(*numbers, queued * of_table_s)
    return gathers_s, reduces_s


def _split_s(
    problem: StepProblem,
    parallelism: Parallelism,
    time: StageTime,
    count: int,
    is_first: bool,
    is_last: bool,
) -> tuple[float, float] | None:
    """Return the seconds of the backward part of a stage in two, where its schedule runs them apart.

    Exposed reductions follow the gradients of weights.
    """
    p = parallelism
    if p.pipeline == 1 or not splits_backward(p.schedule, p.pipeline, p.virtual_stages):
        return None
    of_layer, of_ends = layer_split(problem, p), ends_split(problem, p)
    if of_layer is None or of_ends is None:
        return None
    ends = [end for end, is_here in zip(of_ends, (is_first, is_last), strict=True) if is_here]
    soon, late = (count * of_layer[part].total_s + sum(end[part].total_s for end in ends) for part in (0, 1))
    joint_s = time.backward_s - time.recompute_s - time.reduced_s
    late = max(late, joint_s - soon)
    return soon + time.recompute_s, late + time.reduced_s


def _stage_time(
    count: int, layer: LayerTime, ends: list[LayerTime], gathers_s: float, reduces_s: float
) -> StageTime:
    back_s = layer.backward.total_s + layer.recompute.total_s
    ends_s = [sum(end.forward.total_s for end in ends), sum(end.backward.total_s for end in ends)]
    return StageTime(
        count * layer.forward.total_s + ends_s[0] + gathers_s,
        count * back_s + ends_s[1] + reduces_s,
        count * (layer.forward + layer.backward),
        count * layer.recompute.total_s,
        sum(ends_s),
        gathers_s + reduces_s,
        reduces_s,
    )


def makespan_s(time: PipelineTime) -> float:
    """Return the seconds of a pipeline."""
    return to_s(time.makespan_ps)
