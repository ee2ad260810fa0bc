"""Time a pipeline by the actions of its schedule: longest paths over graphs that are cached.

The graph of a schedule's actions (`algorithms.pipeline.action_graph`) depends on its name and on the numbers of
ranks, stages and micro-batches alone. It is built once for each of them, in topological order, and then timed with
the times of any stages, without making actions again. The result is that of `time_schedule`.

A 1F1B schedule of many micro-batches repeats itself: past a few rounds of as many micro-batches as ranks, each
further round takes as long as the one before. Those rounds are counted, not timed. Where stages differ little, the
slowest one may change in a later round; the error is then smaller than their difference.

Entries say what is faster than a graph: closed forms of stashes, bounds, and recurrences (`PipelineAlgorithm`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from meshweave.algorithms.pipeline.action_graph import TransferRuntime, build_graph
from meshweave.algorithms.pipeline.action_table import tabulate
from meshweave.algorithms.pipeline.action_times import ActionTimes, peak_stashes
from meshweave.algorithms.pipeline.actions import ActionKind, Schedule, looped
from meshweave.algorithms.pipeline.by_name import ScheduleRequest, schedule_by_name
from meshweave.algorithms.pipeline.progress import OrderedActions, ordered_with_transfers
from meshweave.algorithms.table import SCHEDULES
from meshweave.base.units import to_s

_TIMED_ROUNDS = 4
_TIMED_MICRO_BATCHES = 24
"""At least so many rounds, and so many micro-batches, are timed before rounds are counted."""


@dataclass(frozen=True)
class PipelineTime:
    """When the stages of a pipeline end their last backward parts, in picoseconds from the begin of the step.

    Attributes:
        stage_ends_ps: when each stage ends.
        stage_ranks: for each stage its pipeline rank.
    """

    stage_ends_ps: tuple[int, ...]
    stage_ranks: tuple[int, ...]

    @property
    def makespan_ps(self) -> int:
        """Return when the last stage to end does so, in picoseconds from the begin of the step."""
        return max(self.stage_ends_ps)

    @property
    def makespan_s(self) -> float:
        """Return when the last stage to end does so, in seconds from the begin of the step."""
        return to_s(self.makespan_ps)

    @property
    def ends_s(self) -> tuple[float, ...]:
        """Return when each stage ends its last backward part, in seconds from the begin of the step."""
        return tuple(map(to_s, self.stage_ends_ps))

    @property
    def rank_ends_s(self) -> tuple[float, ...]:
        """Return when each pipeline rank ends its last backward part, in seconds from the begin of the step."""
        ends = sorted(zip(self.stage_ranks, self.ends_s, strict=True))
        return tuple(dict(ends).values())


@dataclass(frozen=True)
class _Graph:
    """The actions of a schedule in an order in which each comes after those that it waits for.

    Attributes:
        schedule: the schedule.
        actions: their order, and what they wait for.
        durations: for each action the index of its duration in a list: forward, input_grad, weight_grad and whole
            backward of all stages, kind by kind.
        last: for each stage the number of its last action.
    """

    schedule: Schedule
    actions: OrderedActions
    durations: list[int]
    last: list[int]

    def time(self, times: ActionTimes) -> PipelineTime:
        """Return when the stages end, in the ticks of `times`."""
        values = [*times.forward, *times.input_grad, *times.weight_grad, *times.backward]
        ticks = [values[number] for number in self.durations]
        ends = self.actions.ends(ticks, times.transfer, times.earliest)
        return PipelineTime(tuple(ends[place] for place in self.last), self.schedule.stage_ranks)


def time_pipeline(
    name: str, num_ranks: int, virtual_stages: int, micro_batches: int, times: ActionTimes
) -> PipelineTime:
    """Return when each stage ends its last backward part under the schedule called `name`.

    A periodic schedule of many micro-batches is timed for its first rounds (of `num_ranks` micro-batches each);
    further rounds count as long as the last one timed.

    Args:
        num_ranks: pipeline ranks.
        virtual_stages: stages on each rank.
        micro_batches: micro-batches of a step.
        times: times of stages and transfers, in picoseconds.

    Raises:
        UnsupportedError: there is no such schedule.
        LayoutError: the schedule does not take these numbers of ranks, stages or micro-batches.
    """
    entry = SCHEDULES.named(name).for_stages(virtual_stages)
    request = (entry.name, num_ranks, virtual_stages)
    if entry.uses_times:
        return _graph_of(schedule_of(*request, micro_batches, times)).time(times)
    rounds, rest = divmod(micro_batches, num_ranks)
    is_periodic = entry.repeats and entry.takes(num_ranks, virtual_stages, micro_batches)
    timed = max(_TIMED_ROUNDS, -(-_TIMED_MICRO_BATCHES // num_ranks))
    if not is_periodic or rounds <= timed + 1:
        return _time(*request, micro_batches, times)
    shorter = _time(*request, timed * num_ranks + rest, times)
    longer = _time(*request, (timed + 1) * num_ranks + rest, times)
    more, pairs = rounds - timed, zip(shorter.stage_ends_ps, longer.stage_ends_ps, strict=True)
    return PipelineTime(tuple(early + more * (late - early) for early, late in pairs), shorter.stage_ranks)


def _time(
    name: str, num_ranks: int, virtual_stages: int, micro_batches: int, times: ActionTimes
) -> PipelineTime:
    ends = SCHEDULES[name].ends(micro_batches, times)
    if ends is not None:
        return PipelineTime(ends, tuple(range(num_ranks)))
    return _graph(name, num_ranks, virtual_stages, micro_batches).time(times)


def least_makespan_ps(
    name: str, num_ranks: int, virtual_stages: int, micro_batches: int, times: ActionTimes
) -> int:
    """Return a lower bound of the makespan of a schedule, in picoseconds, in closed form.

    The makespan is the time from the begin of the first action to the end of the last.

    Args:
        name: the schedule's name.
        num_ranks: pipeline ranks.
        virtual_stages: stages on each rank.
        times: times of stages and transfers in picoseconds, with no `saved` (`ActionTimes.joined`).

    Raises:
        UnsupportedError: there is no such schedule.
    """
    entry = SCHEDULES.named(name).for_stages(virtual_stages)
    return entry.least_makespan(num_ranks, micro_batches, times)


@lru_cache(maxsize=4096)
def ranks_of_stages(name: str, num_ranks: int, virtual_stages: int) -> tuple[int, ...]:
    """Return the pipeline rank of each stage; there are `num_ranks` times `virtual_stages` stages.

    Stages are dealt out in turn, as (0, 1, 0, 1) on two ranks, or in a V, as (0, 1, 1, 0), if the schedule accepts
    only that. For a schedule that accepts neither they are dealt out in turn.

    Args:
        name: the schedule's name.
        virtual_stages: stages on each rank.

    Raises:
        UnsupportedError: there is no such schedule.
    """
    placement = SCHEDULES.named(name).for_stages(virtual_stages).place_stages(num_ranks, virtual_stages)
    return looped(num_ranks, virtual_stages) if placement is None else placement


@lru_cache(maxsize=4096)
def splits_backward(name: str, num_ranks: int, virtual_stages: int) -> bool:
    """Return whether the schedule called `name` computes weight gradients in actions apart from input gradients.

    `virtual_stages` is the number of stages of each of `num_ranks` pipeline ranks.

    Raises:
        UnsupportedError: there is no such schedule.
        LayoutError: the schedule does not take these numbers of ranks and stages.
    """
    entry = SCHEDULES.named(name).for_stages(virtual_stages)
    schedule = _schedule(entry.name, num_ranks, virtual_stages, 2 * num_ranks)
    return any(leaf.kind is ActionKind.WEIGHT_GRAD for leaf in schedule.leaves())


@lru_cache(maxsize=4096)
def num_stashes(name: str, num_ranks: int, virtual_stages: int, micro_batches: int) -> tuple[int, ...]:
    """Return for each pipeline rank the most stashes that it holds at once under the schedule called `name`.

    A stash is what one stage keeps of one micro-batch from its forward to its backward. Each rank has
    `virtual_stages` stages. Where no closed form is known, at most four micro-batches per rank are counted.

    Raises:
        UnsupportedError: there is no such schedule.
        LayoutError: no closed form is known, and the schedule does not take these numbers of ranks, stages or
            micro-batches.
    """
    numbers = num_ranks, virtual_stages
    known = SCHEDULES.named(name).for_stages(virtual_stages).num_stashes(*numbers, micro_batches)
    if known is not None:
        return known
    few = min(micro_batches, 4 * num_ranks)
    return peak_stashes(_schedule(name, *numbers, few))


def schedule_of(
    name: str, num_ranks: int, virtual_stages: int, micro_batches: int, times: ActionTimes
) -> Schedule:
    """Return the schedule called `name`, with `virtual_stages` stages on each rank, as a step runs it.

    Actions that the schedule overlaps (a forward with a backward) stand one after the other, and on a single rank
    backward parts are not split. `times` of stages and transfers are read only if the order depends on them; their
    unit makes no difference.

    Raises:
        UnsupportedError: there is no such schedule.
        LayoutError: the schedule does not take these numbers of ranks, stages or micro-batches.
    """
    entry = SCHEDULES.named(name).for_stages(virtual_stages)
    if not entry.uses_times:
        return _schedule(entry.name, num_ranks, virtual_stages, micro_batches)
    request = ScheduleRequest(num_ranks * virtual_stages, micro_batches, virtual_stages)
    return _in_turn(schedule_by_name(entry.name, request, times))


@lru_cache(maxsize=512)
def _schedule(name: str, num_ranks: int, virtual_stages: int, micro_batches: int) -> Schedule:
    request = ScheduleRequest(num_ranks * virtual_stages, micro_batches, virtual_stages)
    return _in_turn(schedule_by_name(name, request, ActionTimes.uniform(request.num_stages)))


@lru_cache(maxsize=512)
def _graph(name: str, num_ranks: int, virtual_stages: int, micro_batches: int) -> _Graph:
    return _graph_of(_schedule(name, num_ranks, virtual_stages, micro_batches))


def _graph_of(schedule: Schedule) -> _Graph:
    graph = build_graph(tabulate(schedule), TransferRuntime.BUFFERED)
    durations = [
        _KINDS.index(action.kind) * schedule.num_stages + action.stage
        for order in schedule.actions
        for action in order
    ]
    leaves = enumerate(action for order in schedule.actions for action in order)
    last = dict(sorted((action.stage, number) for number, action in leaves))
    return _Graph(schedule, ordered_with_transfers(graph), durations, list(last.values()))


_KINDS = (ActionKind.FORWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD, ActionKind.BACKWARD)


def _in_turn(schedule: Schedule) -> Schedule:
    """Return a schedule as a step runs it: with the parts of an overlap one after the other.

    What the first part makes is passed on at its own end. On one pipeline rank, which has no bubble to fill,
    backward parts are whole.
    """
    orders = [tuple(leaf for action in order for leaf in action.leaves) for order in schedule.actions]
    if len(orders) == 1:
        whole = {ActionKind.INPUT_GRAD: ActionKind.BACKWARD}
        kept = (each for each in orders[0] if each.kind is not ActionKind.WEIGHT_GRAD)
        orders = [tuple(replace(each, kind=whole.get(each.kind, each.kind)) for each in kept)]
    return replace(schedule, actions=tuple(orders))
