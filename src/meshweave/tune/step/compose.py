"""Composes a step: layers to stages, stages to a pipeline, and what data parallelism and the optimizer add.

    micro-batch of a stage = its layers, forward and backward with recomputation, and embedding or loss at the ends
    pipeline = the longest path through the actions of the schedule, with transfers between stages
    step = gathers of weights that the first forward parts wait for + pipeline + reductions of the last gradients
           that nothing hides + the optimizer, through memory

Every rank of a degree does the same, so that one stands for all; only pipeline ranks differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshweave.algorithms.pipeline.action_times import ActionTimes
from meshweave.base.errors import LayoutError
from meshweave.base.units import to_ps, to_s
from meshweave.describe.machine.cluster import Cluster, load_cluster
from meshweave.describe.model import Transformer, load_model
from meshweave.ir.work import Compute
from meshweave.tune.step.layers import LayerTime, PartTime, call_s, ends_time, layer_time, strategy_of
from meshweave.tune.step.memory import boundary_bytes, memory_of, rank_parameters
from meshweave.tune.step.pipeline import PipelineTime, time_pipeline
from meshweave.tune.step.placement import check_chips, message_s
from meshweave.tune.step.problem import Parallelism, StepProblem
from meshweave.tune.step.result import Step, StepParts
from meshweave.tune.step.sync import LayerSync, exposed_after, exposed_before, layer_sync

ADAM_STEP_BYTES = 34
"""Bytes through memory per parameter: Adam reads gradient, fp32 weight, momentum and variance, and writes the last
three and the 16-bit weight (Kingma and Ba, 2015, algorithm 1); the norm of gradients reads these once more."""


@dataclass(frozen=True)
class _StageTime:
    """One micro-batch of a stage in seconds, in parts that add up to forward and backward."""

    layers: int
    forward_s: float
    backward_s: float
    work: PartTime
    recompute_s: float
    ends_s: float
    data_s: float


def step_of(problem: StepProblem, parallelism: Parallelism) -> Step:
    """Return the time and memory of a step.

    Raises:
        LayoutError: the degrees do not fit the chips, the batch or the model.
        UnsupportedError: a strategy or schedule is unknown, or the machine cannot place its groups.
    """
    _check(problem, parallelism)
    micro_batches = problem.batch // (parallelism.data * parallelism.micro_batch)
    layers = stage_layers(problem.model.num_layers, parallelism.num_stages)
    layer, (first, last) = layer_time(problem, parallelism), ends_time(problem, parallelism)
    sync = layer_sync(problem, parallelism)
    stages = _stages(problem, parallelism, layers, layer, (first, last), sync)
    pipeline, bare_ps = _pipeline(problem, parallelism, stages, micro_batches)
    on_ranks = [
        [stage for stage, rank in enumerate(pipeline.stage_ranks) if rank == number]
        for number in range(parallelism.pipeline)
    ]
    rank_layers = [sum(layers[stage] for stage in held) for held in on_ranks]
    memory = memory_of(problem, parallelism, rank_layers, pipeline.stashes)
    update_s = _optimizer_s(problem, parallelism, rank_layers)
    before_s = _gathers_s(problem, parallelism, layers, layer, sync)
    ends = [
        to_s(end) + _reductions_s(problem, parallelism, rank, layers, layer, sync) + update_s[rank]
        for rank, end in enumerate(pipeline.ends_ps)
    ]
    slowest = max(range(len(ends)), key=lambda rank: ends[rank])
    makespan_s, after_s = to_s(pipeline.makespan_ps), max(ends) - to_s(pipeline.makespan_ps)
    optimizer_s = min(update_s[slowest], after_s)
    time_s = before_s + makespan_s + after_s + problem.stack.step_s
    busiest = max(
        on_ranks, key=lambda held: sum(stages[stage].forward_s + stages[stage].backward_s for stage in held)
    )
    parts = _parts(
        [stages[stage] for stage in busiest],
        micro_batches,
        (to_s(bare_ps), makespan_s),
        (before_s + after_s - optimizer_s, optimizer_s, problem.stack.step_s),
    )
    return Step(problem, parallelism, time_s, parts, memory, layers)


def step(model: str | Transformer, cluster: str | Cluster, batch: int, seq: int, **options: Any) -> Step:
    """Return the time and memory of a step of one configuration.

    Args:
        model: a model, or a name of the catalog, or a file.
        cluster: a cluster, or a name of the catalog such as "dgx-a100:512", or a file.
        batch: sequences of a step.
        seq: tokens of a sequence.
        options: `tp`, `pp`, `dp`, `cp` and `vp` for the degrees tensor, pipeline, data, context and for virtual
            stages; other attributes of `Parallelism` and of `StepProblem` by their names. Without `dp` there are
            as many replicas as the chips allow.

    Raises:
        LayoutError: the degrees do not fit the chips, the batch or the model.
        DescriptionError: a model or cluster is unknown.
    """
    of_problem = {
        name: options.pop(name)
        for name in ("dtype", "gradient_dtype", "optimizer", "attention", "dropout", "stack")
        if name in options
    }
    problem = StepProblem(
        load_model(model) if isinstance(model, str) else model,
        load_cluster(cluster) if isinstance(cluster, str) else cluster,
        batch,
        seq,
        **of_problem,
    )
    names = {"tp": "tensor", "pp": "pipeline", "dp": "data", "cp": "context", "vp": "virtual_stages"}
    chosen = {names.get(name, name): value for name, value in options.items()}
    unknown = sorted(chosen.keys() - Parallelism.__dataclass_fields__.keys())
    if unknown:
        raise LayoutError(
            f"step: unknown option '{unknown[0]}'; give attributes of Parallelism or StepProblem"
        )
    parallelism = Parallelism(**chosen)
    if "data" not in chosen:
        replicas = problem.cluster.num_chips // parallelism.num_ranks
        parallelism = Parallelism(**{**chosen, "data": max(replicas, 1)})
    return step_of(problem, parallelism)


def stage_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Return the layers of each stage: as equal as can be, and where some have one more, those in the middle.

    So the stages of embedding and loss have one less where the layers do not divide (Qi et al., Zero Bubble).
    """
    each, more = divmod(num_layers, num_stages)
    begin = (num_stages - more) // 2
    return tuple(each + (begin <= stage < begin + more) for stage in range(num_stages))


