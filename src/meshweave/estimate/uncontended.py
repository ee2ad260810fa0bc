"""Simulation without contention: every op takes the time of its closed form, and shares no engine or link.

The members of a collective start together, when the last of them has been issued; those of a permute wait for the
two members that they exchange with. Broadcasts and reductions are chains of packets, in which a hop waits for its
two members and for the hop before it (`estimate.chains`). Ties are broken by rank, lane and op.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from pathlib import Path

from meshweave.base.units import to_s
from meshweave.cost.calls import with_counts
from meshweave.cost.machine import Machine
from meshweave.cost.packing import message_price, op_price
from meshweave.cost.price import Price, price
from meshweave.describe.machine.cluster import Cluster
from meshweave.estimate.chains import launch_and_packet_ps
from meshweave.estimate.skeletons import Estimate
from meshweave.ir.analysis.dataflow import Dataflow, Issuer, analyse
from meshweave.ir.analysis.matching import Joint, Node
from meshweave.ir.program import Program
from meshweave.ir.program.ops import Broadcast, Permute, Recv, Reduce, Send
from meshweave.ir.work import Transfer, Work, work_of
from meshweave.trace import Span, Trace

# --- recorder ---------------------------------------------------------------------------------------------

# The issue and end times that both simulators in Python record.


class TraceRecorder:
    """Base of simulators that drive a program's `Issuer`: it records the issue and end time of each op.

    With `hosted` an op also waits until the host of its rank, a CPU thread, has issued it (`Issuer.finish_all`).
    """

    def __init__(self, flow: Dataflow, *, hosted: bool = False) -> None:
        self.flow = flow
        self.issuer = Issuer(flow, hosted=hosted)
        self.now_ps = 0
        self.issued_ps: dict[Node, int] = {}
        self.ended_ps: dict[Node, int] = {}

    def trace(self) -> Trace:
        """Return a span from issue to end for each op of all ranks, in order of start.

        Raises:
            ProgramError: some ops have not ended, because the program deadlocks.
        """
        if any(node not in self.ended_ps for node in self.flow.nodes()):
            raise self.issuer.deadlock_error()
        spans = []
        for node in self.flow.nodes():
            op = self.flow.op(node)
            times = self.issued_ps[node], self.ended_ps[node]
            spans.append(Span(*node, op.lane, op.kind, self.flow.label(node), *times))
        spans.sort(key=lambda span: (span.start_ps, span.rank, span.lane, span.index))
        return Trace(self.flow.program.name, "simulate", tuple(spans))


# --- uncontended ------------------------------------------------------------------------------------------


class UncontendedSimulator(TraceRecorder):
    """A simulator in which every op has engines and links to itself: no contention."""

    def __init__(self, flow: Dataflow, machine: Machine) -> None:
        super().__init__(flow)
        machine.require(flow.program)
        self.machine = machine
        self.events: list[tuple[int, int, str, int, int, tuple[Node, ...]]] = []
        self.num_events = 0
        self.open_parts: dict[Node, int] = {}
        self.arrived: dict[int, set[int]] = defaultdict(set)
        self.chain_ends: dict[int, list[int]] = defaultdict(list)

    def run(self) -> Trace:
        """Return the trace of the program. Raises ProgramError if it deadlocks."""
        for node in self.issuer.start():
            self._issue(node)
        while self.events:
            self.now_ps, *_, nodes = heapq.heappop(self.events)
            for node in nodes:
                self._part_done(node)
        return self.trace()

    def _issue(self, node: Node) -> None:
        self.issued_ps[node] = self.now_ps
        joint = self.flow.joint(node)
        if joint is None:
            self._begin((node,))
            return
        arrived = self.arrived[self.flow.matched.joint_of[node]]
        position = joint.members.index(node)
        arrived.add(position)
        op = self.flow.op(node)
        if isinstance(op, Permute):
            self._permute(joint, position, arrived)
        elif isinstance(op, (Broadcast, Reduce)) and len(joint.members) > 1:
            self._chain(joint, op, arrived)
        elif len(arrived) == len(joint.members):
            self._begin(joint.members, may_free=joint.kind == "message")

    def _permute(self, joint: Joint, position: int, arrived: set[int]) -> None:
        """Start the transfers from and to a member whose other member has been issued as well."""
        node, count = joint.members[position], len(joint.members)
        op = self.flow.op(node)
        assert isinstance(op, Permute) and isinstance(op.shift, int)
        shift = op.shift % count
        if not shift:
            self._begin((node,))
            return
        self.open_parts[node] = 2
        for sender in sorted({position, (position - shift) % count}):
            receiver = (sender + shift) % count
            if sender in arrived and receiver in arrived:
                self._begin((joint.members[sender], joint.members[receiver]), may_free=True)

    def _chain(self, joint: Joint, op: Broadcast | Reduce, arrived: set[int]) -> None:
        """Schedule the ends of members up to the first hop that lacks a member or follows one that does."""
        node, count = joint.members[0], len(joint.members)
        work = work_of(self.flow.program, op)
        assert isinstance(work, Transfer) and isinstance(op.root, int)
        launch_ps, packet_ps = launch_and_packet_ps(work, lambda one: price(one, self.machine).total_ps)
        ends = self.chain_ends[self.flow.matched.joint_of[node]]
        first = op.root + isinstance(op, Reduce)
        while len(ends) < count - 1:
            hop = len(ends)
            members = (first + hop) % count, (first + hop + 1) % count
            if not arrived.issuperset(members):
                break
            begun_ps = max(self.issued_ps[joint.members[member]] for member in members)
            end_ps = begun_ps + work.packets * packet_ps
            ends.append(max(end_ps, ends[-1] + packet_ps) if ends else end_ps + launch_ps)
            sent = joint.members[members[0]]
            self._push(ends[-1] - self.now_ps, (sent,), sent)
            if hop == count - 2:
                last = joint.members[members[1]]
                self._push(ends[-1] - self.now_ps, (last,), last)

    def _begin(self, nodes: tuple[Node, ...], may_free: bool = False) -> None:
        """Schedule the common end of `nodes`.

        With `may_free` the first one, a sender, ends when the bytes begin to flow if they fit the send buffer.
        """
        first, op = nodes[0], self.flow.op(nodes[0])
        work = work_of(self.flow.program, op)
        cost = self.price(first, work)
        room = self.machine.cluster.send_buffer_bytes if may_free else 0
        if isinstance(work, Transfer) and 0 < work.part_bytes <= room:
            self._push(cost.fixed_ps, nodes[:1], first)
            nodes = nodes[1:]
        self._push(cost.total_ps, nodes, first)

    def price(self, node: Node, work: Work) -> Price:
        """Return the price of the op `node`, (rank, index), which does `work`.

        That of a Send is the price of its message between both ranks, packing at both ends included.
        """
        joint, send = self.flow.joint(node), self.flow.op(node)
        if not isinstance(send, Send):
            return op_price(work, send, node[0], self.machine)
        assert joint is not None
        sender, receiver = joint.members
        recv = self.flow.op(receiver)
        assert isinstance(recv, Recv)
        return message_price(self.flow.program, send, recv, (sender[0], receiver[0]), self.machine)

    def _push(self, after_ps: int, ending: tuple[Node, ...], first: Node) -> None:
        self.num_events += 1
        rank, index = first
        event = (self.now_ps + after_ps, rank, self.flow.op(first).lane, index, self.num_events, ending)
        heapq.heappush(self.events, event)

    def _part_done(self, node: Node) -> None:
        left = self.open_parts[node] = self.open_parts.get(node, 1) - 1
        if left:
            return
        self.ended_ps[node] = self.now_ps
        for issued in self.issuer.finish(node):
            self._issue(issued)


def estimate(program: Program | Dataflow, machine: Machine | Cluster | str | Path) -> Estimate:
    """Return the seconds of a program, in all and by part, without contention: ops share no link and no engine.

    Each op takes the time that it takes on an idle machine. `total_s` is until the last rank ends. The other
    fields are sums over the ops of the lowest rank; a message counts on its sender, and the packing at both of
    its ends as copies.

    Args:
        machine: a machine, or a cluster, its name or file, on which the meshes of the program are laid.

    Raises:
        ProgramError: messages or collectives do not match, or the program deadlocks.
        LayoutError: the machine was made for other meshes, or its network does not carry one.
        UnsupportedError: the machine cannot place a group of ranks, an op reads another rank's memory in place,
            or an op has no price (`cost.price.price`).
    """
    flow = program if isinstance(program, Dataflow) else analyse(program)
    simulator = UncontendedSimulator(flow, Machine.under(machine, flow.program))
    total_s = simulator.run().duration_s
    compute = copy = launch = sync = transfer = 0
    for index in range(len(flow.program.ops_by_rank[flow.program.ranks[0]])):
        op = flow.op((flow.program.ranks[0], index))
        if isinstance(op, Recv):
            continue
        work, node = work_of(flow.program, op), (flow.program.ranks[0], index)
        cost = simulator.price(node, work)
        copy += cost.pack_ps
        if isinstance(work, Transfer):
            launch, sync, transfer = launch + cost.launch_ps, sync + cost.sync_ps, transfer + cost.flow_ps
        elif with_counts(work).flops:
            compute += cost.total_ps
        else:
            copy += cost.total_ps
    return Estimate(total_s, to_s(compute), to_s(copy), to_s(launch), to_s(sync), to_s(transfer))
