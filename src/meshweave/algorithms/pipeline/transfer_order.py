"""Lists the transfers of a schedule for torch's runtime: an order that ends everywhere, and lets them overlap.

The compute actions are timed with transfers that overlap with them, and the compute actions of all ranks are put
into one order by their ends. A transfer stands in that order right after the action that makes its value: its send
on one rank, its receive on the other. Each rank lists what is its own, in that one order.

No schedule written so can deadlock, even with one communicator for all ranks and no buffer: everything waits only
for what comes before it in the one order. It lets transfers overlap: a receive is posted before the compute action
that its rank is running when the value becomes ready, so that the transfer begins at once. Posting it earlier
would gain nothing, and would hold up other transfers of the pair where each pair has one queue.

The times of transfers matter here. Where each pair of ranks has one queue, an order that takes them for nothing
posts receives behind compute actions that begin later than it thinks. In a Program each direction has a lane of
its own, and `communication` orders transfers without times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshweave.algorithms.pipeline.action_graph import TransferRuntime
from meshweave.algorithms.pipeline.action_table import chain_edges
from meshweave.algorithms.pipeline.action_times import ActionTimes, time_schedule
from meshweave.algorithms.pipeline.actions import Action, ActionKind, Schedule
from meshweave.base.errors import LayoutError


def list_transfers(
    schedule: Schedule,
    times: ActionTimes | None = None,
    edges: Sequence[tuple[int, int]] | None = None,
) -> Schedule:
    """Return a schedule of compute actions with its sends and receives listed.

    Args:
        schedule: compute actions; UNSHARD, RESHARD and REDUCE_GRAD may be among them.
        times: ticks of actions, which decide where receives stand. Default: forward, input gradient and weight
            gradient take 10 ticks each, a transfer 1. If some forward or input gradient takes 0 ticks, every
            forward and input gradient counts as 1.
        edges: (source stage, target stage) of each activation that is passed on; default: each stage to the
            next. A transfer that is not to the next stage has a `peer`.

    Raises:
        LayoutError: the schedule lists transfers already, is not complete, or never ends, or `times` have other
            numbers of stages or edges.
    """
    if schedule.has_communication:
        raise LayoutError("the schedule lists its transfers already; give compute actions alone")
    pairs = chain_edges(schedule.num_stages) if edges is None else tuple(edges)
    if times is None:
        tens = (10,) * schedule.num_stages
        times = ActionTimes(tens, tens, tens, (1,) * len(pairs))
    transfers = _Transfers(schedule, pairs)
    listed: list[list[Action]] = [[] for _ in schedule.actions]
    for _, rank, index in _order_of_ends(schedule, times, pairs):
        action = schedule.actions[rank][index]
        listed[rank].append(action)
        for leaf in action.parts or (action,):
            for receiver, send, recv in transfers.after(leaf):
                listed[rank].append(send)
                listed[receiver].append(recv)
    return Schedule(schedule.stage_ranks, schedule.num_micro_batches, tuple(map(tuple, listed)))


def _order_of_ends(
    schedule: Schedule, times: ActionTimes, edges: Sequence[tuple[int, int]]
) -> list[tuple[int, int, int]]:
    """Return (end, rank, position) of all actions, sorted, so that each comes after what it uses.

    Forwards and input gradients that take no time could end together with what they use; then each takes a tick.
    """
    if min((*times.forward, *times.input_grad)) == 0:
        ticks = (1,) * schedule.num_stages
        times = replace(times, forward=ticks, input_grad=ticks, saved=())
    ends = time_schedule(schedule, times, TransferRuntime.BUFFERED, edges).ends
    return sorted((end, rank, index) for rank, row in enumerate(ends) for index, end in enumerate(row))


class _Transfers:
    """Which transfers follow a compute action."""

    def __init__(self, schedule: Schedule, edges: Sequence[tuple[int, int]]) -> None:
        self.ranks = schedule.stage_ranks
        self.forward: dict[int, list[int]] = {}
        self.backward: dict[int, list[int]] = {}
        for source, target in edges:
            if self.ranks[source] != self.ranks[target]:
                self.forward.setdefault(source, []).append(target)
                self.backward.setdefault(target, []).append(source)

    def after(self, action: Action) -> list[tuple[int, Action, Action]]:
        """Return the receiving rank, the send and the receive of each transfer of what an action makes."""
        if action.kind is ActionKind.FORWARD:
            peers, kinds = self.forward, (ActionKind.SEND_FORWARD, ActionKind.RECV_FORWARD)
        elif action.kind in (ActionKind.INPUT_GRAD, ActionKind.BACKWARD):
            peers, kinds = self.backward, (ActionKind.SEND_BACKWARD, ActionKind.RECV_BACKWARD)
        else:
            return []
        stage, micro_batch = action.stage, action.micro_batch
        transfers = []
        for peer in peers.get(stage, ()):
            skips = abs(peer - stage) != 1
            send = Action(kinds[0], stage, micro_batch, peer if skips else None)
            recv = Action(kinds[1], peer, micro_batch, stage if skips else None)
            transfers.append((self.ranks[peer], send, recv))
        return transfers
