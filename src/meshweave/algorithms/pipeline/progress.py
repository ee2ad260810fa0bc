"""An order of actions in which each comes after what it waits for, or the cycle of those that wait for each other.

Every action waits for a few others (`action_graph`). A schedule ends if and only if these waits have no cycle: as
long as there is none, some action can go on, and around a cycle none ever can, however fast ranks and links are.
So one pass over the graph, linear in the number of actions, decides. That is stronger than a dry run, which
follows one timing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshweave.algorithms.pipeline.action_graph import ActionGraph, TransferRuntime, build_graph
from meshweave.algorithms.pipeline.action_table import ABSENT, tabulate
from meshweave.algorithms.pipeline.actions import Schedule
from meshweave.base.errors import LayoutError
from meshweave.base.recurrence import follow


@dataclass(frozen=True)
class ListedAction:
    """An action where it is listed: its pipeline rank, its position there (from 0), and its text ("2F0")."""

    rank: int
    position: int
    text: str

    def __str__(self) -> str:
        return f"{self.text} (rank {self.rank}, action {self.position + 1})"


class ScheduleDeadlock(LayoutError):
    """A schedule whose actions wait for each other for ever.

    Attributes:
        cycle: the actions that wait for each other: each for the next one, and the last for the first.
    """

    def __init__(self, message: str, cycle: Sequence[ListedAction]) -> None:
        super().__init__(message)
        self.cycle = tuple(cycle)


def prove_progress(
    schedule: Schedule,
    runtime: TransferRuntime = TransferRuntime.STRICT,
    edges: Sequence[tuple[int, int]] | None = None,
) -> None:
    """Prove that a schedule is complete and cannot deadlock under the rules of a runtime (`action_graph`).

    Return nothing, or raise. The default, STRICT, is the runtime that asks most: what ends there ends under the
    others too.

    Args:
        schedule: compute actions alone, or with all transfers.
        runtime: how transfers proceed. Without listed transfers it makes no difference.
        edges: (source stage, target stage) of each activation that is passed on; default: each stage to the
            next.

    Raises:
        LayoutError: the schedule is refused by `tabulate`, or the messages from one rank to another are not
            received in the order in which they are sent.
        ScheduleDeadlock: actions wait for each other for ever. The error has the cycle.
    """
    in_order(build_graph(tabulate(schedule, edges), runtime))


def in_order(graph: ActionGraph) -> list[int]:
    """Return the numbers of a graph's nodes in an order in which each comes after those that it waits for.

    Raises:
        ScheduleDeadlock: there is a cycle.
    """
    targets = graph.targets[np.argsort(graph.sources, kind="stable")].tolist()
    ends = np.cumsum(np.bincount(graph.sources, minlength=graph.num_nodes)).tolist()
    waits = np.bincount(graph.targets, minlength=graph.num_nodes).tolist()
    ready = [node for node, number in enumerate(waits) if not number]
    for node in ready:
        for target in targets[ends[node - 1] if node else 0 : ends[node]]:
            left = waits[target] = waits[target] - 1
            if not left:
                ready.append(target)
    if len(ready) < graph.num_nodes:
        raise _deadlock(graph, set(range(graph.num_nodes)).difference(ready))
    return ready


@dataclass(frozen=True)
class OrderedActions:
    """The nodes of a graph in order, each preceded by the transfers that it waits for and that are not listed.

    Attributes:
        places: the numbers of nodes and of these transfers, in order; transfers are numbered on from
            `ActionGraph.num_nodes`.
        waits: for each entry of `places` the numbers that it waits for.
        carried: for each transfer, by number, the index of its edge in `ActionTable.edges`.
        num_stages: stages of the schedule. The numbers after those of all transfers stand for `earliest` of
            `ends`, one for each stage: the stage's forward of micro-batch 0 waits for it.
    """

    places: list[int]
    waits: list[tuple[int, ...]]
    carried: list[int]
    num_stages: int

    def ends(
        self, durations: Sequence[int], delays: Sequence[int], earliest: Sequence[int] = ()
    ) -> list[int]:
        """Return the tick at which each node ends, by number, followed by that at which each transfer ends.

        Ticks count from the begin of the step, in the unit of the arguments.

        Args:
            durations: how many ticks each node takes, by number.
            delays: how many ticks a transfer takes, for each edge of the table.
            earliest: for each stage the tick before which its first micro-batch does not begin; () for 0.
        """
        ticks = [*durations, *(delays[edge] for edge in self.carried)]
        ends = [*[0] * len(ticks), *(earliest or [0] * self.num_stages)]
        follow(zip(self.places, [ticks[place] for place in self.places], self.waits, strict=True), ends)
        return ends[: len(ticks)]


def ordered_with_transfers(graph: ActionGraph) -> OrderedActions:
    """Return the nodes of a graph, each after those that it waits for. Raises ScheduleDeadlock for a cycle."""
    number, order = graph.num_nodes, np.array(in_order(graph), np.int64)
    rank_of = np.empty(number, np.int64)
    rank_of[order] = np.arange(number)
    by_target = np.argsort(graph.targets, kind="stable")
    sources, targets, edges = (each[by_target] for each in (graph.sources, graph.targets, graph.carried))
    (carried,) = np.nonzero(edges != ABSENT)
    before = sources[carried].tolist()
    sources[carried] = number + np.arange(len(carried))
    listed = sources.tolist()
    stops = np.cumsum(np.bincount(targets, minlength=number)).tolist()
    waits = [tuple(listed[start:stop]) for start, stop in zip([0, *stops], stops, strict=False)]
    waits += [(source,) for source in before]
    for stage, forwards in enumerate(graph.table.forwards):
        waits[forwards[0]] += (len(waits) + stage,)
    places = np.lexsort(
        (np.repeat([1, 0], [number, len(carried)]), np.append(rank_of, rank_of[targets[carried]]))
    )
    in_turn = places.tolist()
    in_waits = [waits[place] for place in in_turn]
    return OrderedActions(in_turn, in_waits, edges[carried].tolist(), len(graph.table.forwards))


def _deadlock(graph: ActionGraph, stuck: set[int]) -> ScheduleDeadlock:
    """Return the error that names a shortest cycle among the nodes that nothing frees."""
    waits_for: dict[int, list[int]] = {}
    for source, target in zip(graph.sources.tolist(), graph.targets.tolist(), strict=True):
        if source in stuck and target in stuck:
            waits_for.setdefault(target, []).append(source)
    cycle = _shortest_cycle(_node_on_cycle(waits_for), waits_for)
    places = _places(graph)
    steps, texts = _chain([places.get(node, {}) for node in cycle if node in places])
    return ScheduleDeadlock(f"this schedule never ends: {texts}", steps)


def _node_on_cycle(waits_for: dict[int, list[int]]) -> int:
    """Follow the waits until a node comes again."""
    node, seen = next(iter(waits_for)), set[int]()
    while node not in seen:
        seen.add(node)
        node = waits_for[node][0]
    return node


def _shortest_cycle(start: int, waits_for: dict[int, list[int]]) -> list[int]:
    """Return a shortest cycle through `start`: each node waits for the next, and the last for the first."""
    before = {start: ABSENT}
    queue = deque([start])
    while queue:
        node = queue.popleft()
        for other in waits_for.get(node, ()):
            if other == start:
                path = [node]
                while before[path[-1]] != ABSENT:
                    path.append(before[path[-1]])
                return path[::-1]
            if other not in before:
                before[other] = node
                queue.append(other)
    raise AssertionError("a node on a cycle waits for itself")


def _places(graph: ActionGraph) -> dict[int, dict[int, ListedAction]]:
    """Return for each node its actions by rank: one, or the two ends of a transfer."""
    places: dict[int, dict[int, ListedAction]] = {}
    nodes = iter(graph.node_of.tolist())
    for rank, order in enumerate(graph.table.schedule.actions):
        for position, action in enumerate(order):
            places.setdefault(next(nodes), {})[rank] = ListedAction(rank, position, str(action))
    return places


def _chain(nodes: Sequence[dict[int, ListedAction]]) -> tuple[list[ListedAction], str]:
    """Return the actions along a cycle of nodes, and in words why each waits for the next."""
    steps: list[ListedAction] = []
    words: list[str] = []
    rank = _shared_rank(nodes[-1], nodes[0])
    for node, following in zip(nodes, [*nodes[1:], nodes[0]], strict=True):
        here = node.get(rank) or next(iter(node.values()))
        steps.append(here)
        onward = _shared_rank(node, following)
        if onward in node and onward != here.rank:
            words.append(f"{here} waits for its partner {node[onward]}")
            here = node[onward]
            steps.append(here)
        if onward in node and onward in following:
            other = following[onward]
            listed = "listed before it" if other.position < here.position else "listed after it"
            words.append(f"{here} waits for {other}, {listed}")
        else:
            words.append(f"{here} waits for the result of {next(iter(following.values()))}")
        rank = onward
    return steps, "; ".join(words)


def _shared_rank(node: dict[int, ListedAction], other: dict[int, ListedAction]) -> int:
    """Return a rank on which both have an action, one that lists `other` first if there is; else ABSENT."""
    shared = [rank for rank in node if rank in other]
    shared.sort(key=lambda rank: other[rank].position > node[rank].position)
    return next(iter(shared), ABSENT)
