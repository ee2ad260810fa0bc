"""Message schedules: the messages of a collective or of a send with its recv, and the order between them.

A ring collective exchanges a message with the neighbours in each step, once per direction. An all-to-all exchanges
one with every other member in turn, a permute with one. A broadcast or reduce is a chain of hops for pipelined
packets, and a send with its recv is a chain of one hop and one packet. A member waits only for the members that it
exchanges messages with, so that a late member delays its neighbours first and the others in later steps.

Members are positions in the group. Times are in picoseconds, amounts in bytes, rates in bytes per second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from meshweave.base.units import to_ps
from meshweave.cost.libraries import sized_price
from meshweave.cost.machine import Machine
from meshweave.cost.packing import message_price
from meshweave.cost.price import CONSTANTS_OF, price
from meshweave.ir.analysis.dataflow import Dataflow
from meshweave.ir.analysis.matching import Joint
from meshweave.ir.analysis.shapes import part_sizes
from meshweave.ir.program.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Permute,
    Recv,
    Reduce,
    ReduceScatter,
    Send,
)
from meshweave.ir.work import Transfer, box_bytes, work_of


@dataclass(frozen=True, slots=True)
class Message:
    """A message of `amount` bytes between two members.

    Attributes:
        cap: the highest rate of the message, in bytes per second.
        delay_ps: the time between the moment the message may begin and the first byte: launch and synchronisation.
        adds: whether the receiver adds the elements to its own instead of storing them.
        route: 0; 1 backwards, on a ring where both directions are equally long; or a route of all NICs of hosts.
        buffered: whether the transport's send buffer may take the message, so that the sender ends early.
        hop: the number of the hop, in a chain.
    """

    sender: int
    receiver: int
    amount: int
    cap: int
    delay_ps: int
    adds: bool = False
    route: int = 0
    buffered: bool = False
    hop: int = 0


class MessageSchedule(Protocol):
    """The messages between the members of one event, and the state that says which of them may begin."""

    def join(self, member: int) -> list[Message]:
        """Record that a member has issued its op, and return the messages that may begin now."""

    def end_message(self, message: Message, member: int) -> list[Message]:
        """Record that a message has ended for one of its members, and return those that may begin now."""

    def is_done(self, member: int) -> bool:
        """Return whether all messages of a member have ended."""


class ShiftExchange(MessageSchedule):
    """A schedule in which member i sends to member i + shift(t), modulo the number of members, in step t.

    A member enters the next step when both its messages of the step, sent and received, have ended.
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
        """Return the messages that can begin once this member has joined."""
        self.at[member] = 0
        return self._ready(member)

    def end_message(self, message: Message, member: int) -> list[Message]:
        """Return the messages that can begin once this one has ended."""
        self.open[member] -= 1
        if self.open[member]:
            return []
        self.open[member] = 2
        self.at[member] += 1
        return self._ready(member)

    def is_done(self, member: int) -> bool:
        """Return whether a member has sent and received all that it has to."""
        return self.at[member] == self.steps

    def _ready(self, member: int) -> list[Message]:
        """Return the messages of a member's current step whose other member has reached that step as well."""
        step = self.at[member]
        if step == self.steps:
            return []
        shift = self.shift(step)
        ends = (member, (member + shift) % self.count), ((member - shift) % self.count, member)
        return [self.message(step, *pair) for pair in ends if all(self.at.get(end) == step for end in pair)]


class PacketChain(MessageSchedule):
    """A schedule in which pipelined packets travel from the first member of `order` to the last."""

    def __init__(
        self, order: Sequence[int], packets: int, message: Callable[[int, int, int, int], Message]
    ) -> None:
        self.order, self.packets, self.message = order, packets, message
        self.place = {member: place for place, member in enumerate(order)}
        self.joined: set[int] = set()
        self.begun, self.left, self.arrived = ([0] * (len(order) - 1) for _ in range(3))

    def join(self, member: int) -> list[Message]:
        """Return the messages that can begin once this member has joined."""
        place = self.place[member]
        self.joined.add(place)
        return self._ready(place - 1) + self._ready(place)

    def end_message(self, message: Message, member: int) -> list[Message]:
        """Return the messages that can begin once this packet has passed its hop."""
        if member == message.sender:
            self.left[message.hop] += 1
            return []
        self.arrived[message.hop] += 1
        return self._ready(message.hop) + self._ready(message.hop + 1)

    def is_done(self, member: int) -> bool:
        """Return whether all packets of a member have passed."""
        place = self.place[member]
        last = place == len(self.order) - 1
        return (self.arrived[-1] if last else self.left[place]) == self.packets

    def _ready(self, hop: int) -> list[Message]:
        """Return the next packet of hop `hop` (place `hop` to `hop + 1`) if it has arrived and the hop is free."""
        if hop < 0 or not {hop, hop + 1} <= self.joined:
            return []
        packet = self.begun[hop]
        if packet == self.packets or self.arrived[hop] < packet or (hop and self.arrived[hop - 1] <= packet):
            return []
        self.begun[hop] += 1
        return [self.message(hop, packet, self.order[hop], self.order[hop + 1])]


