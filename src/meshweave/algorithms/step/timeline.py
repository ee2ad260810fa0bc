"""When the parts of a step run, for pictures: actions of pipeline ranks, and tasks of a layer.

The times are those of `step_of`: the pipeline by its schedule, whose first micro-batch waits for gathers of
weights, reductions of gradients beside the last backward parts, then the optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshweave.algorithms.pipeline.action_graph import TransferRuntime
from meshweave.algorithms.pipeline.action_times import TimedSchedule, time_schedule
from meshweave.algorithms.pipeline.actions import COMPUTE_WORDS, Action, ActionKind, Schedule
from meshweave.algorithms.step.block_time import layer_block
from meshweave.algorithms.step.compose import update_times_s
from meshweave.algorithms.step.data_parallel import sums_after
from meshweave.algorithms.step.pipeline import schedule_of
from meshweave.algorithms.step.result import Step
from meshweave.base.units import format_bytes, to_s
from meshweave.ir.work import Compute, Work

MAX_ACTIONS = 40_000
"""Actions of a pipeline that are timed; of a longer one the first micro-batches are."""
MAX_SPANS = 8_000
"""Spans of a timeline; where there are more, fewer pipeline ranks are shown."""
MAX_RANKS = 16


@dataclass(frozen=True)
class StepSpan:
    """An op of a timeline, from `begin_s` to `end_s`: seconds from the begin of the step, or of the layer.

    Attributes:
        kind: "forward", "backward", "input gradient", "weight gradient", "optimizer", "software", "products",
            "element-wise", "issuing" (what the host does), "hidden" or "exposed"; the last two are communication.
        name: what runs, if the kind does not say it.
        micro_batch, stage: numbers from 0, or None.
    """

    begin_s: float
    end_s: float
    kind: str
    name: str = ""
    micro_batch: int | None = None
    stage: int | None = None


@dataclass(frozen=True)
class TimelineLane:
    """Spans in a row of a picture; lanes of one group follow each other."""

    group: str
    name: str
    spans: tuple[StepSpan, ...]


@dataclass(frozen=True)
class StepTimeline:
    """Lanes with what runs in them.

    Attributes:
        duration_s: the end of the last span, in seconds, that of ranks without lanes included.
        remark: which micro-batches, pipeline ranks or kind of layers are shown, in words; "" where all are.
    """

    lanes: tuple[TimelineLane, ...]
    duration_s: float
    remark: str = ""


def step_timeline(step: Step) -> StepTimeline:
    """Return when forwards, backwards, optimizer and software of a step run on each pipeline rank.

    Other lanes have what hosts issue, messages between stages, and collectives of replicas. Very large steps are
    cut to fewer micro-batches and to at most `MAX_RANKS` pipeline ranks; `remark` says so.
    """
    timed, count = _timed(step)
    p = step.parallelism
    updates_s = update_times_s(step.problem, p)
    software_s = step.problem.stack.step_s
    per_rank = max(len(order) for order in timed.schedule.actions)
    ranks = _spread(p.pipeline, max(1, min(MAX_RANKS, MAX_SPANS // (3 * per_rank))))
    last_s = _last_s(timed)
    ends_s = [to_s(max(ends)) + step.stages.reductions_s(i, last_s) for i, ends in enumerate(timed.ends)]
    done_s = max(end + update for end, update in zip(ends_s, updates_s, strict=True))
    lanes: list[TimelineLane] = []
    for rank in ranks:
        group = f"pipeline rank {rank}"
        spans = [*_actions(timed, rank)]
        if updates_s[rank]:
            spans.append(StepSpan(ends_s[rank], ends_s[rank] + updates_s[rank], "optimizer"))
        if software_s:
            spans.append(StepSpan(done_s, done_s + software_s, "software"))
        lanes.append(TimelineLane(group, "computing", tuple(spans)))
        if issued := _issued(step, timed, rank):
            lanes.append(TimelineLane(group, "host", tuple(issued)))
        if messages := _messages(timed, rank):
            lanes.append(TimelineLane(group, "messages", tuple(messages)))
        if data := _replica_spans(step, timed, rank):
            lanes.append(TimelineLane(group, "replicas", tuple(data)))
    remarks = []
    if count < step.num_micro_batches:
        remarks.append(f"the first {count} of {step.num_micro_batches} micro-batches")
    if len(ranks) < p.pipeline:
        remarks.append(f"{len(ranks)} of {p.pipeline} pipeline ranks")
    remark = f"Shown: {' on '.join(remarks)}." if remarks else ""
    return StepTimeline(tuple(lanes), done_s + software_s, remark)


def _timed(step: Step) -> tuple[TimedSchedule, int]:
    """Return when actions run, and of how many micro-batches; of all, unless these are very many."""
    p, stages = step.parallelism, step.stages
    times = stages.action_times()
    few = max(2 * p.pipeline, MAX_ACTIONS // (3 * p.num_stages))
    count = min(step.num_micro_batches, few - few % p.pipeline)
    if p.pipeline == 1:
        both = (ActionKind.FORWARD, ActionKind.BACKWARD)
        actions = tuple(Action(kind, 0, number) for number in range(count) for kind in both)
        schedule = Schedule((0,), count, (actions,))
    else:
        schedule = schedule_of(p.schedule, p.pipeline, p.virtual_stages, count, times)
    return time_schedule(schedule, times, TransferRuntime.BUFFERED), count


def _last_s(timed: TimedSchedule) -> list[float]:
    """Return when each stage ends its last action, in seconds."""
    last: dict[int, float] = {}
    for order, ends in zip(timed.schedule.actions, timed.ends, strict=True):
        last |= {
            leaf.stage: to_s(end) for action, end in zip(order, ends, strict=True) for leaf in action.leaves
        }
    return [last[stage] for stage in range(timed.schedule.num_stages)]


def _spread(count: int, shown: int) -> tuple[int, ...]:
    """Return so many of `count` numbers, evenly, with the first and the last."""
    if shown >= count:
        return tuple(range(count))
    if shown == 1:
        return (0,)
    return tuple(round(place * (count - 1) / (shown - 1)) for place in range(shown))


def _actions(timed: TimedSchedule, rank: int) -> list[StepSpan]:
    spans = []
    ticks = zip(timed.schedule.actions[rank], timed.begins[rank], timed.ends[rank], strict=True)
    for action, begin, end in ticks:
        kind = COMPUTE_WORDS.get(action.leaves[-1].kind, "backward")
        name, times_s = str(action) if action.parts else "", (to_s(begin), to_s(end))
        spans.append(StepSpan(*times_s, kind, name, action.leaves[0].micro_batch, action.leaves[0].stage))
    return spans


def _issued(step: Step, timed: TimedSchedule, rank: int) -> list[StepSpan]:
    """Return when the host of a pipeline rank issues its actions: each from when the chip begins it on."""
    spans: list[StepSpan] = []
    for span in _actions(timed, rank):
        assert span.stage is not None
        forward_s, backward_s = step.stages.times[span.stage].issued_s
        taken_s = forward_s if span.kind == "forward" else backward_s
        if span.kind in ("input gradient", "weight gradient"):
            taken_s /= 2
        end_s = min(span.begin_s + taken_s, span.end_s)
        if end_s > span.begin_s:
            spans.append(StepSpan(span.begin_s, end_s, "issuing", "", span.micro_batch, span.stage))
    return spans


def _messages(timed: TimedSchedule, rank: int) -> list[StepSpan]:
    """Return the messages that a pipeline rank receives; the parts of them that it waits for are exposed."""
    ranks = timed.schedule.stage_ranks
    hops = timed.times.transfer
    if not any(hops):
        return []
    wanted: dict[tuple[str, int], int] = {}
    for stage, own in enumerate(ranks):
        if own == rank and stage and ranks[stage - 1] != rank:
            wanted["forward", stage - 1] = stage
        if own == rank and stage + 1 < len(ranks) and ranks[stage + 1] != rank:
            wanted["backward", stage + 1] = stage
    spans = []
    for other, order in enumerate(timed.schedule.actions):
        for action, end in zip(order, timed.ends[other], strict=True):
            for leaf in action.leaves:
                forth = "forward" if leaf.kind is ActionKind.FORWARD else "backward"
                if leaf.kind is ActionKind.WEIGHT_GRAD or (forth, leaf.stage) not in wanted:
                    continue
                what = "activations" if forth == "forward" else "gradients"
                name = f"{what} of stage {leaf.stage} from rank {other}"
                hop = hops[leaf.stage - (forth == "backward")]
                times_s = to_s(end), to_s(end + hop)
                spans.append(StepSpan(*times_s, "hidden", name, leaf.micro_batch, wanted[forth, leaf.stage]))
    for each in timed.exposed:
        if each.rank == rank:
            name = f"waits for {each.transfer}"
            spans.append(StepSpan(to_s(each.begin), to_s(each.begin + each.ticks), "exposed", name))
    return sorted(spans, key=lambda span: span.begin_s)


def _replica_spans(step: Step, timed: TimedSchedule, rank: int) -> list[StepSpan]:
    """Return the gathers of weights and reductions of gradients of a pipeline rank.

    Layers of one stage are done one after the other at the end of its last backward part. Where each micro-batch
    has its own collectives, they stand beside its actions, whose times have what they expose.
    """
    p, stages, stack = step.parallelism, step.stages, step.problem.stack
    own = stages.stages_of(rank)
    of_stages = [(stages.layers[stage], stages.times[stage].data_parallel) for stage in own]
    order = list(zip(timed.schedule.actions[rank], timed.begins[rank], timed.ends[rank], strict=True))
    spans: list[StepSpan] = []
    each_time = p.zero == 3 or (p.zero == 2 and stack.regathers)
    gathers_s = sum(layers * costs.gather_s for layers, costs in of_stages)
    if p.zero and gathers_s and not each_time:
        layers = sum(layers for layers, _ in of_stages)
        first = timed.begins[rank][0]
        waited_s = to_s(first) if first == timed.times.earliest[own[0]] else 0.0
        spans += _split(0.0, gathers_s, waited_s, f"gather the weights of {layers} layers")
    if p.zero >= 2:
        for action, begin, end in order:
            spans += _beside(step, action, to_s(begin), to_s(end), each_time)
    elif any(costs.reduce_s for _, costs in of_stages):
        last_s = _last_s(timed)
        rank_end_s, free_s = max(last_s[stage] for stage in own), 0.0
        for stage in sorted(own, key=lambda stage: last_s[stage]):
            time = stages.times[stage]
            for left in reversed(range(stages.layers[stage])):
                name = f"reduce the gradients of a layer of stage {stage}"
                hides = stack.overlap and not sums_after(step.problem, p)
                ready_s = last_s[stage] - left * time.layer_s[1] if hides else rank_end_s
                begin_s = max(ready_s, free_s)
                free_s = begin_s + time.data_parallel.reduce_s
                spans += _split(begin_s, free_s, rank_end_s, name, exposed_after=True)
        end_s = rank_end_s + stages.reductions_s(rank, last_s)
        if end_s > max(free_s, rank_end_s) * (1 + 1e-9):  # tables, and what the stack does not overlap
            begin_s = max(free_s, rank_end_s)
            spans.append(StepSpan(begin_s, end_s, "exposed", "reduce other gradients"))
    return spans


def _split(
    begin_s: float, end_s: float, at_s: float, name: str, exposed_after: bool = False
) -> list[StepSpan]:
    """Return a span in two at a time, exposed before it or after it."""
    kinds = ("hidden", "exposed") if exposed_after else ("exposed", "hidden")
    middle_s = min(max(at_s, begin_s), end_s)
    parts = ((begin_s, middle_s, kinds[0]), (middle_s, end_s, kinds[1]))
    return [StepSpan(start, stop, kind, name) for start, stop, kind in parts if stop > start]


def _beside(step: Step, action: Action, begin_s: float, end_s: float, gathers: bool) -> list[StepSpan]:
    """Return the collectives of replicas beside an action, as one span that ends with it at the latest."""
    stage = action.leaves[0].stage
    layers, costs = step.stages.layers[stage], step.stages.times[stage].data_parallel
    forward = action.leaves[-1].kind is ActionKind.FORWARD
    if forward or action.leaves[-1].kind is ActionKind.INPUT_GRAD:
        name, seconds = "gather weights", costs.gather_s if gathers else 0.0
    else:
        again_s = costs.gather_s if step.parallelism.zero == 3 and not action.parts else 0.0
        name = "gather weights and reduce gradients" if again_s else "reduce gradients"
        seconds = costs.reduce_s + again_s
    taken_s = min(layers * seconds, end_s - begin_s)
    if not taken_s > 0:
        return []
    start_s = begin_s if forward else end_s - taken_s
    return [StepSpan(start_s, start_s + taken_s, "hidden", name, action.leaves[0].micro_batch, stage)]


def layer_timeline(step: Step) -> StepTimeline | None:
    """Return when the tasks of one layer (of the first kind) run for a micro-batch, forward and backward.

    Recomputation and reductions of gradients of weights are left out. None where broadcasts go along chains of
    ranks (`estimate.timeline.task_spans`).
    """
    spans = layer_block(step.problem, step.parallelism).spans
    if not spans:
        return None
    busy = [(to_s(each.begin_ps), to_s(each.end_ps)) for each in spans if isinstance(each.task.work, Compute)]
    lanes: dict[str, list[StepSpan]] = {}
    for each in spans:
        begin_s, end_s, work = to_s(each.begin_ps), to_s(each.end_ps), each.task.work
        lane = lanes.setdefault(each.task.lane, [])
        if end_s <= begin_s:
            continue
        name = _work_text(work, each.task.times)
        if isinstance(work, Compute):
            kind = "products" if work.kind == "matmul" or work.call == "attention" else "element-wise"
            lane.append(StepSpan(begin_s, end_s, kind, name))
        else:
            lane += _hidden_and_exposed(begin_s, end_s, busy, name)
    ordered = sorted(lanes, key=lambda name: name != "compute")
    drawn = tuple(
        TimelineLane("one layer", "computing" if name == "compute" else f"lane {name}", tuple(lanes[name]))
        for name in ordered
    )
    kinds = len(step.problem.kinds)
    remark = f"Shown: a layer of the first of {kinds} kinds." if kinds > 1 else ""
    return StepTimeline(drawn, max(to_s(each.end_ps) for each in spans), remark)


def _hidden_and_exposed(
    begin_s: float, end_s: float, busy: list[tuple[float, float]], name: str
) -> list[StepSpan]:
    """Return a transfer cut where computing (`busy`, in order) begins and ends: what it runs beside is hidden."""
    spans, at_s = [], begin_s
    for start_s, stop_s in busy:
        if stop_s <= at_s or start_s >= end_s:
            continue
        if start_s > at_s:
            spans.append(StepSpan(at_s, start_s, "exposed", name))
        spans.append(StepSpan(max(start_s, at_s), min(stop_s, end_s), "hidden", name))
        at_s = min(stop_s, end_s)
    if at_s < end_s:
        spans.append(StepSpan(at_s, end_s, "exposed", name))
    return spans


def _work_text(work: Work, times: int) -> str:
    """Return what an op does, in words."""
    if isinstance(work, Compute):
        if work.kind == "matmul":
            return f"product {' x '.join(map(str, work.dims))}"
        return work.call or work.kind
    text = (
        f"{work.kind.replace('_', '-')} of {format_bytes(work.part_bytes)} a rank over {work.num_ranks} ranks"
    )
    return text if times == 1 else f"{times} times {text}"
