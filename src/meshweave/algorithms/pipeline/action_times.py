"""When the actions of a schedule run, from the times of stages and transfers: bubbles, exposed transfers, stashes.

Every action begins as soon as what it waits for is done (`action_graph`). So compute and communication overlap as
far as the runtime lets them. Times are integers in any unit. A rank's compute actions do not slow its transfers, and
transfers of different pairs of ranks do not slow each other; a simulated Program knows links and their sharing.

The step takes from the first begin to the last end. A rank is idle while it runs no compute action. Where it then
waits for a transfer that is on its way, the idle time is an *exposed transfer*; the rest is *bubble*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshweave.algorithms.pipeline.action_graph import ActionGraph, Runtime, build_graph
from meshweave.algorithms.pipeline.action_table import tabulate
from meshweave.algorithms.pipeline.actions import Action, ActionKind, Schedule
from meshweave.algorithms.pipeline.progress import longest_path
from meshweave.base.errors import LayoutError


@dataclass(frozen=True)
class ActionTimes:
    """What each action takes, in ticks of any unit. A whole backward takes both gradients, an overlap its parts.

    Attributes:
        forward: of each stage, per micro-batch.
        input_grad: likewise.
        weight_grad: likewise.
        transfer: of each edge between stages, per micro-batch and direction; none within a rank.

    Raises:
        LayoutError: the lists of stages differ in length, or a time is negative.
    """

    forward: tuple[int, ...]
    input_grad: tuple[int, ...]
    weight_grad: tuple[int, ...]
    transfer: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.forward) == len(self.input_grad) == len(self.weight_grad):
            raise LayoutError("forward, input and weight gradients need one time for each stage")
        if min((*self.forward, *self.input_grad, *self.weight_grad, *self.transfer), default=0) < 0:
            raise LayoutError("times of actions must not be negative")

    @classmethod
    def uniform(
        cls, num_stages: int, forward: int = 1, input_grad: int = 1, weight_grad: int = 1, transfer: int = 0
    ) -> ActionTimes:
        """Return equal times for all stages, and for the transfers from each to the next."""
        return cls(
            (forward,) * num_stages,
            (input_grad,) * num_stages,
            (weight_grad,) * num_stages,
            (transfer,) * max(0, num_stages - 1),
        )

    def of_compute(self, action: Action) -> int:
        """Return what an action takes that is no transfer; gathering, freeing and reducing take nothing."""
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
            return self.input_grad[stage] + self.weight_grad[stage]
        return 0


@dataclass(frozen=True)
class ExposedTransfer:
    """A transfer that a rank waited for with nothing else to do.

    Attributes:
        rank: the rank that waited.
        transfer: the send, as torch writes it, such as 0SEND_F3.
        consumer: the action that waited.
        begin: when the exposed part begins.
        ticks: how long it is.
    """

    rank: int
    transfer: str
    consumer: str
    begin: int
    ticks: int


@dataclass(frozen=True)
class TimedSchedule:
    """A schedule with the begin and end of each action.

    Attributes:
        schedule: the schedule.
        times: what each action takes.
        begins: for each rank and action when it begins; a receive runs with its send.
        ends: likewise when it ends.
        exposed: the transfers that ranks waited for, by rank and begin.
    """

    schedule: Schedule
    times: ActionTimes
    begins: tuple[tuple[int, ...], ...]
    ends: tuple[tuple[int, ...], ...]
    exposed: tuple[ExposedTransfer, ...]

    @property
    def duration(self) -> int:
        """Return when the last action ends; the first begins at 0."""
        return max(max(ends, default=0) for ends in self.ends)

    def busy(self, rank: int) -> int:
        """Return the ticks in which a rank runs compute actions."""
        return sum(map(self.times.of_compute, self.schedule.actions[rank]))

    def exposed_on(self, rank: int) -> int:
        """Return the ticks in which a rank waits for transfers that are on their way."""
        return sum(transfer.ticks for transfer in self.exposed if transfer.rank == rank)

    def bubble(self, rank: int) -> int:
        """Return the ticks of the step in which a rank neither computes nor waits for a transfer on its way."""
        return self.duration - self.busy(rank) - self.exposed_on(rank)

    @property
    def largest_idle_span(self) -> int:
        """Return the most that a rank is idle between its own first and last compute action.

        That is the bubble of Zero Bubble (Qi et al., arXiv 2401.10241, Table 2 and section 5.3), which counts the
        longest of all ranks' own spans: steps of different ranks may be shifted against each other.
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
    runtime: Runtime = Runtime.STRICT,
    edges: Sequence[tuple[int, int]] | None = None,
) -> TimedSchedule:
    """Return when each action runs.

    Without listed transfers each takes its time after the action that makes its value, beside everything else.

    Args:
        schedule: compute actions alone, or with all transfers.
        times: what each action takes.
        runtime: how listed transfers proceed.
        edges: (source stage, target stage) of each activation that is passed on; default: each stage to the next.

    Raises:
        LayoutError: the schedule is not complete, or `times` are of other stages or edges.
        ScheduleDeadlock: the schedule never ends.
    """
    table = tabulate(schedule, edges)
    if len(times.forward) != schedule.num_stages or len(times.transfer) != len(table.edges):
        raise LayoutError(
            f"times are of {len(times.forward)} stages and {len(times.transfer)} edges between them, and the "
            f"schedule has {schedule.num_stages} and {len(table.edges)}"
        )
    graph = build_graph(table, runtime)
    durations = _durations(graph, times)
    delays = [0] * len(graph.sources) if graph.remote else []
    for edge, stages in graph.remote.items():
        delays[edge] = times.transfer[stages]
    node_begins, _ = longest_path(graph, durations, delays)
    begins, ends, number = [], [], 0
    for order in schedule.actions:
        nodes = graph.node_of[number : number + len(order)]
        number += len(order)
        begins.append(tuple(node_begins[node] for node in nodes))
        ends.append(tuple(node_begins[node] + durations[node] for node in nodes))
    exposed = _exposed(graph, durations, times, node_begins)
    return TimedSchedule(schedule, times, tuple(begins), tuple(ends), exposed)


