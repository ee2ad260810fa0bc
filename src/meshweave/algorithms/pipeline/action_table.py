"""Which action of a schedule is where: complete, none twice, and in an order that each rank can follow alone.

A step of training has, for each stage and micro-batch, a forward and a backward, or a forward, an input gradient
and a weight gradient. A schedule that lists transfers lists, for each edge between stages on different ranks and
each micro-batch, a send and a receive in either direction. A schedule without any backward is one of inference.

What is wrong within one rank's order is refused here. The error names the action, its rank and its position there
(from 1), or the action that is missing. Orders that are wrong only across ranks are refused by `action_graph` and
`progress`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from meshweave.algorithms.pipeline.actions import Action, ActionKind, Schedule
from meshweave.base.errors import LayoutError

IntArray = NDArray[np.int64]
ABSENT = -1
"""The number of an action that is not listed."""
KINDS = tuple(ActionKind)
SENDS = (ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD)
RECVS = (ActionKind.RECV_FORWARD, ActionKind.RECV_BACKWARD)
_CODES = {kind: code for code, kind in enumerate(KINDS)}
_BEHIND = (ActionKind.SEND_BACKWARD, ActionKind.RECV_FORWARD)
"""Transfers whose other end is the stage before, unless they name another."""
_PER_COMPUTE = {
    ActionKind.FORWARD: (0,),
    ActionKind.INPUT_GRAD: (1,),
    ActionKind.WEIGHT_GRAD: (2,),
    ActionKind.BACKWARD: (1, 2),
}


@dataclass(frozen=True)
class ActionColumns:
    """The actions of a schedule as columns, a row for each, the parts of an overlap a row each.

    Attributes:
        number: the action, numbered through over all ranks; the parts of an overlap share it.
        code: the index of its kind in `KINDS`.
        stage: its stage.
        micro_batch: its micro-batch, 0 where it has none.
        peers: the stage at the other end, by row, for rows whose action names it.
    """

    number: IntArray
    code: IntArray
    stage: IntArray
    micro_batch: IntArray
    peers: dict[int, int]

    def rows(self, *kinds: ActionKind) -> IntArray:
        """Return the indices of the rows whose action has one of these kinds, ascending (not their `number`)."""
        return np.flatnonzero(np.isin(self.code, [_CODES[kind] for kind in kinds]))


@dataclass(frozen=True)
class ActionTable:
    """Where each action of a schedule is listed. The actions of all ranks are numbered through, rank after rank.

    Arrays of numbers hold ABSENT where an action is not listed. An overlap has one number for all parts.

    Attributes:
        schedule: the schedule.
        edges: (source stage, target stage) of each activation that is passed on, skip connections among them.
        columns: the actions.
        starts: the number of the first action of each rank, and at the end the number of actions.
        ranks: for each action its rank.
        communicates: for each action whether it is a send or a receive.
        computes: for each action whether it computes.
        forwards: the number of each forward, (stages, micro-batches).
        input_grads: likewise of the input gradient or the whole backward.
        weight_grads: likewise of the weight gradient or the whole backward.
        transfers: for each kind of send or receive the numbers of its actions, (edges, micro-batches).
    """

    schedule: Schedule
    edges: tuple[tuple[int, int], ...]
    columns: ActionColumns
    starts: IntArray
    ranks: IntArray
    communicates: NDArray[np.bool_]
    computes: NDArray[np.bool_]
    forwards: IntArray
    input_grads: IntArray
    weight_grads: IntArray
    transfers: dict[ActionKind, IntArray]

    @property
    def trains(self) -> bool:
        """Return whether the schedule has any backward action."""
        return bool((self.input_grads != ABSENT).any() or (self.weight_grads != ABSENT).any())

    @property
    def lists_transfers(self) -> bool:
        """Return whether the schedule lists sends and receives."""
        return bool(self.communicates.any())

    def crossing(self) -> list[int]:
        """Return the indices in `edges` of the edges whose two stages are on different ranks."""
        ranks = self.schedule.stage_ranks
        return [i for i, (source, target) in enumerate(self.edges) if ranks[source] != ranks[target]]

    def describe(self, number: int) -> str:
        """Return action `number` in words, with its position on its rank from 1: "2F0 (rank 1, action 3)"."""
        rank = int(self.ranks[number])
        position = int(number - self.starts[rank])
        return f"{self.schedule.actions[rank][position]} (rank {rank}, action {position + 1})"


def chain_edges(num_stages: int) -> tuple[tuple[int, int], ...]:
    """Return the edges (stage, next stage) of a chain of stages: for 3 stages ((0, 1), (1, 2))."""
    return tuple((stage, stage + 1) for stage in range(num_stages - 1))


def tabulate(schedule: Schedule, edges: Sequence[tuple[int, int]] | None = None) -> ActionTable:
    """Return where each action of a schedule is listed, after checking the actions of each rank.

    A schedule may leave out all backwards, all transfers, reductions, or UNSHARD and RESHARD. Where it lists one
    backward it must list all, and so with the transfers between ranks. That the ranks do not wait for each other
    in a circle is not checked.

    Args:
        edges: (source stage, target stage) of what is passed on; None: each stage to the next.

    Raises:
        LayoutError: an action is missing, doubled or out of order on its rank; a transfer is along no edge or
            between stages of one rank; gradients are reduced before the last weight gradient; or a stage that
            lists UNSHARD or RESHARD computes while its parameters are not gathered, or gathers or frees them
            twice.
    """
    pairs = chain_edges(schedule.num_stages) if edges is None else tuple(edges)
    lengths = [len(order) for order in schedule.actions]
    actions = list(chain.from_iterable(schedule.actions))
    code = np.array([_CODES[action.kind] for action in actions], dtype=np.int64)
    counts = (schedule.num_stages, schedule.num_micro_batches)
    columns = _columns(actions, code)
    _require_forwards(columns, schedule)
    forwards, input_grads, weight_grads = (np.full(counts, ABSENT, np.int64) for _ in range(3))
    table = ActionTable(
        schedule,
        pairs,
        columns,
        np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))),
        np.repeat(np.arange(len(lengths)), lengths),
        np.isin(code, [_CODES[kind] for kind in KINDS if kind.communicates]),
        np.isin(code, [_CODES[kind] for kind in KINDS if kind.computes]),
        forwards,
        input_grads,
        weight_grads,
        {kind: np.full((len(pairs), counts[1]), ABSENT, np.int64) for kind in (*SENDS, *RECVS)},
    )
    _enter(table)
    _require_computes(table)
    if table.lists_transfers:
        _require_transfers(table)
    _check_reductions(table)
    _check_sharding(table)
    return table


def _columns(actions: Sequence[Action], code: IntArray) -> ActionColumns:
    number = np.arange(len(actions), dtype=np.int64)
    leaves: Sequence[Action] = actions
    if (code == _CODES[ActionKind.OVERLAP]).any():
        leaves = [leaf for action in actions for leaf in action.leaves]
        number = np.repeat(number, [len(action.leaves) for action in actions])
        code = np.array([_CODES[leaf.kind] for leaf in leaves], dtype=np.int64)
    stage = np.array([leaf.stage for leaf in leaves], dtype=np.int64)
    micro_batch = np.array([leaf.micro_batch or 0 for leaf in leaves], dtype=np.int64)
    peers = {row: leaf.peer for row, leaf in enumerate(leaves) if leaf.peer is not None}
    return ActionColumns(number, code, stage, micro_batch, peers)


def _require_forwards(columns: ActionColumns, schedule: Schedule) -> None:
    """Raise LayoutError where there are fewer forwards than stages times micro-batches."""
    rows = columns.rows(ActionKind.FORWARD)
    count = schedule.num_micro_batches
    if len(rows) >= schedule.num_stages * count:
        return
    for stage in range(schedule.num_stages):
        present = set(columns.micro_batch[rows[columns.stage[rows] == stage]].tolist())
        if len(present) < count:
            missing = next(micro_batch for micro_batch in range(count) if micro_batch not in present)
            _refuse_missing(stage, "forward (F)", missing, count)


def _refuse_missing(stage: int, what: str, micro_batch: int, count: int) -> NoReturn:
    raise LayoutError(
        f"stage {stage} has no {what} of micro-batch {micro_batch}; each stage works on each of the "
        f"{count} micro-batches once"
    )


def _enter(table: ActionTable) -> None:
    """Enter every action. Raises LayoutError for one that is listed twice, and for a transfer along no edge."""
    columns = table.columns
    arrays = (table.forwards, table.input_grads, table.weight_grads)
    for index, array in enumerate(arrays):
        rows = columns.rows(*(kind for kind, lists in _PER_COMPUTE.items() if index in lists))
        _enter_once(table, array, rows, columns.stage[rows])
    for kind, array in table.transfers.items():
        rows = columns.rows(kind)
        if len(rows):
            _enter_once(table, array, rows, _edges_of(table, kind, rows))


def _enter_once(table: ActionTable, array: IntArray, rows: IntArray, firsts: IntArray) -> None:
    columns, count = table.columns, table.schedule.num_micro_batches
    slots = firsts * count + columns.micro_batch[rows]
    flat = array.reshape(-1)
    flat[slots] = columns.number[rows]
    if np.bincount(slots, minlength=1).max() > 1:
        seen: dict[int, int] = {}
        for slot, row in zip(slots.tolist(), rows.tolist(), strict=True):
            if slot in seen:
                _refuse_double(table, seen[slot], row)
            seen[slot] = row


def _edges_of(table: ActionTable, kind: ActionKind, rows: IntArray) -> IntArray:
    """Return the number of the edge that each transfer of a kind goes along."""
    columns, behind = table.columns, kind in _BEHIND
    stages = columns.stage[rows]
    peers = stages + (-1 if behind else 1)
    if columns.peers:
        named = [columns.peers.get(row, ABSENT) for row in rows.tolist()]
        peers = np.where(np.array(named) == ABSENT, peers, named)
    numbers = {edge: index for index, edge in enumerate(table.edges)}
    base = table.schedule.num_stages + max((*columns.peers.values(), 0)) + 2
    sources, targets = (peers, stages) if behind else (stages, peers)
    codes, firsts, inverse = np.unique(
        (sources + 1) * base + targets + 1, return_index=True, return_inverse=True
    )
    edge_numbers = []
    for code, first in zip(codes.tolist(), firsts.tolist(), strict=True):
        edge = (code // base - 1, code % base - 1)
        _require_crossing(table, edge, numbers, int(columns.number[rows[first]]))
        edge_numbers.append(numbers[edge])
    return np.array(edge_numbers, dtype=np.int64)[inverse]


def _require_crossing(
    table: ActionTable, edge: tuple[int, int], numbers: dict[tuple[int, int], int], number: int
) -> None:
    """Raise LayoutError where a transfer is along no edge, or between stages of one rank."""
    between = f"{table.describe(number)} is a transfer between stages {edge[0]} and {edge[1]}, which"
    if edge not in numbers:
        raise LayoutError(f"{between} pass nothing on; an activation goes from a stage to the next")
    source, target = (table.schedule.stage_ranks[end] for end in edge)
    if source == target:
        raise LayoutError(f"{between} are both on rank {source}; leave it out")


def _refuse_double(table: ActionTable, first: int, second: int) -> NoReturn:
    columns = table.columns
    here, there = (table.describe(int(columns.number[row])) for row in (second, first))
    if columns.code[first] == columns.code[second]:
        raise LayoutError(f"{here} is listed twice, first as {there}; leave one out")
    raise LayoutError(
        f"{here} and {there} are both listed: a micro-batch has one backward on a stage, either B or I and W"
    )


def _require_computes(table: ActionTable) -> None:
    """Raise LayoutError where a micro-batch is missing on a stage, or its parts are in the wrong order there."""
    parts: list[tuple[IntArray, str]] = [(table.forwards, "forward (F)")]
    if table.trains:
        parts.append((table.input_grads, "input gradient (I or B)"))
        parts.append((table.weight_grads, "weight gradient (W or B)"))
    for numbers, what in parts:
        for stage, micro_batch in _first(numbers == ABSENT):
            _refuse_missing(stage, what, micro_batch, numbers.shape[1])
    if table.trains:
        for at in _first(table.forwards >= table.input_grads):
            _refuse_order(table, int(table.input_grads[at]), int(table.forwards[at]))
        for at in _first(table.input_grads > table.weight_grads):
            _refuse_order(table, int(table.weight_grads[at]), int(table.input_grads[at]))


def _first(wrong: NDArray[Any]) -> list[tuple[int, int]]:
    """Return the indices of the first true element of a matrix, or nothing."""
    flat = int(np.argmax(wrong)) if wrong.size else 0
    return [divmod(flat, wrong.shape[1])] if wrong.size and wrong.flat[flat] else []


def _refuse_order(table: ActionTable, later: int, earlier: int) -> NoReturn:
    raise LayoutError(
        f"{table.describe(later)} does not come after {table.describe(earlier)}; a stage runs a micro-batch "
        "forward, then its input gradient, then its weight gradient"
    )


def _require_transfers(table: ActionTable) -> None:
    """Raise LayoutError where a transfer is missing, or on the wrong side of the action that it serves."""
    directions = [(ActionKind.SEND_FORWARD, ActionKind.RECV_FORWARD, table.forwards)]
    if table.trains:
        directions.append((ActionKind.SEND_BACKWARD, ActionKind.RECV_BACKWARD, table.input_grads))
    for send_kind, recv_kind, computes in directions:
        for index in table.crossing():
            edge = table.edges[index]
            source, target = edge[::-1] if send_kind is ActionKind.SEND_BACKWARD else edge
            sends, recvs = table.transfers[send_kind][index], table.transfers[recv_kind][index]
            producers, consumers = computes[source], computes[target]
            for _, at in _first((sends <= producers)[None]):
                wanted = (send_kind, source, target, at)
                _refuse_transfer(table, int(sends[at]), int(producers[at]), wanted)
            for _, at in _first(((recvs >= consumers) | (recvs == ABSENT))[None]):
                wanted = (recv_kind, target, source, at)
                _refuse_transfer(table, int(recvs[at]), int(consumers[at]), wanted)


def _refuse_transfer(
    table: ActionTable, number: int, compute: int, wanted: tuple[ActionKind, int, int, int]
) -> NoReturn:
    """Raise LayoutError for a send or receive that is missing, or not after or before its compute action."""
    kind, stage, peer, micro_batch = wanted
    sends = kind in SENDS
    partner = "" if abs(stage - peer) == 1 else f" {'to' if sends else 'from'} stage {peer}"
    if number == ABSENT:
        raise LayoutError(
            f"rank {table.schedule.stage_ranks[stage]} lists no {stage}{kind.value}{micro_batch}{partner}, and "
            f"other transfers are listed; it belongs {'after' if sends else 'before'} {table.describe(compute)}"
        )
    if sends:
        raise LayoutError(
            f"{table.describe(number)} does not come after {table.describe(compute)}, which makes it"
        )
    raise LayoutError(
        f"{table.describe(number)} does not come before {table.describe(compute)}, which uses it"
    )


def _check_reductions(table: ActionTable) -> None:
    """Raise LayoutError where gradients are reduced twice, or before all micro-batches have added theirs."""
    columns, seen = table.columns, dict[int, int]()
    for row in columns.rows(ActionKind.REDUCE_GRAD).tolist():
        stage, number = int(columns.stage[row]), int(columns.number[row])
        if stage in seen:
            raise LayoutError(
                f"{table.describe(number)} is listed twice, first as {table.describe(seen[stage])}"
            )
        seen[stage] = number
        last = int(table.weight_grads[stage].max(initial=ABSENT))
        if number < last:
            raise LayoutError(
                f"{table.describe(number)} comes before {table.describe(last)}; gradients are reduced once all "
                "micro-batches have added theirs"
            )


def _check_sharding(table: ActionTable) -> None:
    """Raise LayoutError where a stage that is gathered once computes while it is not gathered."""
    columns = table.columns
    turns = columns.rows(ActionKind.UNSHARD, ActionKind.RESHARD)
    for stage in np.unique(columns.stage[turns]).tolist():
        rows = turns[columns.stage[turns] == stage]
        numbers = columns.number[rows]
        gathers = columns.code[rows] == _CODES[ActionKind.UNSHARD]
        wanted = np.arange(len(rows)) % 2 == 0
        for _, at in _first((gathers != wanted)[None]):
            state = "gathered already" if gathers[at] else "not gathered"
            raise LayoutError(f"{table.describe(int(numbers[at]))} is for parameters that are {state}")
        parts = [table.forwards[stage], table.input_grads[stage], table.weight_grads[stage]]
        computes = np.unique(np.concatenate(parts))
        computes = computes[computes != ABSENT]
        inside = np.searchsorted(numbers, computes) % 2 == 1
        for _, at in _first((~inside)[None]):
            raise LayoutError(
                f"{table.describe(int(computes[at]))} computes with parameters that are not gathered; "
                f"{stage}UNSHARD belongs before it"
            )
