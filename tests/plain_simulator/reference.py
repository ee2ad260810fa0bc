"""The reference simulator: discrete events in plain Python, slow, and the oracle for faster ones.

It follows the same `Issuer` as the executors. An op that is issued first waits for its partners, then for its
launch and synchronisation, then its amounts flow: FLOPs through the rank's compute engine, what products and
copies read and write through its memory, messages through the memories of both ends and the links between them,
max-min fairly where flows meet. Collectives run message by message (`steps`), whether they are lowered or not.
The sending end of a message that fits the cluster's `send_buffer_bytes` is done when its bytes begin to flow:
its lane goes on.

Time is in integer picoseconds. Each instant is simulated in rounds. A round applies all events queued for the
instant, marks all completed ops as done together, and issues the ops that this allows. New events of the same
instant form the next round. Rates are computed anew when no event of the instant is left. So results do not depend
on the order of events, and equal inputs give equal traces.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from meshweave.cost.calls import with_counts
from meshweave.cost.compute import engine_amount, tile_traffic
from meshweave.cost.machine import Machine
from meshweave.cost.price import price
from meshweave.estimate.uncontended import TraceRecorder, UncontendedSimulator
from meshweave.ir.analysis.dataflow import Dataflow, analyse
from meshweave.ir.analysis.matching import Joint, Node
from meshweave.ir.program import Program
from meshweave.ir.program.ops import Accumulate, Get, Permute, Put
from meshweave.ir.work import Compute, ring_hops, work_of
from meshweave.trace import Trace
from plain_simulator.flows import Flow, FlowTable, Resource, amount_left
from plain_simulator.issue import is_joined, issue_ps
from plain_simulator.steps import Message, MessageSchedule, message_schedules

Action = Callable[[], None]
Demand = tuple[int, int, Mapping[Resource, int]]
"""(amount, cap, weight on each resource)."""


def simulate(program: Program | Dataflow, machine: Machine, *, contention: bool = True) -> Trace:
    """Return the trace of a program on a machine, in which a span starts when its op is issued.

    Without `contention` each op takes the time of its closed form and shares no engine or link. All members of a
    collective then start together.

    Raises:
        ProgramError: partners disagree, or the program deadlocks.
        UnsupportedError: the machine cannot place a group.
    """
    flow = analyse(program) if isinstance(program, Program) else program
    return (
        _ContendedSimulator(flow, machine).run() if contention else UncontendedSimulator(flow, machine).run()
    )


class _ContendedSimulator(TraceRecorder):
    def __init__(self, flow: Dataflow, machine: Machine) -> None:
        super().__init__(flow, hosted=machine.cluster.host is not None)
        self.machine = machine
        self.released: list[Node] = []
        self.table = FlowTable(self._rate_of)
        self.events: list[tuple[int, int, Action]] = []
        self.num_events = 0
        self.open_parts: dict[Node, int] = {}
        self.complete: list[Node] = []
        self.steps: dict[int, tuple[MessageSchedule, ...]] = {}
        self.num_there: Counter[int] = Counter()

    def run(self) -> Trace:
        for node in self.issuer.start():
            self._issue(node)
        for rank, ops in self.flow.matched.ops.items():
            if ops:
                self._host_issues((rank, 0))
        while self.events:
            self.now_ps = self.events[0][0]
            while self.events and self.events[0][0] == self.now_ps:
                self._round()
            for flow in self.table.share(self.now_ps):
                self._schedule(self.table.end_ps(flow), partial(self._end_flow, flow, flow.version))
        return self.trace()

    def _round(self) -> None:
        actions = []
        while self.events and self.events[0][0] == self.now_ps:
            actions.append(heapq.heappop(self.events)[2])
        for action in actions:
            action()
        complete, self.complete = self.complete, []
        released, self.released = self.released, []
        self.ended_ps.update(dict.fromkeys(complete, self.now_ps))
        for node in self.issuer.finish_all(complete, released):
            self._issue(node)
        for node in complete:
            if self._host_waits_for(node):
                self._host_issues((node[0], node[1] + 1))

    def _schedule(self, at_ps: int, action: Action) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (at_ps, self.num_events, action))

    # --- hosts ----------------------------------------------------------------------------------------

    def _host_issues(self, node: Node) -> None:
        """Let the host of a rank begin to issue an op, the next one of its program, where there is one."""
        host = self.machine.cluster.host
        if host is None or node[1] == len(self.flow.matched.ops[node[0]]):
            return
        at_ps = self.now_ps + issue_ps(self.flow.program, self.flow.op(node), host)
        self._schedule(at_ps, partial(self._end_issue, node))

    def _end_issue(self, node: Node) -> None:
        self.released.append(node)
        if not self._host_waits_for(node):
            self._host_issues((node[0], node[1] + 1))

    def _host_waits_for(self, node: Node) -> bool:
        host = self.machine.cluster.host
        return host is not None and host.waits and is_joined(self.flow.op(node))

    def _part_done(self, node: Node) -> None:
        self.open_parts[node] -= 1
        if not self.open_parts[node]:
            self.complete.append(node)

    # --- flows ----------------------------------------------------------------------------------------

    def _start_flow(self, demand: Demand, ended: Action) -> None:
        """Start a flow, or call `ended` at once if its amount is 0."""
        amount, cap, uses = demand
        if amount:
            self.table.start(Flow(uses, cap, amount_left(amount), ended))
        else:
            ended()

    def _end_flow(self, flow: Flow, version: int) -> None:
        if version == flow.version:
            self.table.end(flow)
            flow.on_end()

    def _rate_of(self, resource: Resource) -> int:
        assert isinstance(resource, tuple)
        chip = self.machine.cluster.chip
        if resource[0] == "compute":
            return int(chip.effective_flops_per_s)
        if resource[0] == "memory":
            return int(chip.memory_bytes_per_s)
        return self.machine.weighted_link_rate(resource)

    # --- ops ------------------------------------------------------------------------------------------

    def _issue(self, node: Node) -> None:
        self.issued_ps[node] = self.now_ps
        joint, op = self.flow.joint(node), self.flow.op(node)
        if joint is None or (isinstance(op, Permute) and not ring_hops(op)):
            self.open_parts[node] = 1
            self._start_without_partners(node)
            return
        number = self.flow.matched.joint_of[node]
        if number not in self.steps:
            self.steps[number] = message_schedules(self.flow, joint, self.machine)
        self.num_there[number] += 1
        self.open_parts[node] = max(len(self.steps[number]), 1)
        for steps in self.steps[number]:
            self._schedule_messages(joint, steps, steps.join(joint.members.index(node)))
        if not self.steps[number] and self.num_there[number] == len(joint.members):
            cost = price(work_of(self.flow.program, op), self.machine)
            self._schedule(self.now_ps + cost.total_ps, partial(self._end_meeting, joint))

    def _end_meeting(self, joint: Joint) -> None:
        for node in joint.members:
            self._part_done(node)

    def _start_without_partners(self, node: Node) -> None:
        """Start an op without partners: the stages of a computation, or a one-sided transfer."""
        op = self.flow.op(node)
        work = work_of(self.flow.program, op)
        cost = price(work, self.machine)
        fixed_ps = cost.fixed_ps
        if isinstance(work, Compute):
            stages = self._stages(node[0], work)
        else:
            assert isinstance(op, (Get, Put, Accumulate))
            owner = op.src.rank if isinstance(op, Get) else op.out.rank
            assert owner is None or isinstance(owner, int)
            remote = node[0] if owner is None else owner
            ends = (remote, node[0]) if isinstance(op, Get) else (node[0], remote)
            adds = isinstance(op, Accumulate)
            uses = self._message_uses(*ends, adds=adds)
            rate = cost.rate_per_s
            if remote != node[0]:
                known = self.machine.one_sided_constants(*ends, adds=adds)
                rate, fixed_ps = known.rate, known.fixed_ps
                if known.flops_per_byte:
                    uses["compute", node[0]] += known.flops_per_byte
            stages = [[(cost.amount, rate, uses)]]
        self._schedule(self.now_ps + fixed_ps, partial(self._start_stage, node, stages))

    def _stages(self, rank: int, work: Compute) -> list[list[Demand]]:
        """Return the concurrent flows of each stage: fill, product and drain.

        The memory traffic of a product is capped at the pace of its FLOPs.
        """
        chip = self.machine.cluster.chip
        flops_per_s, bytes_per_s = int(chip.effective_flops_per_s), int(chip.memory_bytes_per_s)
        work = with_counts(work)
        memory: dict[Resource, int] = {("memory", rank): 1}
        engine: dict[Resource, int] = {("compute", rank): 1}
        if not work.flops:
            return [[(work.bytes, bytes_per_s, memory)]]
        tiles = tile_traffic(work, chip)
        flops = engine_amount(work, chip)
        pace = max(min(bytes_per_s, -(-tiles.stream_bytes * flops_per_s // flops)), 1)
        product: list[Demand] = [(flops, flops_per_s, engine)]
        product += [(tiles.stream_bytes, pace, memory)] if tiles.stream_bytes else []
        fill: list[Demand] = [(tiles.fill_bytes, bytes_per_s, memory)]
        drain: list[Demand] = [(tiles.drain_bytes, bytes_per_s, memory)]
        return [stage for stage in (fill, product, drain) if stage[0][0]]

    def _start_stage(self, node: Node, stages: Sequence[Sequence[Demand]]) -> None:
        """Start the first stage; each later stage starts in a new round when the one before has ended."""
        left = len(stages[0])

        def ended() -> None:
            nonlocal left
            left -= 1
            if left:
                return
            if len(stages) > 1:
                self._schedule(self.now_ps, partial(self._start_stage, node, stages[1:]))
            else:
                self._part_done(node)

        for demand in stages[0]:
            self._start_flow(demand, ended)

    # --- messages -------------------------------------------------------------------------------------

    def _schedule_messages(self, joint: Joint, steps: MessageSchedule, messages: Sequence[Message]) -> None:
        for message in messages:
            self._schedule(self.now_ps + message.delay_ps, partial(self._send, joint, steps, message))

    def _send(self, joint: Joint, steps: MessageSchedule, message: Message) -> None:
        ranks = joint.members[message.sender][0], joint.members[message.receiver][0]
        uses = self._message_uses(*ranks, message.adds, message.route)
        ends = [message.sender, message.receiver]
        if message.buffered and 0 < message.amount <= self.machine.cluster.send_buffer_bytes:
            self._end_message(joint, steps, message, ends[:1])
            del ends[0]
        self._start_flow(
            (message.amount, message.cap, uses), partial(self._end_message, joint, steps, message, ends)
        )

    def _end_message(
        self, joint: Joint, steps: MessageSchedule, message: Message, ends: Sequence[int]
    ) -> None:
        """Record that a message has ended for some of its members, `ends`."""
        for member in ends:
            self._schedule_messages(joint, steps, steps.end_message(message, member))
            if steps.is_done(member):
                self._part_done(joint.members[member])

    def _message_uses(self, sender: int, receiver: int, adds: bool, route: int = 0) -> Counter[Resource]:
        """Return the resources of a message: links, a read of memory at the sender, a write at the receiver.

        An addition reads the receiver's memory as well.
        """
        links = self.machine.path(sender, receiver, route)
        uses: Counter[Resource] = Counter({link: self.machine.link_weight(link, route) for link in links})
        uses["memory", sender] += 1
        uses["memory", receiver] += 2 if adds and sender != receiver else 1
        return uses