def _check(problem: StepProblem, parallelism: Parallelism) -> None:
    """Raise LayoutError where a step cannot be laid out."""
    model, p = problem.model, parallelism
    reason = check_chips(problem, p)
    if reason is not None:
        raise LayoutError(reason)
    strategy_of(problem, p)
    if problem.batch % (p.data * p.micro_batch):
        raise LayoutError(
            f"a batch of {problem.batch} is not a multiple of data {p.data} x micro-batch {p.micro_batch}"
        )
    if p.num_stages > model.num_layers:
        raise LayoutError(f"{model.name} has {model.num_layers} layers, too few for {p.num_stages} stages")
    if p.virtual_stages > 1 and p.pipeline == 1:
        raise LayoutError("virtual_stages needs a pipeline of at least 2 ranks; give 1")
    if p.tensor_size > model.num_kv_heads and p.strategy in ("megatron", "megatron_sp"):
        raise LayoutError(
            f"{model.name} has {model.num_kv_heads} groups of heads, too few for tensor {p.tensor_size}"
        )
    if problem.seq % p.context:
        raise LayoutError(f"sequences of {problem.seq} tokens do not divide over context {p.context}")


def _stages(
    problem: StepProblem,
    parallelism: Parallelism,
    layers: tuple[int, ...],
    layer: LayerTime,
    ends: tuple[LayerTime, LayerTime],
    sync: LayerSync,
) -> list[_StageTime]:
    """Return what one micro-batch takes on each stage."""
    overlap = problem.stack.overlap
    known: dict[tuple[int, bool, bool], _StageTime] = {}
    stages = []
    for stage, count in enumerate(layers):
        key = count, stage == 0, stage == len(layers) - 1
        if key not in known:
            at_ends = [end for end, is_here in zip(ends, key[1:], strict=True) if is_here]
            ends_forward = sum(end.forward.total_s for end in at_ends)
            ends_backward = sum(end.backward.total_s for end in at_ends)
            back_s = layer.backward.total_s + layer.recompute.total_s
            gathers_s = reduces_s = 0.0
            if parallelism.zero == 3:
                gathers_s = exposed_before(count, layer.forward.total_s, sync.gather_s, overlap)
                reduces_s = exposed_after(count, back_s, sync.gather_s + sync.reduce_s, overlap)
            elif parallelism.zero == 2:
                reduces_s = exposed_after(count, back_s, sync.reduce_s, overlap)
            known[key] = _StageTime(
                count,
                count * layer.forward.total_s + ends_forward + gathers_s,
                count * back_s + ends_backward + reduces_s,
                count * (layer.forward + layer.backward),
                count * layer.recompute.total_s,
                ends_forward + ends_backward,
                gathers_s + reduces_s,
            )
        stages.append(known[key])
    return stages


