"""What each action of a schedule waits for, under the rules of the runtime that carries its transfers.

Nodes are actions; a transfer may be one node for its send and its receive. The rules:

- Compute actions of a rank run one after another, in the order listed. So do UNSHARD, RESHARD and REDUCE_GRAD.
- A transfer is issued where it is listed, once the compute actions before it are done. A compute action waits for
  the receive that it needs, and for no other transfer.
- Without listed transfers a compute action waits for what it needs from other stages, and for nothing else.
- With listed transfers, those between one pair of ranks are matched in the order in which they are issued.

Runtimes differ in what a send waits for:

`Runtime.STRICT`: each pair of ranks has one communicator, whose transfers run one after another, and a send ends only
once its receive is posted. So are NCCL's point-to-point operations, which torch's runtime of action lists issues one
by one (`_PipelineScheduleRuntime`).

`Runtime.BATCHED`: the same, but transfers of one pair that are listed next to each other run together, as
`torch.distributed.batch_isend_irecv` runs them. torch does that in its `Schedule1F1B`, not for action lists.

`Runtime.BUFFERED`: a send ends by itself; its value waits in a buffer. So are gloo and MPI below their eager limit,
and the lanes of our own Programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from meshweave.algorithms.pipeline.action_table import ABSENT, ActionTable
from meshweave.algorithms.pipeline.actions import Action, ActionKind
from meshweave.base.errors import LayoutError


class Runtime(Enum):
    """How transfers between a pair of ranks proceed."""

    STRICT = "strict"
    BATCHED = "batched"
    BUFFERED = "buffered"


@dataclass
class ActionGraph:
    """Nodes and the edges between them.

    Nodes 0 to the number of actions - 1 are the actions of the table. A receive that runs together with its send
    is not a node of its own: `node_of` names the send's. Nodes from there on join batches and are no actions.

    Attributes:
        table: the table of the schedule.
        node_of: for each action its node.
        num_nodes: the number of nodes, those that stand for no action among them.
        sources: for each edge the node that comes first.
        targets: for each edge the node that waits.
        remote: numbers of edges that stand for a transfer that is not listed, with the number of the edge between
            stages that it goes along.
    """

    table: ActionTable
    node_of: list[int]
    num_nodes: int
    sources: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    remote: dict[int, int] = field(default_factory=dict)

    def add(self, source: int, target: int) -> None:
        """Let `target` wait for `source`."""
        self.sources.append(source)
        self.targets.append(target)


def build_graph(table: ActionTable, runtime: Runtime) -> ActionGraph:
    """Return the graph of a schedule.

    Raises:
        LayoutError: the messages from one rank to another are not received in the order in which they are sent.
    """
    total = table.starts[-1]
    graph = ActionGraph(table, list(range(total)), total)
    if not table.schedule.has_communication:
        _join_in_order(graph)
        _join_stages(graph)
        return graph
    pairs = _transfer_pairs(table)
    _require_same_order(table, pairs)
    if runtime is not Runtime.BUFFERED:
        for send, recv in pairs:
            graph.node_of[recv] = send
    else:
        for send, recv in pairs:
            graph.add(send, recv)
    _join_in_order(graph)
    _join_queues(graph, pairs, runtime)
    _join_consumers(graph)
    return graph


def _join_in_order(graph: ActionGraph) -> None:
    """Let every action wait for the last one before it on its rank that is no transfer."""
    schedule, node_of, number = graph.table.schedule, graph.node_of, 0
    sources, targets = graph.sources, graph.targets
    transfers = _TRANSFERS
    for order in schedule.actions:
        last = ABSENT
        for action in order:
            if last != ABSENT:
                sources.append(last)
                targets.append(node_of[number])
            if action.kind not in transfers:
                last = number
            number += 1


_TRANSFERS = (
    ActionKind.SEND_FORWARD,
    ActionKind.RECV_FORWARD,
    ActionKind.SEND_BACKWARD,
    ActionKind.RECV_BACKWARD,
)
_SENDS = (ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD)


def _join_stages(graph: ActionGraph) -> None:
    """Let compute actions wait for those whose results they use, without listed transfers."""
    table = graph.table
    count, ranks = table.schedule.num_micro_batches, table.schedule.stage_ranks
    trains = bool(table.input_grads) and table.input_grads[0] != ABSENT
    for index, (source, target) in enumerate(table.edges):
        crosses = ranks[source] != ranks[target]
        for micro_batch in range(count):
            first, second = source * count + micro_batch, target * count + micro_batch
            if crosses:
                graph.remote[len(graph.sources)] = index
            graph.add(table.forwards[first], table.forwards[second])
            if trains:
                if crosses:
                    graph.remote[len(graph.sources)] = index
                graph.add(table.input_grads[second], table.input_grads[first])


def _join_consumers(graph: ActionGraph) -> None:
    """Let compute actions wait for the receives that they need, and for stages on their own rank."""
    table = graph.table
    count, ranks, node_of = table.schedule.num_micro_batches, table.schedule.stage_ranks, graph.node_of
    trains = bool(table.input_grads) and table.input_grads[0] != ABSENT
    directions = [(table.forwards, table.transfers[ActionKind.RECV_FORWARD], False)]
    if trains:
        directions.append((table.input_grads, table.transfers[ActionKind.RECV_BACKWARD], True))
    for computes, recvs, backwards in directions:
        for index, edge in enumerate(table.edges):
            source, target = edge[::-1] if backwards else edge
            local = ranks[source] == ranks[target]
            for micro_batch in range(count):
                consumer = computes[target * count + micro_batch]
                if local:
                    graph.add(computes[source * count + micro_batch], consumer)
                else:
                    graph.add(node_of[recvs[index * count + micro_batch]], consumer)


def _transfer_pairs(table: ActionTable) -> list[tuple[int, int]]:
    """Return the send and the receive of each transfer."""
    pairs = []
    for send_kind, recv_kind in (_TRANSFERS[:2], _TRANSFERS[2:]):
        sends, recvs = table.transfers[send_kind], table.transfers[recv_kind]
        pairs += [(send, recv) for send, recv in zip(sends, recvs, strict=True) if send != ABSENT]
    return pairs


def _require_same_order(table: ActionTable, pairs: Sequence[tuple[int, int]]) -> None:
    """Raise LayoutError where a rank receives from another in another order than that one sends in."""
    ranks = _ranks_of_actions(table)
    messages: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for send, recv in pairs:
        messages.setdefault((ranks[send], ranks[recv]), []).append((send, recv))
    for (sender, receiver), between in messages.items():
        between.sort()
        recvs = [recv for _, recv in between]
        expected = sorted(recvs)
        if recvs == expected:
            continue
        index = next(i for i, recv in enumerate(recvs) if recv != expected[i])
        raise LayoutError(
            f"rank {sender} sends {table.place(between[index][0])} to rank {receiver} as message {index + 1}, and "
            f"rank {receiver} receives {table.place(expected[index])} as message {index + 1}: the messages from one "
            "rank to another are matched in order"
        )


def _ranks_of_actions(table: ActionTable) -> list[int]:
    return [rank for rank, order in enumerate(table.schedule.actions) for _ in order]


def _join_queues(graph: ActionGraph, pairs: Sequence[tuple[int, int]], runtime: Runtime) -> None:
    """Let transfers wait for those of the same pair of ranks, and side, that are listed before them."""
    ranks = _ranks_of_actions(graph.table)
    peer: dict[int, int] = {}
    for send, recv in pairs:
        peer[send], peer[recv] = ranks[recv], ranks[send]
    number = 0
    for order in graph.table.schedule.actions:
        _join_rank_queues(graph, order, number, peer, runtime)
        number += len(order)


def _join_rank_queues(
    graph: ActionGraph, order: Sequence[Action], number: int, peers: dict[int, int], runtime: Runtime
) -> None:
    """Join the queues of one rank, whose first action is `number`."""
    last: dict[tuple[int, bool], int] = {}
    batches: dict[tuple[int, bool], list[int]] = {}
    neighbour = ABSENT
    for index, action in enumerate(order, number):
        peer = peers.get(index, ABSENT)
        if peer != ABSENT:
            node = graph.node_of[index]
            # Where sends are buffered, those of one direction wait for each other alone.
            queue = (peer, runtime is Runtime.BUFFERED and action.kind in _SENDS)
            if runtime is not Runtime.BATCHED:
                if queue in last:
                    graph.add(last[queue], node)
                last[queue] = node
            else:
                if neighbour != peer and queue in batches:
                    last[queue] = _join_batch(graph, batches.pop(queue))
                batches.setdefault(queue, []).append(node)
                if queue in last:
                    graph.add(last[queue], node)
        neighbour = peer


def _join_batch(graph: ActionGraph, nodes: Sequence[int]) -> int:
    """Return a node that is reached once all of a batch are."""
    if len(nodes) == 1:
        return nodes[0]
    join = graph.num_nodes
    graph.num_nodes += 1
    for node in nodes:
        graph.add(node, join)
    return join
