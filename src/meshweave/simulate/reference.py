"""The reference simulator: discrete events in plain Python, slow, and the oracle for faster ones.

It follows the same `Issuer` as the executors. An op that is issued first waits for its partners, then for
its launch and synchronisation, then its amount flows: FLOPs through the rank's compute engine, copies
through its memory, bytes through links, max-min fairly where flows meet. Collectives run as priced in
closed form over the links of their ring; lowered programs run step by step. The sending end of a message
that fits the cluster's `send_buffer_bytes` is done when its bytes begin to flow: its lane goes on. Time is in
integer picoseconds and ties are broken by rank, lane and op, so that equal inputs give equal traces.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Hashable

from meshweave.cost.machine import Machine
from meshweave.cost.price import Price, price
from meshweave.ir.dataflow import Dataflow, Issuer, analyse
from meshweave.ir.matching import Joint, Node
from meshweave.ir.ops import Accumulate, Collective, Get, Permute, Put
from meshweave.ir.program import Program
from meshweave.ir.work import Transfer, Work, work_of
from meshweave.simulate.flows import Flow, FlowTable, amount_left
from meshweave.trace import Span, Trace

_STARTS = -1
"""Version of the heap entry that starts a flow; ends carry the flow's version."""


def simulate(program: Program | Dataflow, machine: Machine, *, contention: bool = True) -> Trace:
    """Simulates a program on a machine. A span starts when its op is issued, waiting for partners included.

    Without `contention` each op runs as if it had engines and links to itself, as closed forms assume.
    Raises ProgramError where partners disagree or the program deadlocks, UnsupportedError for a group that
    the machine cannot place.
    """
    flow = analyse(program) if isinstance(program, Program) else program
    return _Simulation(flow, machine, contention).run()


