"""Which action of a schedule is where: complete, none twice, and in an order that each rank can follow alone.

A step of training has, for each stage and micro-batch, a forward and a backward, or a forward, an input gradient and
a weight gradient. A schedule that lists transfers lists, for each edge between stages on different ranks and each
micro-batch, a send and a receive in either direction. A schedule without any backward is one of inference.

What one rank's order alone gets wrong is refused here with the rank, the action and its position, which counts from
1. What only the orders of several ranks together get wrong is the matter of `progress`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from meshweave.algorithms.pipeline.actions import Action, ActionKind, Schedule
from meshweave.base.errors import LayoutError

ABSENT = -1
"""The number of an action that is not listed."""
_BEHIND = {ActionKind.SEND_BACKWARD, ActionKind.RECV_FORWARD}
"""Transfers whose other end is the stage before, unless they name another."""


@dataclass(frozen=True)
class ActionTable:
    """Where each action of a schedule is listed. The actions of all ranks are numbered through, rank after rank.

    A number in one of the lists is ABSENT where the action is not listed. An overlap has one number for all parts.

    Attributes:
        schedule: the schedule.
        edges: (source stage, target stage) of each activation that is passed on, skip connections among them.
        starts: the number of the first action of each rank, and at the end the number of actions.
        forwards: by stage * micro-batches + micro-batch.
        input_grads: likewise: the input gradient or the whole backward.
        weight_grads: likewise: the weight gradient or the whole backward.
        transfers: for SEND_FORWARD, RECV_FORWARD, SEND_BACKWARD and RECV_BACKWARD, by edge * micro-batches +
            micro-batch.
    """

    schedule: Schedule
    edges: tuple[tuple[int, int], ...]
    starts: tuple[int, ...]
    forwards: list[int]
    input_grads: list[int]
    weight_grads: list[int]
    transfers: dict[ActionKind, list[int]]

    def rank_of(self, number: int) -> int:
        """Return the pipeline rank that lists an action."""
        return next(rank for rank, start in enumerate(self.starts[1:]) if number < start)

    def place(self, number: int) -> str:
        """Return an action in words: what it is, its rank, and its position there."""
        rank = self.rank_of(number)
        position = number - self.starts[rank]
        return f"{self.schedule.actions[rank][position]} (rank {rank}, action {position + 1})"


def tabulate(schedule: Schedule, edges: Sequence[tuple[int, int]] | None = None) -> ActionTable:
    """Return the table of a schedule over `edges` (default: each stage to the next).

    Raises:
        LayoutError: an action is missing, doubled or out of order on its rank, or a transfer is along no edge.
    """
    pairs = tuple(edges if edges is not None else ((s, s + 1) for s in range(schedule.num_stages - 1)))
    starts = [0]
    for order in schedule.actions:
        starts.append(starts[-1] + len(order))
    computes, transfers = schedule.num_stages * schedule.num_micro_batches, len(pairs)
    transfers *= schedule.num_micro_batches
    table = ActionTable(
        schedule,
        pairs,
        tuple(starts),
        [ABSENT] * computes,
        [ABSENT] * computes,
        [ABSENT] * computes,
        {kind: [ABSENT] * transfers for kind in _TRANSFERS},
    )
    _enter(table)
    _require_computes(table)
    if schedule.has_communication:
        _require_transfers(table)
    _check_sharding(table)
    return table


_TRANSFERS = (
    ActionKind.SEND_FORWARD,
    ActionKind.RECV_FORWARD,
    ActionKind.SEND_BACKWARD,
    ActionKind.RECV_BACKWARD,
)


def _enter(table: ActionTable) -> None:
    """Enter every action. Raises LayoutError for one that is listed twice, and for a transfer along no edge."""
    count, number = table.schedule.num_micro_batches, 0
    edge_numbers = {edge: index for index, edge in enumerate(table.edges)}
    lists = {
        ActionKind.FORWARD: (table.forwards,),
        ActionKind.INPUT_GRAD: (table.input_grads,),
        ActionKind.WEIGHT_GRAD: (table.weight_grads,),
        ActionKind.BACKWARD: (table.input_grads, table.weight_grads),
    }
    for order in table.schedule.actions:
        for action in order:
            for leaf in action.parts or (action,):
                if leaf.kind in lists:
                    slot, numbers = leaf.stage * count + (leaf.micro_batch or 0), lists[leaf.kind]
                elif leaf.kind in table.transfers:
                    slot = _edge_of(leaf, edge_numbers, number, table) * count + (leaf.micro_batch or 0)
                    numbers = (table.transfers[leaf.kind],)
                else:
                    continue
                for listed in numbers:
                    if listed[slot] != ABSENT:
                        _refuse_double(table, leaf, listed[slot], number)
                    listed[slot] = number
            number += 1


def _edge_of(action: Action, numbers: dict[tuple[int, int], int], number: int, table: ActionTable) -> int:
    """Return the number of the edge that a transfer goes along."""
    stage, behind = action.stage, action.kind in _BEHIND
    peer = action.peer if action.peer is not None else stage - 1 if behind else stage + 1
    edge = (peer, stage) if behind else (stage, peer)
    if edge not in numbers:
        raise LayoutError(
            f"{table.place(number)} is a transfer between stages {edge[0]} and {edge[1]}, which pass nothing on"
        )
    source, target = (table.schedule.stage_ranks[end] for end in edge)
    if source == target:
        raise LayoutError(
            f"{table.place(number)} is a transfer between stages {edge[0]} and {edge[1]}, which are both on rank "
            f"{source}; leave it out"
        )
    return numbers[edge]


def _refuse_double(table: ActionTable, action: Action, first: int, second: int) -> NoReturn:
    other = table.place(first)
    if str(action) == other.split(" ", 1)[0]:
        raise LayoutError(f"{table.place(second)} is listed twice, first as {other}; leave one out")
    raise LayoutError(
        f"{table.place(second)} and {other} are both listed: a micro-batch has one backward, either B or I and W"
    )


def _require_computes(table: ActionTable) -> None:
    """Raise LayoutError where a micro-batch is missing on a stage, or its parts are in the wrong order there."""
    has_backward = max(table.input_grads, default=ABSENT) != ABSENT or (
        max(table.weight_grads, default=ABSENT) != ABSENT
    )
    if has_backward:
        parts = ((table.forwards, "forward (F)"), (table.input_grads, "input gradient (I or B)"))
        parts += ((table.weight_grads, "weight gradient (W or B)"),)
    else:
        parts = ((table.forwards, "forward (F)"),)
    count = table.schedule.num_micro_batches
    for numbers, what in parts:
        if ABSENT in numbers:
            stage, micro_batch = divmod(numbers.index(ABSENT), count)
            raise LayoutError(
                f"stage {stage} has no {what} of micro-batch {micro_batch}; each stage works on each of the "
                f"{count} micro-batches once"
            )
    if not has_backward:
        return
    for forward, input_grad, weight_grad in zip(
        table.forwards, table.input_grads, table.weight_grads, strict=True
    ):
        if forward >= input_grad:
            _refuse_order(table, input_grad, forward)
        if input_grad > weight_grad:
            _refuse_order(table, weight_grad, input_grad)


def _refuse_order(table: ActionTable, later: int, earlier: int) -> NoReturn:
    raise LayoutError(
        f"{table.place(later)} does not come after {table.place(earlier)}; a stage runs a micro-batch forward, then "
        "its input gradient, then its weight gradient"
    )


def _require_transfers(table: ActionTable) -> None:
    """Raise LayoutError where a transfer is missing, or on the wrong side of the action that it serves."""
    count, ranks = table.schedule.num_micro_batches, table.schedule.stage_ranks
    directions = [(ActionKind.SEND_FORWARD, ActionKind.RECV_FORWARD, table.forwards, False)]
    if max(table.input_grads, default=ABSENT) != ABSENT:
        directions.append((ActionKind.SEND_BACKWARD, ActionKind.RECV_BACKWARD, table.input_grads, True))
    for send_kind, recv_kind, computes, backwards in directions:
        sends, recvs = table.transfers[send_kind], table.transfers[recv_kind]
        for index, edge in enumerate(table.edges):
            if ranks[edge[0]] == ranks[edge[1]]:
                continue
            source, target = edge[::-1] if backwards else edge
            for micro_batch in range(count):
                send, recv = sends[index * count + micro_batch], recvs[index * count + micro_batch]
                producer = computes[source * count + micro_batch]
                consumer = computes[target * count + micro_batch]
                if send <= producer:
                    _refuse_transfer(table, send, producer, (send_kind, source, target, micro_batch))
                if recv >= consumer or recv == ABSENT:
                    _refuse_transfer(table, recv, consumer, (recv_kind, target, source, micro_batch))


def _refuse_transfer(
    table: ActionTable, number: int, compute: int, what: tuple[ActionKind, int, int, int]
) -> NoReturn:
    """Raise LayoutError for a send or receive that is missing, or not after or before its compute action."""
    kind, stage, peer, micro_batch = what
    sends = kind in (ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD)
    partner = "" if abs(stage - peer) == 1 else f" {'to' if sends else 'from'} stage {peer}"
    if number == ABSENT:
        raise LayoutError(
            f"rank {table.schedule.stage_ranks[stage]} lists no {stage}{kind.value}{micro_batch}{partner}, and "
            f"other transfers are listed; it belongs {'after' if sends else 'before'} {table.place(compute)}"
        )
    if sends:
        raise LayoutError(f"{table.place(number)} does not come after {table.place(compute)}, which makes it")
    raise LayoutError(f"{table.place(number)} does not come before {table.place(compute)}, which uses it")


def _check_sharding(table: ActionTable) -> None:
    """Raise LayoutError where UNSHARD, RESHARD and REDUCE_GRAD do not fit what the stages compute.

    A stage whose parameters are gathered once is gathered whenever it computes. Gradients are reduced once,
    after the last weight gradient.
    """
    number = 0
    shards = {a.stage for order in table.schedule.actions for a in order if a.kind is ActionKind.UNSHARD}
    last = _last_weight_grads(table)
    gathered: set[int] = set()
    reduced: dict[int, int] = {}
    for order in table.schedule.actions:
        for action in order:
            stage, kind = action.stage, action.kind
            if kind is ActionKind.UNSHARD:
                if stage in gathered:
                    raise LayoutError(f"{table.place(number)} gathers parameters that are gathered already")
                gathered.add(stage)
            elif kind is ActionKind.RESHARD:
                if stage not in gathered:
                    raise LayoutError(f"{table.place(number)} frees parameters that are not gathered")
                gathered.remove(stage)
            elif kind is ActionKind.REDUCE_GRAD:
                _check_reduction(table, number, stage, reduced, last)
            elif kind.computes and shards:
                for leaf in action.parts or (action,):
                    if leaf.stage in shards and leaf.stage not in gathered:
                        raise LayoutError(
                            f"{table.place(number)} computes with parameters that are not gathered; "
                            f"{leaf.stage}UNSHARD belongs before it"
                        )
            number += 1


def _last_weight_grads(table: ActionTable) -> list[int]:
    """Return for each stage the number of its last weight gradient, ABSENT without any."""
    count = table.schedule.num_micro_batches
    return [
        max(table.weight_grads[stage * count : (stage + 1) * count], default=ABSENT)
        for stage in range(table.schedule.num_stages)
    ]


def _check_reduction(
    table: ActionTable, number: int, stage: int, reduced: dict[int, int], last: Sequence[int]
) -> None:
    if stage in reduced:
        raise LayoutError(f"{table.place(number)} is listed twice, first as {table.place(reduced[stage])}")
    if number < last[stage]:
        raise LayoutError(
            f"{table.place(number)} comes before {table.place(last[stage])}; gradients are reduced once all "
            "micro-batches have added theirs"
        )
    reduced[stage] = number