def _pipeline(
    problem: StepProblem, parallelism: Parallelism, stages: list[_StageTime], micro_batches: int
) -> tuple[PipelineTime, int]:
    """Return when pipeline ranks are done, and the makespan that transfers of no time would have."""
    size = parallelism.pipeline
    if size == 1:
        total = sum(to_ps(stage.forward_s) + to_ps(stage.backward_s) for stage in stages)
        time = PipelineTime(micro_batches * total, (micro_batches * total,), (0,), (1,))
        return time, time.makespan_ps
    hop_s = message_s(problem, size, parallelism.stride("pipeline"), boundary_bytes(problem, parallelism))
    times = ActionTimes(
        tuple(to_ps(stage.forward_s) for stage in stages),
        *_gradients(stages),
        (to_ps(hop_s),) * (len(stages) - 1),
    )
    numbers = parallelism.schedule, size, parallelism.virtual_stages, micro_batches
    timed = time_pipeline(*numbers, times)
    bare = ActionTimes(times.forward, times.input_grad, times.weight_grad, (0,) * (len(stages) - 1))
    return timed, time_pipeline(*numbers, bare).makespan_ps


def _gradients(stages: list[_StageTime]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the picoseconds of gradients of inputs, with recomputation, and of weights: equal products."""
    inputs, weights = [], []
    for stage in stages:
        whole, again = to_ps(stage.backward_s), to_ps(stage.recompute_s)
        half = max(whole - again, 0) // 2
        inputs.append(whole - half)
        weights.append(half)
    return tuple(inputs), tuple(weights)


def _optimizer_s(problem: StepProblem, parallelism: Parallelism, rank_layers: list[int]) -> list[float]:
    """Return the seconds of the update of weights on each pipeline rank."""
    shards = parallelism.shards if parallelism.zero else 1
    out = []
    for count in rank_parameters(problem, parallelism, rank_layers):
        own = -(-count // shards)
        work = Compute("call", own, own * ADAM_STEP_BYTES, dtype="float32", call="elementwise")
        out.append(call_s(problem, work))
    return out


def _gathers_s(
    problem: StepProblem, parallelism: Parallelism, layers: tuple[int, ...], layer: LayerTime, sync: LayerSync
) -> float:
    """Return by how much gathers of updated weights delay the step (ZeRO-1 and 2): those of the first rank."""
    if parallelism.zero not in (1, 2):
        return 0.0
    of_rank = sum(layers[stage] for stage in range(0, len(layers), parallelism.pipeline))
    overlap = problem.stack.overlap
    return exposed_before(layers[0], layer.forward.total_s, sync.gather_s, overlap) + (
        of_rank - layers[0]
    ) * sync.gather_s * (1 - overlap)


def _reductions_s(
    problem: StepProblem,
    parallelism: Parallelism,
    rank: int,
    layers: tuple[int, ...],
    layer: LayerTime,
    sync: LayerSync,
) -> float:
    """Return what reductions of gradients add after the last backward part of a pipeline rank (ZeRO-0 and 1)."""
    table_s = sync.table_s if rank in (0, parallelism.pipeline - 1) else 0.0
    if parallelism.zero >= 2:
        return table_s
    back_s = layer.backward.total_s + layer.recompute.total_s
    of_rank = sum(layers[stage] for stage in range(rank, len(layers), parallelism.pipeline))
    overlap = problem.stack.overlap
    after_s = exposed_after(layers[rank], back_s, sync.reduce_s, overlap)
    return after_s + (of_rank - layers[rank]) * sync.reduce_s * (1 - overlap) + table_s


def _parts(
    stages: list[_StageTime],
    micro_batches: int,
    makespans_s: tuple[float, float],
    after: tuple[float, float, float],
) -> StepParts:
    """Return the parts of a step on the rank with these stages.

    Args:
        makespans_s: of the pipeline without and with the time of transfers.
        after: seconds of data parallelism outside the pipeline, of the optimizer, and of software.
    """
    bare_s, makespan_s = makespans_s
    data_s, optimizer_s, software_s = after
    busy_s = micro_batches * sum(stage.forward_s + stage.backward_s for stage in stages)
    work = PartTime()
    for stage in stages:
        work = work + stage.work
    return StepParts(
        compute=micro_batches * work.compute_s,
        recompute=micro_batches * sum(stage.recompute_s for stage in stages),
        ends=micro_batches * sum(stage.ends_s for stage in stages),
        tensor=micro_batches * work.tensor_s,
        context=micro_batches * work.context_s,
        bubble=bare_s - busy_s,
        transfers=makespan_s - bare_s,
        data=micro_batches * sum(stage.data_s for stage in stages) + data_s,
        optimizer=optimizer_s,
        software=software_s,
    )