class _Simulation:
    def __init__(self, flow: Dataflow, machine: Machine, contention: bool) -> None:
        self.flow, self.machine, self.contention = flow, machine, contention
        self.issuer = Issuer(flow)
        self.table = FlowTable()
        self.heap: list[tuple[int, int, str, int, int, int, Flow]] = []
        self.now_ps = 0
        self.num_flows = 0
        self.issued_ps: dict[Node, int] = {}
        self.ended_ps: dict[Node, int] = {}
        self.open_parts: dict[Node, int] = {}
        self.arrived: dict[int, set[int]] = defaultdict(set)

    def run(self) -> Trace:
        for node in self.issuer.start():
            self._issue(node)
        while self.heap:
            at_ps, _, _, _, _, version, flow = heapq.heappop(self.heap)
            if version == _STARTS:
                self.now_ps = at_ps
                self._reschedule(self.table.add(flow, at_ps))
                for node in sorted(flow.freed):
                    self._part_done(node)
            elif version == flow.version:
                self.now_ps = at_ps
                self._reschedule(self.table.remove(flow, at_ps))
                for node in flow.nodes:
                    if node not in flow.freed:
                        self._part_done(node)
        if any(node not in self.ended_ps for node in self.flow.nodes()):
            raise self.issuer.stuck()
        return self._trace()

    def _trace(self) -> Trace:
        spans = []
        for node in self.flow.nodes():
            op = self.flow.op(node)
            spans.append(
                Span(
                    *node, op.lane, op.kind, self.flow.label(node), self.issued_ps[node], self.ended_ps[node]
                )
            )
        spans.sort(key=lambda span: (span.start_ps, span.rank, span.lane, span.index))
        return Trace(self.flow.program.name, "simulate", tuple(spans))

    # --- ops ------------------------------------------------------------------------------------------

    def _issue(self, node: Node) -> None:
        self.issued_ps[node] = self.now_ps
        joint = self.flow.joint(node)
        if joint is None:
            self.open_parts[node] = 1
            self._begin((node,), self._work(node), self._own_links(node))
            return
        number = self.flow.matched.joint_of[node]
        arrived = self.arrived[number]
        position = joint.members.index(node)
        arrived.add(position)
        if isinstance(self.flow.op(node), Permute):
            self._permute(joint, position, arrived)
        elif len(arrived) == len(joint.members):
            self._joint(joint)

    def _permute(self, joint: Joint, position: int, arrived: set[int]) -> None:
        """Starts the transfers from and to a member whose other end has been issued as well."""
        node, count = joint.members[position], len(joint.members)
        op = self.flow.op(node)
        assert isinstance(op, Permute) and isinstance(op.shift, int)
        shift = op.shift % count
        self.open_parts[node] = 2 if shift else 1
        if not shift:
            self._begin((node,), self._work(node), self._memory(node))
            return
        for sender in {position, (position - shift) % count}:
            receiver = (sender + shift) % count
            if sender in arrived and receiver in arrived:
                ends = joint.members[sender], joint.members[receiver]
                self._message(ends)

    def _joint(self, joint: Joint) -> None:
        for node in joint.members:
            self.open_parts[node] = 1
        first = joint.members[0]
        op = self.flow.op(first)
        if joint.kind == "message":
            self._message(joint.members)
            return
        work = self._work(first)
        assert isinstance(op, Collective) and isinstance(op.over, tuple) and isinstance(work, Transfer)
        ways = self.machine.ways(work.axis)
        self._begin(joint.members, work, self.machine.ring_links(op.over, ways), ways)

    def _message(self, ends: tuple[Node, ...]) -> None:
        """From the first of two ops to the second. Where a send buffer takes it, the first is done early."""
        sender, receiver = ends
        work = self._work(sender)
        assert isinstance(work, Transfer)
        is_taken = 0 < work.part_bytes <= self.machine.cluster.send_buffer_bytes
        freed = frozenset({sender}) if is_taken else frozenset()
        self._begin(ends, work, self.machine.path(sender[0], receiver[0]), freed=freed)

    def _work(self, node: Node) -> Work:
        return work_of(self.flow.program, self.flow.op(node))

    def _memory(self, node: Node) -> tuple[Hashable, ...]:
        return (("memory", node[0]),)

    def _own_links(self, node: Node) -> tuple[Hashable, ...]:
        """What an op without partners uses: an engine of its rank, or the path of a one-sided transfer."""
        op = self.flow.op(node)
        if isinstance(op, Get):
            assert isinstance(op.src.rank, int)
            return self.machine.path(op.src.rank, node[0])
        if isinstance(op, (Put, Accumulate)):
            assert isinstance(op.out.rank, int)
            return self.machine.path(node[0], op.out.rank)
        return (("compute", node[0]),) if op.kind in ("matmul", "call") else self._memory(node)

    # --- flows ----------------------------------------------------------------------------------------

    def _begin(
        self,
        nodes: tuple[Node, ...],
        work: Work,
        links: tuple[Hashable, ...],
        ways: int = 1,
        freed: frozenset[Node] = frozenset(),
    ) -> None:
        # With contention a message is routed over the links of its path, where it meets the others.
        cost = price(work, self.machine, routed=self.contention)
        if not self.contention or not cost.amount:
            links = ()
        for link in links:
            if link not in self.table.capacity:
                self.table.capacity[link] = self._capacity(link, cost)
        self.num_flows += 1
        flow = Flow(self.num_flows, nodes, links, cost.rate_per_s, amount_left(cost.amount), ways, freed)
        self._push(self.now_ps + cost.fixed_ps, _STARTS, flow)

    def _capacity(self, link: Hashable, cost: Price) -> int:
        assert isinstance(link, tuple)
        if link[0] == "compute":
            return int(self.machine.cluster.chip.effective_flops_per_s)
        if link[0] == "memory":
            return int(self.machine.cluster.chip.memory_bytes_per_s)
        return self.machine.link_rate(link)

    def _push(self, at_ps: int, version: int, flow: Flow) -> None:
        rank, index = flow.nodes[0]
        lane = self.flow.op(flow.nodes[0]).lane
        heapq.heappush(self.heap, (at_ps, rank, lane, index, flow.number, version, flow))

    def _reschedule(self, flows: list[Flow]) -> None:
        for flow in flows:
            self._push(self.table.end_ps(flow), flow.version, flow)

    def _part_done(self, node: Node) -> None:
        self.open_parts[node] -= 1
        if self.open_parts[node]:
            return
        self.ended_ps[node] = self.now_ps
        for issued in self.issuer.finish(node):
            self._issue(issued)
