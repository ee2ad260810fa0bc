"""When the actions of a schedule run, from the times of stages and transfers: bubbles, exposed transfers, stashes.

Every action begins as soon as what it waits for is done (`action_graph`). So compute and communication overlap as
far as the runtime lets them. Times are integers in any unit. A rank's compute actions do not slow its transfers,
and transfers of different pairs of ranks do not slow each other; a simulated Program knows links that are shared.

The step takes from the first begin to the last end. A rank is idle while it runs no compute action. Where it then
waits for a transfer that is on its way, the idle time is an *exposed transfer*; the rest is *bubble*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshweave.algorithms.pipeline.action_graph import ActionGraph, TransferRuntime, build_graph
from meshweave.algorithms.pipeline.action_table import (
    ABSENT,
    SENDS,
    ActionTable,
    IntArray,
    chain_edges,
    tabulate,
)
from meshweave.algorithms.pipeline.actions import Action, ActionKind, Schedule
from meshweave.algorithms.pipeline.progress import ordered_with_transfers
from meshweave.base.errors import LayoutError


@dataclass(frozen=True)
class ActionTimes:
    """How long each action takes, in ticks: integers in any unit of time. An overlap takes the sum of its parts.

    Attributes:
        forward, input_grad, weight_grad: for each stage the ticks of this part for one micro-batch.
        transfer: for each edge between stages the ticks of one micro-batch in one direction; unused within a
            rank.
        saved: for each stage the ticks by which a whole backward is shorter than the sum of both gradients; () for
            0.
        earliest: for each stage the tick before which its first micro-batch does not begin; () for 0.

    Raises:
        LayoutError: `forward`, `input_grad`, `weight_grad`, `saved` and `earliest` differ in length, one of their
            times or of `transfer` is negative, or a whole backward would be.
    """

    forward: tuple[int, ...]
    input_grad: tuple[int, ...]
    weight_grad: tuple[int, ...]
    transfer: tuple[int, ...]
    saved: tuple[int, ...] = ()
    earliest: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.forward) == len(self.input_grad) == len(self.weight_grad):
            raise LayoutError("forward, input and weight gradients need one time for each stage")
        for name, optional in (("saved", self.saved), ("earliest", self.earliest)):
            if optional and len(optional) != len(self.forward):
                raise LayoutError(f"{name} has {len(optional)} times for {len(self.forward)} stages")
        each = *self.forward, *self.input_grad, *self.weight_grad, *self.transfer, *self.saved, *self.earliest
        if min((*each, *self.backward), default=0) < 0:
            raise LayoutError("times of actions must not be negative")

    @cached_property
    def backward(self) -> tuple[int, ...]:
        """Return for each stage the ticks of a whole backward of one micro-batch: both gradients, less `saved`."""
        saved = self.saved or (0,) * len(self.forward)
        parts = zip(self.input_grad, self.weight_grad, saved, strict=True)
        return tuple(soon + late - less for soon, late, less in parts)

    @property
    def joined(self) -> ActionTimes:
        """Return these times with `saved` subtracted from `weight_grad` (at least 0), without `earliest`.

        They have no `saved`. Where no stage saves more than its weight gradient takes, no schedule takes longer
        with the returned times than with the original ones.
        """
        late = zip(self.weight_grad, self.saved or (0,) * len(self.forward), strict=True)
        less = tuple(max(ticks - saved, 0) for ticks, saved in late)
        return ActionTimes(self.forward, self.input_grad, less, self.transfer)

    @classmethod
    def uniform(
        cls, num_stages: int, forward: int = 1, input_grad: int = 1, weight_grad: int = 1, transfer: int = 0
    ) -> ActionTimes:
        """Return times of a chain of `num_stages` stages, with the given ticks on every stage and transfer."""
        return cls(
            (forward,) * num_stages,
            (input_grad,) * num_stages,
            (weight_grad,) * num_stages,
            (transfer,) * len(chain_edges(num_stages)),
        )

    def of_compute(self, action: Action) -> int:
        """Return the ticks of an action; 0 for transfers and for gathering, freeing and reducing parameters."""
        if action.parts:
            return sum(map(self.of_compute, action.parts))
        kind, stage = action.kind, action.stage
        if kind is ActionKind.FORWARD:
            return self.forward[stage]
        if kind is ActionKind.INPUT_GRAD:
            return self.input_grad[stage]
        if kind is ActionKind.WEIGHT_GRAD:
            return self.weight_grad[stage]
        if kind is ActionKind.BACKWARD:
            return self.backward[stage]
        return 0


@dataclass(frozen=True)
class ExposedTransfer:
    """A transfer that a rank waited for with nothing else to do.

    Attributes:
        rank: the rank that waited.
        transfer: the send, as torch writes it, such as 0SEND_F3.
        consumer: the action that waited, as torch writes it, such as 1F3.
        begin: the tick at which the exposed part begins.
        ticks: how long the exposed part is.
    """

    rank: int
    transfer: str
    consumer: str
    begin: int
    ticks: int


@dataclass(frozen=True)
class TimedSchedule:
    """A schedule with the begin and end of each action, in ticks.

    Attributes:
        schedule: the schedule.
        times: the ticks of each action.
        begins: for each rank and action the tick at which it begins. A receive has the ticks of its send; with
            `TransferRuntime.BUFFERED` it takes 0 ticks once the send has ended.
        ends: likewise the tick at which it ends.
        exposed: the transfers that ranks waited for, by rank and begin.
    """

    schedule: Schedule
    times: ActionTimes
    begins: tuple[tuple[int, ...], ...]
    ends: tuple[tuple[int, ...], ...]
    exposed: tuple[ExposedTransfer, ...]

    @cached_property
    def duration(self) -> int:
        """Return the makespan: the tick at which the last action ends, counted from 0, the begin of the step."""
        return max(max(ends, default=0) for ends in self.ends)

    def busy(self, rank: int) -> int:
        """Return the ticks of all compute actions of a rank together."""
        return self._busy[rank]

    def exposed_on(self, rank: int) -> int:
        """Return the ticks in which a rank is idle and waits for a transfer that is on its way."""
        return self._exposed[rank]

    @cached_property
    def _busy(self) -> list[int]:
        return [sum(map(self.times.of_compute, order)) for order in self.schedule.actions]

    @cached_property
    def _exposed(self) -> list[int]:
        totals = [0] * self.schedule.num_ranks
        for transfer in self.exposed:
            totals[transfer.rank] += transfer.ticks
        return totals

    def bubble(self, rank: int) -> int:
        """Return the ticks of the step in which a rank neither computes nor waits for a transfer on its way."""
        return self.duration - self.busy(rank) - self.exposed_on(rank)

    @property
    def largest_idle_span(self) -> int:
        """Return the most ticks that one rank is idle between its own first and last compute action.

        That is the bubble of Zero Bubble (Qi et al., arXiv 2401.10241, Table 2 and section 5.3), which counts
        the longest of all ranks' own spans: steps of different ranks may be shifted against each other.
        """
        most = 0
        for rank, order in enumerate(self.schedule.actions):
            computes = [index for index, action in enumerate(order) if action.kind.computes]
            if computes:
                span = self.ends[rank][computes[-1]] - self.begins[rank][computes[0]]
                most = max(most, span - self.busy(rank))
        return most


def time_schedule(
    schedule: Schedule,
    times: ActionTimes,
    runtime: TransferRuntime = TransferRuntime.STRICT,
    edges: Sequence[tuple[int, int]] | None = None,
) -> TimedSchedule:
    """Return when each action of a schedule runs, in the ticks of `times`.

    A transfer that is not listed follows the action that makes its value, and overlaps with everything else.

    Args:
        schedule: compute actions alone, or with all transfers.
        times: the ticks of each action and transfer. A whole backward takes `times.backward`.
        runtime: how listed transfers proceed.
        edges: (source stage, target stage) of each activation that is passed on; default: each stage to the
            next.

    Raises:
        LayoutError: the schedule is refused by `tabulate`, the messages from one rank to another are not
            received in the order in which they are sent, or `times` have other numbers of stages or edges.
        ScheduleDeadlock: actions wait for each other for ever.
    """
    table = tabulate(schedule, edges)
    if len(times.forward) != schedule.num_stages or len(times.transfer) != len(table.edges):
        raise LayoutError(
            f"times are of {len(times.forward)} stages and {len(times.transfer)} edges between them, and the "
            f"schedule has {schedule.num_stages} and {len(table.edges)}"
        )
    graph = build_graph(table, runtime)
    transfer = np.array((*times.transfer, 0), np.int64)  # ABSENT is the last
    durations = _durations(graph, times)
    node_ends = ordered_with_transfers(graph).ends(durations.tolist(), times.transfer, times.earliest)
    ends = np.array(node_ends[: graph.num_nodes], np.int64)[graph.node_of]
    begins = ends - durations[graph.node_of]
    cuts = table.starts[1:-1]
    return TimedSchedule(
        schedule,
        times,
        tuple(tuple(part.tolist()) for part in np.split(begins, cuts)),
        tuple(tuple(part.tolist()) for part in np.split(ends, cuts)),
        _exposed(table, transfer, begins, ends),
    )


def _durations(graph: ActionGraph, times: ActionTimes) -> IntArray:
    """Return the ticks of each node. A buffered receive takes nothing beyond its send."""
    columns, durations = graph.table.columns, np.zeros(graph.num_nodes, np.int64)
    for kinds, ticks in (
        ((ActionKind.FORWARD,), times.forward),
        ((ActionKind.INPUT_GRAD, ActionKind.BACKWARD), times.input_grad),
        ((ActionKind.WEIGHT_GRAD, ActionKind.BACKWARD), times.weight_grad),
    ):
        rows = columns.rows(*kinds)
        np.add.at(durations, columns.number[rows], np.array(ticks, np.int64)[columns.stage[rows]])
    if times.saved:
        rows = columns.rows(ActionKind.BACKWARD)
        np.subtract.at(durations, columns.number[rows], np.array(times.saved, np.int64)[columns.stage[rows]])
    for kind in SENDS:
        sends = graph.table.transfers[kind]
        for edge, row in enumerate(sends):
            durations[row[row != ABSENT]] = times.transfer[edge]
    return durations


def _exposed(
    table: ActionTable, transfer: IntArray, begins: IntArray, ends: IntArray
) -> tuple[ExposedTransfer, ...]:
    """Return the transfers that end when the compute action that waits for them begins, on an idle rank."""
    idle_from = _idle_from(table, ends)
    exposed: dict[int, ExposedTransfer] = {}
    for kind, computes in zip(SENDS, (table.forwards, table.input_grads), strict=True):
        if not table.trains and kind is ActionKind.SEND_BACKWARD:
            continue
        for index in table.crossing():
            edge = table.edges[index]
            source, target = edge if kind is ActionKind.SEND_FORWARD else edge[::-1]
            consumers, sends = computes[target], table.transfers[kind][index]
            start = begins[sends] if table.lists_transfers else ends[computes[source]]
            shown = np.maximum(start, idle_from[consumers])
            waits = (start + transfer[index] == begins[consumers]) & (shown < begins[consumers])
            for at in np.flatnonzero(waits).tolist():
                number, begin = int(consumers[at]), int(shown[at])
                if number in exposed and exposed[number].begin <= begin:
                    continue
                rank = int(table.ranks[number])
                consumer = str(table.schedule.actions[rank][number - int(table.starts[rank])])
                ticks = int(begins[number]) - begin
                exposed[number] = ExposedTransfer(rank, f"{source}{kind.value}{at}", consumer, begin, ticks)
    return tuple(exposed[number] for number in sorted(exposed))


def _idle_from(table: ActionTable, ends: IntArray) -> IntArray:
    """Return for each action when the last compute action before it on its rank ends, or 0."""
    numbers = np.arange(len(ends))
    last = np.maximum.accumulate(np.where(table.computes, numbers, ABSENT))
    before = np.concatenate(([ABSENT], last[:-1])) if len(last) else last
    return np.where(before >= table.starts[table.ranks], ends[before], 0)


def peak_stashes(schedule: Schedule) -> tuple[int, ...]:
    """Return for each rank the most stashes that it holds at once, by the order of its actions alone.

    A stash is what one stage keeps of one micro-batch from its forward to its weight gradient or whole backward.
    """
    peaks = []
    for order in schedule.actions:
        live = peak = 0
        for action in order:
            for leaf in action.parts or (action,):
                if leaf.kind is ActionKind.FORWARD:
                    live += 1
                elif leaf.kind in (ActionKind.WEIGHT_GRAD, ActionKind.BACKWARD):
                    live -= 1
                peak = max(peak, live)
        peaks.append(peak)
    return tuple(peaks)
