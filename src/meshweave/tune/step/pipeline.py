"""Time a pipeline by the actions of its schedule: longest paths over graphs that are cached.

The graph of a schedule's actions (`algorithms.pipeline.action_graph`) depends on its name and on the numbers of
ranks, stages and micro-batches alone. It is built once for each of them, in topological order, and then timed with
the times of any stages. The result is that of `time_schedule`, without making actions again.

A 1F1B schedule of many micro-batches repeats itself: past a few rounds of as many micro-batches as ranks, each
further round takes as long as the one before. Those rounds are counted, not timed. Where stages differ little, the
slowest one may change in a later round; the error is then smaller than their difference.

`least_makespan_ps` is a closed form that is never more than that: a few paths through the actions. In 1F1B rank j
of P has w = P - j micro-batches in flight. With C its forward and backward, and R what a micro-batch takes from
its forward there through later ranks and back, M micro-batches take M C, with R in place of w - 1 of the C for
each round trip, and what the ranks before take once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from meshweave.algorithms.pipeline.action_graph import TransferRuntime, build_graph
from meshweave.algorithms.pipeline.action_table import IntArray, tabulate
from meshweave.algorithms.pipeline.action_times import ActionTimes, peak_stashes
from meshweave.algorithms.pipeline.actions import ActionKind, Schedule, folded, looped
from meshweave.algorithms.pipeline.by_name import ScheduleRequest, schedule_by_name
from meshweave.algorithms.pipeline.interleaved import round_sizes

_TIMED_ROUNDS = 4
_TIMED_MICRO_BATCHES = 24
"""At least so many rounds, and so many micro-batches, are timed before rounds are counted."""
_MANY_RANKS = 16
"""1F1B of so many ranks is timed slot by slot."""
_PERIODIC = ("1f1b", "interleaved-1f1b", "gpipe")
_FOLDED = ("zbv", "dualpipev")
_BY_TIMES = ("zb-1p", "zb-2p")
"""Schedules that depend on the times of their stages."""


@dataclass(frozen=True)
class PipelineTime:
    """When the ranks of a pipeline are done.

    Attributes:
        makespan_ps: when the last of them is.
        ends_ps: when each of them is.
        stage_ranks: for each stage the rank that has it.
    """

    makespan_ps: int
    ends_ps: tuple[int, ...]
    stage_ranks: tuple[int, ...]


@dataclass(frozen=True)
class _Graph:
    """The actions of a schedule in an order in which each comes after those that it waits for.

    Attributes:
        schedule: the schedule.
        durations: for each action the index of its duration in a list: forward, input_grad, weight_grad and whole
            backward of all stages, kind by kind, and then those of `overlaps`.
        overlaps: for each pair of actions that overlap the indices of the two durations.
        waits: for each action those that it waits for, with the edge that carries its value, or ABSENT.
        last: for each rank the index of its last action.
    """

    schedule: Schedule
    durations: list[int]
    overlaps: list[tuple[int, ...]]
    waits: list[tuple[tuple[int, int], ...]]
    last: list[int]

    def time(self, times: ActionTimes) -> PipelineTime:
        """Return when the ranks are done."""
        whole = tuple(a + b for a, b in zip(times.input_grad, times.weight_grad, strict=True))
        values = [*times.forward, *times.input_grad, *times.weight_grad, *whole]
        values += [sum(values[part] for part in parts) for parts in self.overlaps]
        delays = (*times.transfer, 0)  # of ABSENT, the last
        ends: list[int] = []
        for duration, waits in zip(self.durations, self.waits, strict=True):
            begin = 0
            for other, edge in waits:
                end = ends[other] + delays[edge]
                if end > begin:
                    begin = end
            ends.append(begin + values[duration])
        of_ranks = tuple(ends[place] for place in self.last)
        return PipelineTime(max(of_ranks), of_ranks, self.schedule.stage_ranks)


def time_pipeline(
    name: str, num_ranks: int, virtual_stages: int, micro_batches: int, times: ActionTimes
) -> PipelineTime:
    """Return when the ranks of a schedule are done; times of stages and transfers are in picoseconds.

    Raises:
        UnsupportedError: there is no such schedule.
        LayoutError: the schedule does not take these numbers.
    """
    name = "interleaved-1f1b" if name == "1f1b" and virtual_stages > 1 else name
    request = (name, num_ranks, virtual_stages)
    if name in _BY_TIMES:
        return _build(*request, micro_batches, times).time(times)
    rounds, rest = divmod(micro_batches, num_ranks)
    is_periodic = name in _PERIODIC and (rest == 0 or name != "interleaved-1f1b")
    timed = max(_TIMED_ROUNDS, -(-_TIMED_MICRO_BATCHES // num_ranks))
    if not is_periodic or rounds <= timed + 1:
        return _time(*request, micro_batches, times)
    shorter = _time(*request, timed * num_ranks + rest, times)
    longer = _time(*request, (timed + 1) * num_ranks + rest, times)
    more = rounds - timed
    round_ps = longer.makespan_ps - shorter.makespan_ps
    return PipelineTime(
        shorter.makespan_ps + more * round_ps,
        tuple(
            early + more * (late - early) for early, late in zip(shorter.ends_ps, longer.ends_ps, strict=True)
        ),
        shorter.stage_ranks,
    )


def _time(
    name: str, num_ranks: int, virtual_stages: int, micro_batches: int, times: ActionTimes
) -> PipelineTime:
    if name == "1f1b" and num_ranks >= _MANY_RANKS:
        return time_in_slots(micro_batches, times)
    return _graph(name, num_ranks, virtual_stages, micro_batches).time(times)


def time_in_slots(micro_batches: int, times: ActionTimes) -> PipelineTime:
    """Return when the ranks of 1F1B with one stage each are done, without a graph.

    If all actions took one slot, rank i of P would run the forward of micro-batch m in slot i + m as long as that
    is before P, else in slot i + 2 m, and the backward in slot 2 P - 1 - i + 2 m. Whatever actions take, each
    waits for the one before it on its rank, and for what the rank before (forward) or after (backward) did last.
    """
    size, most = len(times.forward), 2 * (micro_batches - 1)
    forward, input_grad, weight_grad = (
        np.array(each, np.int64) for each in (times.forward, times.input_grad, times.weight_grad)
    )
    backward, delay = input_grad + weight_grad, np.array((*times.transfer, 0), np.int64)
    ends = np.zeros(size + 2, np.int64)  # of each rank, between two that are always done
    sends = np.zeros(size + 1, np.int64)  # what each rank waits for a value from the one before
    sends[1:-1] = delay[:-1]
    for slot in range(most + 2 * size):
        before = ends.copy()
        if slot < size:
            ranks = slice(max(0, slot - micro_batches + 1), slot + 1)
        else:
            least = max(2 * size - slot, slot - most, 0)
            ranks = slice(least + (least - slot) % 2, size, 2)
        _advance(ends, before, ranks, -1, sends[:-1], forward)
        least, limit = 2 * size - 1 - slot, most + 2 * size - slot
        least = max(least, (slot + 1) % 2)
        _advance(ends, before, slice(least, min(limit, size), 2), 1, sends[1:], backward)
    of_ranks = tuple(ends[1:-1].tolist())
    return PipelineTime(max(of_ranks), of_ranks, tuple(range(size)))


def _advance(
    ends: IntArray, before: IntArray, ranks: slice, towards: int, delays: IntArray, ticks: IntArray
) -> None:
    """Advance ranks by one action each, which waits for their neighbour on one side."""
    if ranks.start >= ranks.stop:
        return
    own = slice(ranks.start + 1, ranks.stop + 1, ranks.step)
    other = slice(own.start + towards, own.stop + towards, ranks.step)
    ends[own] = np.maximum(before[own], before[other] + delays[ranks]) + ticks[ranks]


def least_makespan_ps(
    name: str, num_ranks: int, virtual_stages: int, micro_batches: int, times: ActionTimes
) -> int:
    """Return a lower bound of the makespan of a schedule in picoseconds, in closed form (module docstring)."""
    is_periodic = name in _PERIODIC
    if name in ("zb-h1", "zbv"):
        return _least_zero_bubble_ps(name == "zbv", num_ranks, micro_batches, times)
    whole = [sum(each) for each in zip(times.forward, times.input_grad, times.weight_grad, strict=True)]
    if name == "1f1b" and virtual_stages == 1:
        return _longest_of_paths(whole, times, micro_batches)
    before = best = 0
    for rank in range(num_ranks):
        busy = micro_batches * sum(whole[rank::num_ranks]) if is_periodic else 0
        best = max(best, before + busy)
        before += whole[rank] + 2 * (times.transfer[rank] if rank < len(times.transfer) else 0)
    return best if is_periodic else micro_batches * sum(whole) // num_ranks


def _least_zero_bubble_ps(is_folded: bool, num_ranks: int, micro_batches: int, times: ActionTimes) -> int:
    """Return a lower bound of the makespan of ZB-H1, or ZB-V, whose stages go there and back (`is_folded`).

    A rank begins when the ranks before it have sent it the first micro-batch, and works all of its time at best.
    Before its last gradient of inputs goes back through the ranks before it, it has made all of them.
    """
    last = len(times.forward) - 1
    best = before = after = 0
    for rank in range(num_ranks):
        own = (rank, last - rank) if is_folded else (rank,)
        urgent = sum(times.forward[stage] + times.input_grad[stage] for stage in own)
        weights = sum(times.weight_grad[stage] for stage in own)
        busy, back = micro_batches * (urgent + weights), micro_batches * urgent + after + times.weight_grad[0]
        best = max(best, before + busy, before + back)
        hop = times.transfer[rank] if rank < len(times.transfer) else 0
        before, after = before + times.forward[rank] + hop, after + times.input_grad[rank] + hop
    return best


def _longest_of_paths(whole: list[int], times: ActionTimes, micro_batches: int) -> int:
    """Return the longest path through 1F1B that stays at one rank but for round trips that make it longer."""
    before, best, size = 0, 0, len(whole)
    after = sum(whole) + 2 * sum(times.transfer)
    for rank, cycle in enumerate(whole):
        after -= cycle  # through later ranks and back
        window = min(size - rank, micro_batches)
        forward, backward = times.forward[rank], cycle - times.forward[rank]
        if micro_batches <= window:
            gain = max(0, after - (micro_batches - 1) * min(forward, backward))
        else:
            first, last = after - (window - 1) * forward, after - (window - 1) * backward
            others = ((micro_batches - 1) // window - 1) * (after - (window - 1) * cycle)
            gain = max(0, first, last, first + last, first + last + others)
        best = max(best, before + micro_batches * cycle + gain)
        hop = 2 * (times.transfer[rank] if rank < len(times.transfer) else 0)
        before, after = before + cycle + hop, after - hop
    return best


@lru_cache(maxsize=4096)
def ranks_of_stages(name: str, num_ranks: int, virtual_stages: int) -> tuple[int, ...]:
    """Return for each stage the pipeline rank that has it: dealt out in turn, or for some schedules in a V."""
    if name in _FOLDED and virtual_stages == 2:
        return folded(num_ranks)
    return looped(num_ranks, virtual_stages)


@lru_cache(maxsize=4096)
def num_stashes(name: str, num_ranks: int, virtual_stages: int, micro_batches: int) -> tuple[int, ...]:
    """Return for each rank the most micro-batches, over its stages, whose activations it keeps (`peak_stashes`).

    Raises:
        UnsupportedError: there is no such schedule.
        LayoutError: the schedule does not take these numbers.
    """
    all_of_rank = micro_batches * virtual_stages
    ranks = range(num_ranks)
    if name == "gpipe":
        return (all_of_rank,) * num_ranks
    if name == "1f1b" and virtual_stages == 1:
        return tuple(min(all_of_rank, num_ranks - rank) for rank in ranks)
    if name in ("1f1b", "interleaved-1f1b"):
        ahead = (virtual_stages - 1) * round_sizes(micro_batches, num_ranks)[0] + 1
        return tuple(min(all_of_rank, ahead + 2 * (num_ranks - 1 - rank)) for rank in ranks)
    if name == "zb-h1" and micro_batches >= num_ranks:
        return (num_ranks,) * num_ranks
    if name == "zbv" and micro_batches >= 2 * num_ranks:
        return (2 * num_ranks,) * num_ranks
    few = min(micro_batches, 4 * num_ranks)
    return peak_stashes(_graph(name, num_ranks, virtual_stages, few).schedule)


@lru_cache(maxsize=512)
def _graph(name: str, num_ranks: int, virtual_stages: int, micro_batches: int) -> _Graph:
    return _build(
        name, num_ranks, virtual_stages, micro_batches, ActionTimes.uniform(num_ranks * virtual_stages)
    )


def _build(name: str, num_ranks: int, virtual_stages: int, micro_batches: int, times: ActionTimes) -> _Graph:
    num_stages = num_ranks * virtual_stages
    schedule = schedule_by_name(name, ScheduleRequest(num_stages, micro_batches, virtual_stages), times)
    graph = build_graph(tabulate(schedule), TransferRuntime.BUFFERED)
    waits: list[list[tuple[int, int]]] = [[] for _ in range(graph.num_nodes)]
    followers: list[list[int]] = [[] for _ in range(graph.num_nodes)]
    for source, target, edge in zip(
        graph.sources.tolist(), graph.targets.tolist(), graph.carried.tolist(), strict=True
    ):
        waits[target].append((source, edge))
        followers[source].append(target)
    left = [len(each) for each in waits]
    order = [node for node, count in enumerate(left) if not count]
    for node in order:
        for other in followers[node]:
            left[other] -= 1
            if not left[other]:
                order.append(other)
    place = [0] * len(order)
    for number, node in enumerate(order):
        place[node] = number
    durations, overlaps = _durations(schedule, num_stages)
    starts = np.cumsum([0, *(len(actions) for actions in schedule.actions)]).tolist()
    return _Graph(
        schedule,
        [durations[node] for node in order],
        overlaps,
        [tuple((place[source], edge) for source, edge in waits[node]) for node in order],
        [place[start - 1] for start in starts[1:]],
    )


_KINDS = (ActionKind.FORWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD, ActionKind.BACKWARD)


def _durations(schedule: Schedule, num_stages: int) -> tuple[list[int], list[tuple[int, ...]]]:
    """Return for each action of all ranks the index of its duration, and for each overlap those of its parts."""
    overlaps: dict[tuple[int, ...], int] = {}
    ticks = []
    for order in schedule.actions:
        for action in order:
            places = tuple(_KINDS.index(leaf.kind) * num_stages + leaf.stage for leaf in action.leaves)
            if not action.parts:
                ticks.append(places[0])
                continue
            ticks.append(len(_KINDS) * num_stages + overlaps.setdefault(places, len(overlaps)))
    return ticks, list(overlaps)
