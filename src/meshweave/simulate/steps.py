"""Communication that takes several ranks, as the messages that it is made of and what each of them waits for.

A ring collective is as many exchanges with the neighbours as it has steps, once per direction; an all-to-all is
one exchange with everybody in turn; a permute is one exchange; a broadcast or reduce is a chain along which
packets run, a send with its recv the shortest such chain. Nobody waits for a member that it exchanges nothing
with, so whoever comes late delays its neighbours first and others only as the steps go by.

Members are positions in the group. Times are in picoseconds, amounts in bytes, rates in bytes per second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from meshweave.base.units import to_ps
from meshweave.cost.machine import Machine
from meshweave.cost.price import constants_of, price
from meshweave.ir.analysis.dataflow import Dataflow
from meshweave.ir.analysis.matching import Joint
from meshweave.ir.analysis.shapes import equal_parts
from meshweave.ir.program.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Permute,
    Recv,
    Reduce,
    ReduceScatter,
)
from meshweave.ir.work import Transfer, bytes_along, work_of


@dataclass(frozen=True, slots=True)
class Message:
    """`amount` bytes from member to member, at most at `cap`, that flow `delay_ps` after the message may begin.

    Attributes:
        adds: what arrives is added to what is there, which reads that too, instead of stored.
        back: it takes the backward direction where both are equally long.
        buffered: a send buffer may take it, so that the sender is done early.
        hop: its place in a chain.
    """

    sender: int
    receiver: int
    amount: int
    cap: int
    delay_ps: int
    adds: bool = False
    back: bool = False
    buffered: bool = False
    hop: int = 0


class MessageSchedule(Protocol):
    """The messages among the members of one joint: which may begin, given what has happened."""

    def join(self, member: int) -> list[Message]:
        """Return the messages that may begin as a member has issued its op."""

    def end_message(self, message: Message, member: int) -> list[Message]:
        """Return the messages that may begin as a message is over for one of its ends."""

    def is_done(self, member: int) -> bool:
        """Return whether a member has no message left."""


class ShiftExchange:
    """A schedule in which every member sends to the member `shift(t)` places on in step t.

    A member goes on to the next step once what it sends and what it receives are both over.
    """

    def __init__(
        self,
        count: int,
        steps: int,
        shift: Callable[[int], int],
        message: Callable[[int, int, int], Message],
    ) -> None:
        self.count, self.steps, self.shift, self.message = count, steps, shift, message
        self.at: dict[int, int] = {}
        self.open = [2] * count

    def join(self, member: int) -> list[Message]:
        self.at[member] = 0
        return self._ready(member)

    def end_message(self, message: Message, member: int) -> list[Message]:
        self.open[member] -= 1
        if self.open[member]:
            return []
        self.open[member] = 2
        self.at[member] += 1
        return self._ready(member)

    def is_done(self, member: int) -> bool:
        return self.at[member] == self.steps

    def _ready(self, member: int) -> list[Message]:
        """The messages of a member that has just reached its step, where their other end is there as well."""
        step = self.at[member]
        if step == self.steps:
            return []
        shift = self.shift(step)
        ends = (member, (member + shift) % self.count), ((member - shift) % self.count, member)
        return [self.message(step, *pair) for pair in ends if all(self.at.get(end) == step for end in pair)]


class PacketChain:
    """A schedule in which packets run one after the other from the first of `order` to the last."""

    def __init__(
        self, order: Sequence[int], packets: int, message: Callable[[int, int, int, int], Message]
    ) -> None:
        self.order, self.packets, self.message = order, packets, message
        self.place = {member: place for place, member in enumerate(order)}
        self.joined: set[int] = set()
        self.begun, self.left, self.arrived = ([0] * (len(order) - 1) for _ in range(3))

    def join(self, member: int) -> list[Message]:
        place = self.place[member]
        self.joined.add(place)
        return self._ready(place - 1) + self._ready(place)

    def end_message(self, message: Message, member: int) -> list[Message]:
        if member == message.sender:
            self.left[message.hop] += 1
            return []
        self.arrived[message.hop] += 1
        return self._ready(message.hop) + self._ready(message.hop + 1)

    def is_done(self, member: int) -> bool:
        place = self.place[member]
        last = place == len(self.order) - 1
        return (self.arrived[-1] if last else self.left[place]) == self.packets

    def _ready(self, hop: int) -> list[Message]:
        """The next packet of a hop, from place `hop` on, if it has come there and the one before is through."""
        if hop < 0 or not {hop, hop + 1} <= self.joined:
            return []
        packet = self.begun[hop]
        if packet == self.packets or self.arrived[hop] < packet or (hop and self.arrived[hop - 1] <= packet):
            return []
        self.begun[hop] += 1
        return [self.message(hop, packet, self.order[hop], self.order[hop + 1])]


def message_schedules(flow: Dataflow, joint: Joint, machine: Machine) -> tuple[MessageSchedule, ...]:
    """Return the message schedules of a joint, each independent of the others.

    There are none where the members only meet: a fence, a group of one.

    Raises:
        UnsupportedError: the machine cannot place the group.
    """
    if joint.kind == "message":
        return (_pair(flow, joint, machine),)
    count = len(joint.members)
    op = flow.op(joint.members[0])
    if count == 1:
        return ()
    match op:
        case Permute():
            return (_permute(flow, joint, machine, op),)
        case AllGather() | ReduceScatter() | AllReduce():
            return _rings(_CollectiveCosts.of(flow, joint, machine), op)
        case Broadcast() | Reduce():
            return (_chain(_CollectiveCosts.of(flow, joint, machine), op),)
        case AllToAll():
            return (_all_to_all(_CollectiveCosts.of(flow, joint, machine), op, flow, joint),)
    return ()


@dataclass(frozen=True)
class _CollectiveCosts:
    """What all messages of a collective have in common."""

    flow: Dataflow
    work: Transfer
    num_directions: int
    rate: int
    launch_ps: int
    sync_ps: int

    @classmethod
    def of(cls, flow: Dataflow, joint: Joint, machine: Machine) -> _CollectiveCosts:
        work = work_of(flow.program, flow.op(joint.members[0]))
        assert isinstance(work, Transfer)
        kind = constants_of(work.kind)
        constants = machine.constants(work.axis, kind)
        rate, ways = machine.rate(work.axis, kind), machine.num_directions(work.axis)
        return cls(flow, work, ways, rate, to_ps(constants.launch_s), to_ps(constants.sync_s))

    def delay_ps(self, is_first: bool) -> int:
        return self.sync_ps + (self.launch_ps if is_first else 0)


def _pair(flow: Dataflow, joint: Joint, machine: Machine) -> MessageSchedule:
    """A send and its recv: a chain of one packet over one hop."""
    ends = joint.members[0][0], joint.members[1][0]
    cost = price(work_of(flow.program, flow.op(joint.members[0])), machine, ends=ends)
    recv = flow.op(joint.members[1])
    assert isinstance(recv, Recv)
    message = Message(0, 1, cost.amount, cost.rate_per_s, cost.fixed_ps, recv.update, buffered=True)
    return PacketChain((0, 1), 1, lambda *_: message)


def _permute(flow: Dataflow, joint: Joint, machine: Machine, op: Permute) -> MessageSchedule:
    assert isinstance(op.shift, int)
    shift = op.shift

    def message(step: int, sender: int, receiver: int) -> Message:
        cost = price(work_of(flow.program, flow.op(joint.members[sender])), machine, routed=True)
        return Message(sender, receiver, cost.amount, cost.rate_per_s, cost.fixed_ps, buffered=True)

    return ShiftExchange(len(joint.members), 1, lambda step: shift, message)


def _rings(terms: _CollectiveCosts, op: AllGather | ReduceScatter | AllReduce) -> tuple[MessageSchedule, ...]:
    """One exchange per direction; two-way rings cut every part in two pieces, the larger one forwards."""
    count, program = terms.work.num_ranks, terms.flow.program
    match op:
        case AllGather():
            rows: Sequence[int] = equal_parts(op.sizes, op.out.shape[op.dim], count)
            row_bytes = bytes_along(program, op.out.shape, op.dim, 1, op.out.buffer)
        case ReduceScatter():
            rows = equal_parts(op.sizes, op.src.shape[op.dim], count)
            row_bytes = bytes_along(program, op.src.shape, op.dim, 1, op.src.buffer)
        case AllReduce():
            rows, row_bytes = (-(-terms.work.part_bytes // count),) * count, 1
    if terms.num_directions == 1:
        return (_ring(terms, op.kind, 1, [size * row_bytes for size in rows], terms.rate),)
    half = max(terms.rate // 2, 1)
    return (
        _ring(terms, op.kind, 1, [(size + 1) // 2 * row_bytes for size in rows], half),
        _ring(terms, op.kind, -1, [size // 2 * row_bytes for size in rows], half),
    )


def _ring(terms: _CollectiveCosts, kind: str, shift: int, pieces: list[int], cap: int) -> MessageSchedule:
    count = terms.work.num_ranks
    # A gathered piece starts at its owner; a reduced one starts a place on, to end at its owner.
    ahead = 0 if kind == "all_gather" else 1
    adding = {"all_gather": 0, "reduce_scatter": count - 1, "all_reduce": count - 1}[kind]

    def message(step: int, sender: int, receiver: int) -> Message:
        piece = pieces[(sender - shift * (ahead + step)) % count]
        delay_ps = terms.delay_ps(step == 0)
        return Message(sender, receiver, piece, cap, delay_ps, step < adding, back=shift < 0)

    steps = (2 if kind == "all_reduce" else 1) * (count - 1)
    return ShiftExchange(count, steps, lambda step: shift, message)


def _chain(terms: _CollectiveCosts, op: Broadcast | Reduce) -> MessageSchedule:
    count, packets = terms.work.num_ranks, terms.work.packets
    amount = -(-terms.work.part_bytes // packets)
    assert isinstance(op.root, int)
    first = op.root if isinstance(op, Broadcast) else op.root + 1  # a reduce ends at its root
    adds = isinstance(op, Reduce)

    def message(hop: int, packet: int, sender: int, receiver: int) -> Message:
        delay_ps = terms.delay_ps(hop == packet == 0)
        return Message(sender, receiver, amount, terms.rate, delay_ps, adds, hop=hop)

    return PacketChain([(first + place) % count for place in range(count)], packets, message)


def _all_to_all(terms: _CollectiveCosts, op: AllToAll, flow: Dataflow, joint: Joint) -> MessageSchedule:
    """In step t every member sends its part to the member t + 1 places on."""
    count = terms.work.num_ranks
    parts = []
    for node in joint.members:
        mine = flow.op(node)
        assert isinstance(mine, AllToAll)
        rows = equal_parts(mine.send_sizes, mine.src.shape[mine.split_dim], count)
        row_bytes = bytes_along(flow.program, mine.src.shape, mine.split_dim, 1, mine.src.buffer)
        parts.append([size * row_bytes for size in rows])

    def message(step: int, sender: int, receiver: int) -> Message:
        return Message(sender, receiver, parts[sender][receiver], terms.rate, terms.delay_ps(step == 0))

    return ShiftExchange(count, count - 1, lambda step: step + 1, message)
