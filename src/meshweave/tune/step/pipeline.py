"""The time of a pipeline by the actions of its schedule: longest paths over graphs that are kept.

The graph of a schedule's actions (`algorithms.pipeline.action_graph`) depends on its name and on the numbers of
ranks, stages and micro-batches alone. It is built once for each of them, in topological order, and then timed with
the times of any stages: what `time_schedule` gives, without making actions again.

A 1F1B schedule of many micro-batches repeats itself: past a few rounds of as many micro-batches as ranks, each
further round takes as long as the one before. Those rounds are counted, not timed. Where stages differ little, the
one that holds up the others may change later than that, which is then off by less than what they differ by.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from meshweave.algorithms.pipeline.action_graph import TransferRuntime, build_graph
from meshweave.algorithms.pipeline.action_table import tabulate
from meshweave.algorithms.pipeline.action_times import ActionTimes, peak_stashes
from meshweave.algorithms.pipeline.actions import ActionKind, Schedule
from meshweave.algorithms.pipeline.by_name import ScheduleRequest, schedule_by_name
from meshweave.algorithms.pipeline.interleaved import round_sizes

_TIMED_ROUNDS = 4
_TIMED_MICRO_BATCHES = 24
_REPEATS = ("1f1b", "interleaved-1f1b", "gpipe")
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
        ticks: for each action the place of its time in (forward, input_grad, weight_grad, whole backward) of all
            stages, kind by kind, and then the times of `overlaps`.
        overlaps: for each pair that runs beside each other the places of the two times.
        waits: for each action those that it waits for, with the edge that carries its value, or ABSENT.
        last: for each rank the place of its last action.
        stashes: for each rank the most micro-batches, over its stages, whose activations it keeps.
    """

    schedule: Schedule
    ticks: list[int]
    overlaps: list[tuple[int, ...]]
    waits: list[tuple[tuple[int, int], ...]]
    last: list[int]
    stashes: tuple[int, ...]

    def time(self, times: ActionTimes) -> PipelineTime:
        """Return when the ranks are done."""
        whole = tuple(a + b for a, b in zip(times.input_grad, times.weight_grad, strict=True))
        ticks = [*times.forward, *times.input_grad, *times.weight_grad, *whole]
        ticks += [sum(ticks[part] for part in parts) for parts in self.overlaps]
        delays = (*times.transfer, 0)  # of ABSENT, the last
        ends: list[int] = []
        for tick, waits in zip(self.ticks, self.waits, strict=True):
            begin = 0
            for other, edge in waits:
                end = ends[other] + delays[edge]
                if end > begin:
                    begin = end
            ends.append(begin + ticks[tick])
        of_ranks = tuple(ends[place] for place in self.last)
        return PipelineTime(max(of_ranks), of_ranks, self.schedule.stage_ranks)


def time_pipeline(
    name: str, num_ranks: int, virtual_stages: int, micro_batches: int, times: ActionTimes
) -> PipelineTime:
    """Return when the ranks of a schedule are done, of stages and transfers with these times in picoseconds.

    Raises:
        UnsupportedError: there is no such schedule.
        LayoutError: the schedule does not take these numbers.
    """
    name = "interleaved-1f1b" if name == "1f1b" and virtual_stages > 1 else name
    request = (name, num_ranks, virtual_stages)
    if name in _BY_TIMES:
        return _build(*request, micro_batches, times).time(times)
    rounds, rest = divmod(micro_batches, num_ranks)
    repeats = name in _REPEATS and (rest == 0 or name != "interleaved-1f1b")
    timed = max(_TIMED_ROUNDS, -(-_TIMED_MICRO_BATCHES // num_ranks))
    if not repeats or rounds <= timed + 1:
        return _graph(*request, micro_batches).time(times)
    shorter = _graph(*request, timed * num_ranks + rest).time(times)
    longer = _graph(*request, (timed + 1) * num_ranks + rest).time(times)
    more = rounds - timed
    round_ps = longer.makespan_ps - shorter.makespan_ps
    return PipelineTime(
        shorter.makespan_ps + more * round_ps,
        tuple(
            early + more * (late - early) for early, late in zip(shorter.ends_ps, longer.ends_ps, strict=True)
        ),
        shorter.stage_ranks,
    )


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
    few = min(micro_batches, 4 * num_ranks)
    return _graph(name, num_ranks, virtual_stages, few).stashes


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
    place = {node: number for number, node in enumerate(order)}
    ticks, overlaps = _ticks(schedule, num_stages)
    starts = np.cumsum([0, *(len(actions) for actions in schedule.actions)]).tolist()
    return _Graph(
        schedule,
        [ticks[node] for node in order],
        overlaps,
        [tuple((place[source], edge) for source, edge in waits[node]) for node in order],
        [place[start - 1] for start in starts[1:]],
        peak_stashes(schedule),
    )


_KINDS = (ActionKind.FORWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD, ActionKind.BACKWARD)


def _ticks(schedule: Schedule, num_stages: int) -> tuple[list[int], list[tuple[int, ...]]]:
    """Return for each action of all ranks the place of its time, and the places of the parts of overlaps."""
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
