"""Races of one-sided accesses: two that overlap, at least one of them a write, and nothing orders them.

Accumulates of one operation commute. A one-sided op may take effect at any time between its start and its
rank's next fence, even where a rank reaches its own memory with it. A released write is ordered with later
readers by the edge that it gives them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from meshweave.base.errors import ProgramError
from meshweave.ir.analysis.dataflow import Dataflow, Event
from meshweave.ir.analysis.edges import is_one_sided, is_tracked
from meshweave.ir.analysis.matching import Node
from meshweave.ir.program.ops import READ, UPDATE, Broadcast, Fence, Mode, Permute, Reduce
from meshweave.ir.program.views import View


@dataclass(frozen=True)
class _Access:
    node: Node
    mode: Mode
    view: View
    ended_by: Node | None
    """The op at whose end the access has surely ended; None if no op guarantees that."""


def check_races(flow: Dataflow, order: Sequence[Event]) -> None:
    """Raise ProgramError for the first race found, naming both ops, the rank whose memory it is, and the buffer.

    `order` are the program's events in an order in which they can happen.
    """
    accesses = _accesses(flow)
    if not accesses:
        return
    past = _CompletedBefore(flow, order)
    for (owner, buffer, _), entries in accesses.items():
        foreign = [entry for entry in entries if entry.view.rank is not None]
        for entry in foreign:
            for other in entries:
                if other is entry:
                    continue
                if entry.mode == other.mode and entry.mode in (READ, UPDATE):
                    continue
                if past.is_over_before(entry.ended_by, other.node) or past.is_over_before(
                    other.ended_by, entry.node
                ):
                    continue
                if entry.view.overlaps(other.view):
                    raise ProgramError(
                        f"race: {entry.mode} by rank {entry.node[0]} and {other.mode} by "
                        f"{flow.label(other.node)} of rank {other.node[0]} touch the same elements unordered",
                        op=flow.label(entry.node),
                        rank=owner,
                        buffer=buffer,
                    )


def _accesses(flow: Dataflow) -> dict[tuple[int, str, int], list[_Access]]:
    """Return the accesses to memory that one-sided ops of other ranks reach, by (owner, buffer, slot)."""
    reached = {
        (view.rank, view.buffer)
        for node in flow.nodes()
        for _, view in flow.op(node).accesses()
        if view.rank is not None
    }
    out: dict[tuple[int, str, int], list[_Access]] = defaultdict(list)
    if not reached:
        return out
    for rank, ops in flow.matched.ops.items():
        fence: Node | None = None
        for index in range(len(ops) - 1, -1, -1):
            node, op = (rank, index), ops[index].op
            if isinstance(op, Fence):
                fence = node
            ends = fence if is_one_sided(op) and not is_tracked(op) else node
            for mode, view in op.accesses():
                owner = rank if view.rank is None else view.rank
                if (owner, view.buffer) in reached:
                    assert isinstance(owner, int) and isinstance(view.slot, int)
                    out[owner, view.buffer, view.slot].append(_Access(node, mode, view, ends))
    return out


class _CompletedBefore:
    """For each op, a bit mask of the ops that have ended before it can start."""

    def __init__(self, flow: Dataflow, order: Sequence[Event]) -> None:
        self._bit = {node: bit for bit, node in enumerate(node for event in order for node in event)}
        self._start: dict[Node, int] = {}
        self._mask: dict[Node, int] = {}  # complete before it can end: its own partners have started, too
        lanes = flow.program.lane_of
        last: dict[tuple[int, str], int] = defaultdict(int)
        for event in order:
            own = []
            for node in event:
                mask = 0
                for earlier in flow.waits_for(node):
                    mask |= self._mask[earlier]
                lane = lanes[flow.op(node).lane]
                if lane.order == "fifo" and lane.width == 1:
                    mask |= last[node[0], lane.name]
                own.append(mask)
                self._start[node] = mask
            for position, node in enumerate(event):
                mask = own[position] | 1 << self._bit[node]
                for partner in _partners(flow, event, position):
                    mask |= own[partner]
                if isinstance(flow.op(node), Fence):  # a fence ends everywhere at once
                    mask |= sum(1 << self._bit[member] for member in event)
                self._mask[node] = mask
                last[node[0], flow.op(node).lane] = mask

    def is_over_before(self, first: Node | None, second: Node) -> bool:
        """Return whether `first` has ended before `second` can start; False for None.

        The start of `second` counts, since a collective may read its views long before the last member joins.
        """
        return first is not None and bool(self._start[second] >> self._bit[first] & 1)


def _partners(flow: Dataflow, event: Event, position: int) -> list[int]:
    """Return the positions of the members that must have started when this member's op ends."""
    op = flow.op(event[position])
    everyone = list(range(len(event)))
    if isinstance(op, Permute):
        shift = op.shift
        assert isinstance(shift, int)
        return [(position - shift) % len(event), (position + shift) % len(event)]
    if isinstance(op, Broadcast):
        return [int(op.root)]  # type: ignore[arg-type]
    if isinstance(op, Reduce):
        return everyone if position == op.root else []
    return everyone
