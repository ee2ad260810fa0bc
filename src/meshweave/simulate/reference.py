"""The reference simulator: discrete events in plain Python, slow, and the oracle for faster ones.

It follows the same `Issuer` as the executors. An op that is issued first waits for its partners, then for its
launch and synchronisation, then its amounts flow: FLOPs through the rank's compute engine, what products and
copies read and write through its memory, messages through the memories of both ends and the links between them,
max-min fairly where flows meet. Collectives run message by message (`steps`), whether they are lowered or not.
The sending end of a message that fits the cluster's `send_buffer_bytes` is done when its bytes begin to flow:
its lane goes on.

Time is in integer picoseconds. All that happens at one instant is taken in rounds: a round applies every event
that there is, then marks all ops that are complete as done together, then issues what that allows; what this
brings about at the same instant is the next round. Rates are shared anew once no event of the instant is left.
So nothing depends on the order of events, and equal inputs give equal traces.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from meshweave.cost.compute import tile_traffic
from meshweave.cost.machine import Machine
from meshweave.cost.price import price
from meshweave.estimate.recorder import TraceRecorder
from meshweave.estimate.uncontended import UncontendedSimulator
from meshweave.ir.analysis.dataflow import Dataflow, analyse
from meshweave.ir.analysis.matching import Joint, Node
from meshweave.ir.program import Program
from meshweave.ir.program.ops import Accumulate, Get, Permute, Put
from meshweave.ir.work import Compute, ring_hops, work_of
from meshweave.simulate.flows import Flow, FlowTable, Resource, amount_left
from meshweave.simulate.steps import Message, MessageSchedule, message_schedules
from meshweave.trace import Trace

Action = Callable[[], None]
Demand = tuple[int, int, Mapping[Resource, int]]
"""(amount, cap, weight on each resource)."""


def simulate(program: Program | Dataflow, machine: Machine, *, contention: bool = True) -> Trace:
    """Return the trace of a program on a machine, in which a span starts when its op is issued.

    Without `contention` each op takes its closed form, as if it had engines and links to itself, and all members
    of a collective start together.

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
        super().__init__(flow)
        self.machine = machine
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
        while self.events:
            self.now_ps = self.events[0][0]
            while self.events and self.events[0][0] == self.now_ps:
                self._round()
            for flow in self.table.share(self.now_ps):
                self._at(self.table.end_ps(flow), partial(self._end, flow, flow.version))
        return self.trace()

    def _round(self) -> None:
        actions = []
        while self.events and self.events[0][0] == self.now_ps:
            actions.append(heapq.heappop(self.events)[2])
        for action in actions:
            action()
        complete, self.complete = self.complete, []
        self.ended_ps.update(dict.fromkeys(complete, self.now_ps))
        for node in self.issuer.finish_all(complete):
            self._issue(node)

    def _at(self, at_ps: int, action: Action) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (at_ps, self.num_events, action))

    def _part_done(self, node: Node) -> None:
        self.open_parts[node] -= 1
        if not self.open_parts[node]:
            self.complete.append(node)

    # --- flows ----------------------------------------------------------------------------------------

    def _start(self, demand: Demand, ended: Action) -> None:
        """A flow; one of nothing is over at once."""
        amount, cap, uses = demand
        if amount:
            self.table.start(Flow(uses, cap, amount_left(amount), ended))
        else:
            ended()

    def _end(self, flow: Flow, version: int) -> None:
        if version == flow.version:
            self.table.end(flow)
            flow.ended()

    def _rate_of(self, resource: Resource) -> int:
        assert isinstance(resource, tuple)
        chip = self.machine.cluster.chip
        if resource[0] == "compute":
            return int(chip.effective_flops_per_s)
        if resource[0] == "memory":
            return int(chip.memory_bytes_per_s)
        return self.machine.link_rate(resource)

    # --- ops ------------------------------------------------------------------------------------------

    def _issue(self, node: Node) -> None:
        self.issued_ps[node] = self.now_ps
        joint, op = self.flow.joint(node), self.flow.op(node)
        if joint is None or (isinstance(op, Permute) and not ring_hops(op)):
            self.open_parts[node] = 1
            self._alone(node)
            return
        number = self.flow.matched.joint_of[node]
        if number not in self.steps:
            self.steps[number] = message_schedules(self.flow, joint, self.machine)
        self.num_there[number] += 1
        self.open_parts[node] = max(len(self.steps[number]), 1)
        for steps in self.steps[number]:
            self._begin(joint, steps, steps.join(joint.members.index(node)))
        if not self.steps[number] and self.num_there[number] == len(joint.members):
            cost = price(work_of(self.flow.program, op), self.machine)
            self._at(self.now_ps + cost.fixed_ps, partial(self._meet, joint))

    def _meet(self, joint: Joint) -> None:
        for node in joint.members:
            self._part_done(node)

    def _alone(self, node: Node) -> None:
        """Starts an op without partners: the stages of arithmetic, or a one-sided transfer."""
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
        self._at(self.now_ps + fixed_ps, partial(self._stage, node, stages))

    def _stages(self, rank: int, work: Compute) -> list[list[Demand]]:
        """Flows that run at once, stage by stage. What streams through memory keeps pace with the FLOPs."""
        chip = self.machine.cluster.chip
        flops_per_s, bytes_per_s = int(chip.effective_flops_per_s), int(chip.memory_bytes_per_s)
        memory: dict[Resource, int] = {("memory", rank): 1}
        engine: dict[Resource, int] = {("compute", rank): 1}
        if not work.flops:
            return [[(work.bytes, bytes_per_s, memory)]]
        tiles = tile_traffic(work, chip)
        pace = max(min(bytes_per_s, -(-tiles.stream_bytes * flops_per_s // work.flops)), 1)
        product: list[Demand] = [(work.flops, flops_per_s, engine)]
        product += [(tiles.stream_bytes, pace, memory)] if tiles.stream_bytes else []
        fill: list[Demand] = [(tiles.fill_bytes, bytes_per_s, memory)]
        drain: list[Demand] = [(tiles.drain_bytes, bytes_per_s, memory)]
        return [stage for stage in (fill, product, drain) if stage[0][0]]

    def _stage(self, node: Node, stages: Sequence[Sequence[Demand]]) -> None:
        """Starts the first of some stages; the others follow, each in a round of its own."""
        left = len(stages[0])

        def ended() -> None:
            nonlocal left
            left -= 1
            if left:
                return
            if len(stages) > 1:
                self._at(self.now_ps, partial(self._stage, node, stages[1:]))
            else:
                self._part_done(node)

        for demand in stages[0]:
            self._start(demand, ended)

    # --- messages -------------------------------------------------------------------------------------

    def _begin(self, joint: Joint, steps: MessageSchedule, messages: Sequence[Message]) -> None:
        for message in messages:
            self._at(self.now_ps + message.delay_ps, partial(self._send, joint, steps, message))

    def _send(self, joint: Joint, steps: MessageSchedule, message: Message) -> None:
        ranks = joint.members[message.sender][0], joint.members[message.receiver][0]
        uses = self._message_uses(*ranks, message.adds, message.back)
        ends = [message.sender, message.receiver]
        if message.buffered and 0 < message.amount <= self.machine.cluster.send_buffer_bytes:
            self._over(joint, steps, message, ends[:1])
            del ends[0]
        self._start((message.amount, message.cap, uses), partial(self._over, joint, steps, message, ends))

    def _over(self, joint: Joint, steps: MessageSchedule, message: Message, ends: Sequence[int]) -> None:
        """A message is over for some of its ends."""
        for member in ends:
            self._begin(joint, steps, steps.end_message(message, member))
            if steps.is_done(member):
                self._part_done(joint.members[member])

    def _message_uses(self, sender: int, receiver: int, adds: bool, back: bool = False) -> Counter[Resource]:
        """A message is read at one end and written at the other, where adding reads as well."""
        uses: Counter[Resource] = Counter(self.machine.path(sender, receiver, back=back))
        uses["memory", sender] += 1
        uses["memory", receiver] += 2 if adds and sender != receiver else 1
        return uses