def message_schedules(flow: Dataflow, joint: Joint, machine: Machine) -> tuple[MessageSchedule, ...]:
    """Return the message schedules of a joint, each independent of the others.

    A fence and a group of one rank have none, because no bytes move.

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
    """The costs that all messages of a collective share."""

    flow: Dataflow
    work: Transfer
    num_directions: int
    rate: int
    launch_ps: int
    sync_ps: int
    route: int = 0

    @classmethod
    def of(cls, flow: Dataflow, joint: Joint, machine: Machine) -> _CollectiveCosts:
        work = work_of(flow.program, flow.op(joint.members[0]))
        assert isinstance(work, Transfer)
        kind = CONSTANTS_OF.get(work.kind, work.kind)
        sized = sized_price(machine, work.axis, kind, work.num_ranks, work.part_bytes)
        if sized is not None:
            return cls(flow, work, 1, sized.rate, sized.launch_ps, sized.sync_ps, sized.route)
        constants = machine.constants(work.axis, kind)
        rate, num_directions = machine.rate(work.axis, kind), machine.num_directions(work.axis)
        return cls(flow, work, num_directions, rate, to_ps(constants.launch_s), to_ps(constants.sync_s))

    def delay_ps(self, is_first: bool) -> int:
        return self.sync_ps + (self.launch_ps if is_first else 0)


def _pair(flow: Dataflow, joint: Joint, machine: Machine) -> MessageSchedule:
    """Return the schedule of a send and its recv: a chain of one packet over one hop."""
    ends = joint.members[0][0], joint.members[1][0]
    send, recv = (flow.op(member) for member in joint.members)
    assert isinstance(send, Send) and isinstance(recv, Recv)
    cost = message_price(flow.program, send, recv, ends, machine, shares_links=True)
    message = Message(0, 1, cost.amount, cost.rate_per_s, cost.fixed_ps, recv.update, buffered=True)
    return PacketChain((0, 1), 1, lambda *_: message)


def _permute(flow: Dataflow, joint: Joint, machine: Machine, op: Permute) -> MessageSchedule:
    assert isinstance(op.shift, int)
    shift, count = op.shift, len(joint.members)
    route = int(2 * (shift % count) > count - (shift < 0))  # backwards where that is shorter, or written so

    def message(step: int, sender: int, receiver: int) -> Message:
        cost = price(work_of(flow.program, flow.op(joint.members[sender])), machine, shares_links=True)
        return Message(
            sender, receiver, cost.amount, cost.rate_per_s, cost.fixed_ps, route=route, buffered=True
        )

    return ShiftExchange(count, 1, lambda step: shift, message)


def _rings(terms: _CollectiveCosts, op: AllGather | ReduceScatter | AllReduce) -> tuple[MessageSchedule, ...]:
    """Return one exchange per direction. With two directions each part is halved, the larger piece forwards."""
    count, program = terms.work.num_ranks, terms.flow.program
    match op:
        case AllGather():
            rows: Sequence[int] = part_sizes(op.sizes, op.out.shape[op.dim], count)
            row_bytes = box_bytes(program, op.out.shape, op.dim, 1, op.out.buffer)
        case ReduceScatter():
            rows = part_sizes(op.sizes, op.src.shape[op.dim], count)
            row_bytes = box_bytes(program, op.src.shape, op.dim, 1, op.src.buffer)
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
        return Message(
            sender, receiver, piece, cap, delay_ps, step < adding, route=terms.route or int(shift < 0)
        )

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
    """Return the exchange in which member i sends to member i + t + 1 in step t."""
    count = terms.work.num_ranks
    parts = []
    for node in joint.members:
        mine = flow.op(node)
        assert isinstance(mine, AllToAll)
        rows = part_sizes(mine.send_sizes, mine.src.shape[mine.split_dim], count)
        row_bytes = box_bytes(flow.program, mine.src.shape, mine.split_dim, 1, mine.src.buffer)
        parts.append([size * row_bytes for size in rows])

    def message(step: int, sender: int, receiver: int) -> Message:
        return Message(sender, receiver, parts[sender][receiver], terms.rate, terms.delay_ps(step == 0))

    return ShiftExchange(count, count - 1, lambda step: step + 1, message)
