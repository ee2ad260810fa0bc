"""What each action of a schedule waits for, under the rules of the runtime that carries its transfers.

Nodes are actions; a transfer may be one node for its send and its receive. The rules:

- Compute actions of a rank run one after another, in the order listed. So do UNSHARD, RESHARD and REDUCE_GRAD.
- A transfer is issued where it is listed, once the compute actions before it are done. A compute action waits for
  the receive that it needs, and for no other transfer.
- Without listed transfers a compute action waits, besides, only for the values that it needs from other stages.
- With listed transfers, those between one pair of ranks are matched in the order in which they are issued.

Runtimes differ in what a send waits for:

`TransferRuntime.STRICT`: each pair of ranks has one communicator, whose transfers run one after another, and a
send ends only once its receive is posted. So are NCCL's point-to-point operations, which torch's runtime of action
lists issues one by one (`_PipelineScheduleRuntime`).

`TransferRuntime.BATCHED`: the same, but transfers of one pair that are listed next to each other run together, as
`torch.distributed.batch_isend_irecv` runs them. torch does that in its `Schedule1F1B`, not for action lists.

`TransferRuntime.BUFFERED`: a send ends by itself; its value waits in a buffer. So are gloo, MPI below its eager
limit, and the lanes of our own Programs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from meshweave.algorithms.pipeline.action_table import ABSENT, RECVS, SENDS, ActionTable, IntArray
from meshweave.algorithms.pipeline.actions import ActionKind
from meshweave.base.errors import LayoutError

_PAIRS = tuple(zip(SENDS, RECVS, strict=True))


class TransferRuntime(Enum):
    """How transfers between a pair of ranks proceed; the module's docstring names who does so.

    STRICT: one after another; a send ends only once its receive is posted. BATCHED: the same, but transfers of a
    pair that are listed next to each other run together. BUFFERED: a send ends by itself, and its value waits in
    a buffer.
    """

    STRICT = "strict"
    BATCHED = "batched"
    BUFFERED = "buffered"


@dataclass(frozen=True)
class ActionGraph:
    """The graph of a schedule: nodes are its actions, an edge is a wait of one node for another.

    Nodes 0 to the number of actions - 1 are the actions of the table. A receive that runs together with its
    send is not a node of its own: `node_of` names the send's. Nodes from there on join batches and are no
    actions.

    Attributes:
        table: the table of the schedule.
        node_of: for each action its node.
        num_nodes: the number of nodes, those that stand for no action among them.
        sources: for each wait the node that comes first.
        targets: for each wait the node that waits.
        carried: for each wait the index in `table.edges` of the edge whose transfer it stands for, where
            transfers are not listed; ABSENT for the other waits.
    """

    table: ActionTable
    node_of: IntArray
    num_nodes: int
    sources: IntArray
    targets: IntArray
    carried: IntArray


_Waits = list[tuple[IntArray, IntArray, int]]
"""Sources, targets, and the edge that carries the values."""


def build_graph(table: ActionTable, runtime: TransferRuntime) -> ActionGraph:
    """Return which actions of a schedule wait for which, under the rules of a runtime (see the module).

    Raises:
        LayoutError: the messages from one rank to another are not received in the order in which they are
            sent.
    """
    num_nodes = int(table.starts[-1])
    node_of = np.arange(num_nodes)
    waits: _Waits = []
    if table.lists_transfers:
        sends, recvs = _transfers(table)
        _require_same_order(table, sends, recvs)
        if runtime is TransferRuntime.BUFFERED:
            waits.append((sends, recvs, ABSENT))
        else:
            node_of[recvs] = sends
        queued, num_nodes = _queue_waits(table, node_of, sends, recvs, runtime)
        waits += [*queued, *_value_waits(table, node_of)]
    else:
        waits += _direct_waits(table)
    waits.append(_order_waits(table, node_of))
    sources, targets = (np.concatenate([wait[side] for wait in waits]) for side in (0, 1))
    carried = np.repeat([wait[2] for wait in waits], [len(wait[0]) for wait in waits])
    return ActionGraph(table, node_of, num_nodes, sources, targets, carried)


def _order_waits(table: ActionTable, node_of: IntArray) -> tuple[IntArray, IntArray, int]:
    """Let every action wait for the last one before it on its rank that is no transfer."""
    numbers = np.arange(len(node_of))
    last = np.maximum.accumulate(np.where(table.communicates, ABSENT, numbers))
    before = np.concatenate(([ABSENT], last[:-1])) if len(last) else last
    has_one = before >= table.starts[table.ranks]
    return before[has_one], node_of[numbers[has_one]], ABSENT


def _direct_waits(table: ActionTable) -> _Waits:
    """Let compute actions wait for those whose results they use, without listed transfers."""
    crossing = set(table.crossing())
    waits = []
    for index, (source, target) in enumerate(table.edges):
        carried = index if index in crossing else ABSENT
        waits.append((table.forwards[source], table.forwards[target], carried))
        if table.trains:
            waits.append((table.input_grads[target], table.input_grads[source], carried))
    return waits


def _value_waits(table: ActionTable, node_of: IntArray) -> _Waits:
    """Let compute actions wait for the receives that they need, and for stages on their own rank."""
    crossing = set(table.crossing())
    waits = []
    for index, (source, target) in enumerate(table.edges):
        ends = [(table.forwards, source, target, ActionKind.RECV_FORWARD)]
        if table.trains:
            ends.append((table.input_grads, target, source, ActionKind.RECV_BACKWARD))
        for computes, first, second, kind in ends:
            received = node_of[table.transfers[kind][index]] if index in crossing else computes[first]
            waits.append((received, computes[second], ABSENT))
    return waits


def _transfers(table: ActionTable) -> tuple[IntArray, IntArray]:
    """Return the sends, and the receive of each."""
    pairs = [(table.transfers[s].reshape(-1), table.transfers[r].reshape(-1)) for s, r in _PAIRS]
    sends, recvs = (np.concatenate(side) for side in zip(*pairs, strict=True))
    listed = sends != ABSENT
    return sends[listed], recvs[listed]


def _require_same_order(table: ActionTable, sends: IntArray, recvs: IntArray) -> None:
    """Raise LayoutError where a rank receives from another in another order than that one sends in."""
    pair = table.ranks[sends] * len(table.starts) + table.ranks[recvs]
    by_send, by_recv = np.lexsort((sends, pair)), np.lexsort((recvs, pair))
    wrong = np.flatnonzero(by_send != by_recv)
    if not len(wrong):
        return
    send, recv = int(sends[by_send[wrong[0]]]), int(recvs[by_recv[wrong[0]]])
    sender, receiver = table.ranks[send], table.ranks[recv]
    message = int(wrong[0] - np.searchsorted(pair[by_send], pair[by_send[wrong[0]]])) + 1
    raise LayoutError(
        f"rank {sender} sends {table.describe(send)} to rank {receiver} as message {message}, and rank {receiver} "
        f"receives {table.describe(recv)} as message {message}: the messages from one rank to another are matched "
        "in order"
    )


def _queue_waits(
    table: ActionTable, node_of: IntArray, sends: IntArray, recvs: IntArray, runtime: TransferRuntime
) -> tuple[_Waits, int]:
    """Let the transfers of a pair of ranks wait for each other on either side; return the number of nodes too.

    A batch is a transfer, or several that stand next to each other where the runtime runs those together. Every
    transfer of a batch waits for all of the batch before it in its queue.
    """
    numbers = np.concatenate((sends, recvs))
    peers = np.concatenate((table.ranks[recvs], table.ranks[sends]))
    queues = table.ranks[numbers] * len(table.starts) + peers
    if runtime is TransferRuntime.BUFFERED:  # sends of one direction wait for each other alone
        queues = 2 * queues + (np.arange(len(numbers)) < len(sends))
    order = np.lexsort((numbers, queues))
    numbers, queues = numbers[order], queues[order]
    begins_queue = np.diff(queues, prepend=ABSENT) != 0
    begins = begins_queue.copy()
    if runtime is TransferRuntime.BATCHED:
        begins |= np.diff(numbers, prepend=ABSENT - 1) != 1
    else:
        begins[:] = True
    batch = np.cumsum(begins) - 1
    firsts = np.flatnonzero(begins)
    sizes = np.diff(firsts, append=len(numbers))
    joins = np.where(sizes == 1, node_of[numbers[firsts]], 0)
    several = np.flatnonzero(sizes > 1)
    joins[several] = len(node_of) + np.arange(len(several))
    follows = ~begins_queue[firsts][batch]
    waits = [(joins[batch[follows] - 1], node_of[numbers[follows]], ABSENT)]
    inside = sizes[batch] > 1
    waits.append((node_of[numbers[inside]], joins[batch[inside]], ABSENT))
    return waits, len(node_of) + len(several)