def _durations(graph: ActionGraph, times: ActionTimes) -> list[int]:
    """Return the ticks of each node. A buffered receive takes nothing beyond its send."""
    table = graph.table
    durations = [0] * graph.num_nodes
    number = 0
    for order in table.schedule.actions:
        for action in order:
            if not action.kind.communicates:
                durations[number] = times.of_compute(action)
            number += 1
    count = table.schedule.num_micro_batches
    for kind in (ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD):
        for slot, send in enumerate(table.transfers[kind]):
            if send >= 0:
                durations[send] = times.transfer[slot // count]
    return durations


def _exposed(
    graph: ActionGraph, durations: Sequence[int], times: ActionTimes, begins: Sequence[int]
) -> tuple[ExposedTransfer, ...]:
    """Return the transfers that end when the compute action that waits for them begins, on an idle rank."""
    table, schedule = graph.table, graph.table.schedule
    idle_from = _idle_from(graph, durations, begins)
    transfers = _awaited_transfers(graph, times, begins, durations)
    exposed = []
    number = 0
    for rank, order in enumerate(schedule.actions):
        for action in order:
            if number in transfers and action.kind.computes:
                text, begin = transfers[number]
                begin = max(begin, idle_from[number])
                ticks = begins[number] - begin
                if ticks > 0:
                    exposed.append(ExposedTransfer(rank, text, str(action), begin, ticks))
            number += 1
    return tuple(exposed)


def _idle_from(graph: ActionGraph, durations: Sequence[int], begins: Sequence[int]) -> list[int]:
    """Return for each action when the last compute action before it on its rank ends."""
    idle_from, number = [0] * graph.table.starts[-1], 0
    for order in graph.table.schedule.actions:
        end = 0
        for action in order:
            idle_from[number] = end
            if action.kind.computes:
                end = begins[number] + durations[number]
            number += 1
    return idle_from


def _awaited_transfers(
    graph: ActionGraph, times: ActionTimes, begins: Sequence[int], durations: Sequence[int]
) -> dict[int, tuple[str, int]]:
    """Return for compute actions that begin when a transfer ends, its send and its begin.

    Of several such transfers it is the one that began first.
    """
    table, listed = graph.table, graph.table.schedule.has_communication
    awaited: dict[int, tuple[str, int]] = {}

    def enter(consumer: int, text: str, begin: int, end: int) -> None:
        if end == begins[consumer] and (consumer not in awaited or begin < awaited[consumer][1]):
            awaited[consumer] = (text, begin)

    count = table.schedule.num_micro_batches
    for kind, computes, backwards in (
        (ActionKind.SEND_FORWARD, table.forwards, False),
        (ActionKind.SEND_BACKWARD, table.input_grads, True),
    ):
        for index, edge in enumerate(table.edges):
            source, target = edge[::-1] if backwards else edge
            if table.schedule.stage_ranks[source] == table.schedule.stage_ranks[target]:
                continue
            for micro_batch in range(count):
                send = table.transfers[kind][index * count + micro_batch]
                consumer = computes[target * count + micro_batch]
                text = f"{source}{kind.value}{micro_batch}"
                if send >= 0:
                    enter(consumer, text, begins[send], begins[send] + durations[send])
                elif not listed and consumer >= 0:
                    producer = computes[source * count + micro_batch]
                    end = begins[producer] + durations[producer]
                    enter(consumer, text, end, end + times.transfer[index])
    return awaited


def peak_stashes(schedule: Schedule) -> tuple[int, ...]:
    """Return for each rank the most micro-batches, over its stages, that ran forward and lack a weight gradient.

    It follows from the order alone. Each such micro-batch keeps activations of one stage.
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
