"""The ops of programs that are written per rank, as lines that all devices run.

Where ranks send messages, or run lists of ops of their own, there is no template. All ops are then put into one
order, and those of different ranks that differ in numbers alone become one line: numbers are tables by coordinate,
and what a device has no part in is masked. Messages of equal shape between different ranks are one `ppermute`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from meshweave.execute.jax.devices import DeviceGroup, quoted
from meshweave.execute.jax.statements import StatementWriter
from meshweave.execute.jax.turns import Turn
from meshweave.ir.analysis.dataflow import Dataflow, Event, analyse, untimed_order
from meshweave.ir.analysis.edges import is_one_sided
from meshweave.ir.program import Program
from meshweave.ir.program.expressions import Expr
from meshweave.ir.program.ops import Accumulate, Collective, Fence, Get, Matmul, Op, Put, Recv, Send
from meshweave.ir.program.statements import On, statements_of
from meshweave.ir.program.views import View
from meshweave.lower import lower_one_sided, write_out_tiles

_NUMBERS = {
    *("lane", "name", "peer", "tag", "step", "over", "shift", "sizes", "send_sizes", "recv_sizes"),
    *("flops", "bytes", "stash_bytes", "freed_bytes", "shape"),
}
"""The fields of ops in which the ops of a line may differ."""


def as_messages(program: Program) -> Program:
    """Return the program with includes expanded, an op for each released tile, sends and recvs for one-sided ops.

    Raises:
        ProgramError: a product, add or copy reads another rank's memory in place, or an op of another kind than
            these and get, put and accumulate has a remote view.
    """
    program = program.expanded
    if any(isinstance(op, (Matmul, Put)) and op.release is not None for op in program.ops()):
        program = write_out_tiles(program)
    if any(is_one_sided(op) or isinstance(op, (Get, Put, Accumulate)) for op in program.ops()):
        program = lower_one_sided(program)
    return program


def is_by_rank(program: Program) -> bool:
    """Return whether jax cannot run a program's text as one template for all ranks.

    That is where it has blocks for listed ranks, sends, recvs, fences or released tiles.
    """
    for each in statements_of(program.body):
        if isinstance(each, On) and not isinstance(each.where, str):
            return True
        if isinstance(each, (Send, Recv, Fence)) or getattr(each, "release", None) is not None:
            return True
    return False


@dataclass(frozen=True)
class RankStep:
    """Ops of different ranks that are one line of the emitted function.

    Attributes:
        ops: the op of each global rank that takes part, by rank; for messages the send of each sender.
        receivers: for messages the recv of each receiver, by global rank; otherwise empty.
        groups: for a collective the global ranks of each group; otherwise ().
    """

    ops: dict[int, Op]
    receivers: dict[int, Op]
    groups: tuple[tuple[int, ...], ...] = ()


def rank_steps(program: Program) -> Iterator[RankStep]:
    """Yield the steps of a program in an order in which each op comes after all that it waits for.

    An event is an op of one rank, a message, or a collective of one group. Events of one form differ in numbers
    only. Of the events whose predecessors are done, those of the most frequent form are the next step. Fences
    order steps and are not yielded.

    Raises:
        ProgramError: messages or collectives do not match between ranks, or the program deadlocks.
    """
    flow = analyse(program)
    events = untimed_order(flow)
    number_of = {node: number for number, event in enumerate(events) for node in event}
    before = [
        {number_of[earlier] for node in event for earlier in flow.waits_for(node)} - {number}
        for number, event in enumerate(events)
    ]
    after = defaultdict(list)
    for number, earlier in enumerate(before):
        for each in earlier:
            after[each].append(number)
    forms = [_form(flow, event) for event in events]
    ready = {number for number, earlier in enumerate(before) if not earlier}
    while ready:
        most = Counter(forms[number] for number in sorted(ready)).most_common(1)[0][0]
        alike = [number for number in sorted(ready) if forms[number] == most]
        chosen = _side_by_side(events, alike, isinstance(flow.op(events[alike[0]][0]), Send))
        ready -= set(chosen)
        for number in chosen:
            for later in after[number]:
                before[later].discard(number)
                if not before[later]:
                    ready.add(later)
        if not isinstance(flow.op(events[chosen[0]][0]), Fence):
            yield _step(flow, [events[number] for number in chosen])


def _side_by_side(events: Sequence[Event], numbers: Sequence[int], are_messages: bool) -> list[int]:
    """Return events of one form in which no rank takes part twice; it may send one message and receive another."""
    taken: set[tuple[int, int]] = set()
    chosen = []
    for number in numbers:
        parts = {(rank, at if are_messages else 0) for at, (rank, _) in enumerate(events[number])}
        if not parts & taken:
            taken |= parts
            chosen.append(number)
    return chosen


def _step(flow: Dataflow, events: Sequence[Event]) -> RankStep:
    first = flow.op(events[0][0])
    if isinstance(first, Send):
        sends, recvs = zip(*events, strict=True)
        return RankStep({n[0]: flow.op(n) for n in sends}, {n[0]: flow.op(n) for n in recvs})
    ops = {node[0]: flow.op(node) for event in events for node in event}
    groups = tuple(dict.fromkeys(op.over for op in ops.values() if isinstance(op, Collective)))
    return RankStep(ops, {}, groups)  # type: ignore[arg-type]


def _form(flow: Dataflow, event: Event) -> Hashable:
    """Return what two events must have in common to be one line."""
    ops = [flow.op(node) for node in event]
    if isinstance(ops[0], Send):
        return tuple(_form_of_op(op, with_shapes=True) for op in ops)
    return _form_of_op(ops[0], with_shapes=False), len(ops)


def _form_of_op(op: Op, *, with_shapes: bool) -> Hashable:
    """Return an op without its numbers, lane and name: views are buffers and slots."""
    parts: list[Hashable] = [op.kind]
    for each in fields(op):
        if each.name not in _NUMBERS:
            parts.append(_form_of_value(getattr(op, each.name), with_shapes=with_shapes))
    return tuple(parts)


def _form_of_value(value: Any, *, with_shapes: bool) -> Hashable:
    if isinstance(value, View):
        return value.buffer, value.slot, value.shape if with_shapes else None
    if isinstance(value, tuple):
        return tuple(_form_of_value(each, with_shapes=with_shapes) for each in value)
    assert not isinstance(value, Expr), "an op is not resolved"
    form: Hashable = getattr(value, "update", value)
    return form


class RankStepWriter(StatementWriter):
    """Writes a program whose ranks have ops of their own (`is_by_rank`), one `RankStep` a line."""

    def steps(self) -> None:
        """Append the lines of all steps of the program (`rank_steps`) to `lines`."""
        self.numbers.tables_only = True
        for step in rank_steps(self.program):
            self._groups = step.groups
            if step.receivers:
                self._message(step)
            else:
                self._take(step.ops)
                self._write_resolved(next(iter(step.ops.values())))

    def _take(self, ops: dict[int, Op]) -> None:
        """Make ops those that are written next."""
        turn = Turn({}, {rank: {} for rank in sorted(ops)})
        everyone = [Turn({}, {rank: {} for rank in self.program.ranks})]
        self._turns, self._template = [turn], next(iter(ops.values()))
        self._resolved = {(0, rank): op for rank, op in ops.items()}
        self._active = ""
        if len(ops) < len(self.program.ranks):
            self._active = self._condition(everyone, lambda t, r: int(r in ops), None, "")

    def _message(self, step: RankStep) -> None:
        self._take(step.ops)
        axes = tuple(axis for axis, size in self.devices.sizes.items() if size > 1)
        pairs = [(self.devices.number(rank), self.devices.number(_peer(op))) for rank, op in step.ops.items()]
        value = f"lax.ppermute({self._sent()}, {quoted(axes)}, {sorted(pairs)!r})"
        sent = next(iter(step.ops.values()))
        assert isinstance(sent, Send)
        value = self._moved(sent.lane, value)
        self._take(step.receivers)
        first = next(iter(step.receivers.values()))
        assert isinstance(first, Recv)
        if first.update:
            value = f"{self._read('out')} + {value}"
        self._store("out", value, self._dtype(sent.src))

    def _group(self, op: Any) -> DeviceGroup:
        return self.devices.group_of(self._groups)


def _peer(op: Op) -> int:
    assert isinstance(op, Send) and isinstance(op.peer, int)
    return op.peer
