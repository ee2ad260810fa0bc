"""A program's ops as a graph: which ops form one event, what each op waits for, and the lane it is issued in.

`Dataflow` is the graph, `Issuer` the state machine that every executor and simulator runs on it, and
`untimed_order` one order in which all of it can happen, or the deadlock that prevents it.
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from meshweave.base.errors import ProgramError
from meshweave.ir.analysis.edges import exposed_buffers, local_edges, tracked_edges
from meshweave.ir.analysis.matching import Joint, MatchedProgram, Node, match
from meshweave.ir.program import BoundOp, Lane, Program
from meshweave.ir.program.ops import Op

Event = tuple[Node, ...]
"""Ops that happen together: one op, or all members of a joint."""


@dataclass(frozen=True)
class Dataflow:
    """The ops of a program with everything that orders them.

    A node is an op, as (global rank, index among the ops of that rank). A joint is a collective, or a send with
    its recv: ops of several ranks that take part in one event. A lane is an issue queue of a rank.

    Attributes:
        matched: the ops of every rank, each with its partners.
        predecessors: `predecessors[rank][i]` lists the indices of the ops of the same rank that op i waits for.
        remote_predecessors: for an op that reads or writes memory that ops of any rank write with a release
            (`ir.program.release`), the releasing ops that it waits for.
    """

    matched: MatchedProgram
    predecessors: Mapping[int, tuple[tuple[int, ...], ...]]
    remote_predecessors: Mapping[Node, tuple[Node, ...]]

    @property
    def program(self) -> Program:
        """Return the program that the graph is of."""
        return self.matched.program

    def op(self, node: Node) -> Op:
        """Return the op of a node."""
        return self.matched.op(node)

    def bound_op(self, node: Node) -> BoundOp:
        """Return the op of a node with its position in the program."""
        return self.matched.ops[node[0]][node[1]]

    def label(self, node: Node) -> str:
        """Return the name of a node for messages, such as `matmul 0.3.1`."""
        return self.matched.label(node)

    def joint(self, node: Node) -> Joint | None:
        """Return the collective or message that the node is part of; None for all other ops."""
        number = self.matched.joint_of.get(node)
        return None if number is None else self.matched.joints[number]

    def nodes(self) -> Iterator[Node]:
        """Yield every op as (global rank, index), rank by rank in program order."""
        for rank, ops in self.matched.ops.items():
            for index in range(len(ops)):
                yield rank, index

    def waits_for(self, node: Node) -> tuple[Node, ...]:
        """Return the ops, of any rank, that must be complete before `node` may start.

        The order in which its lane issues ops is a further condition and not listed.
        """
        rank, index = node
        own = tuple((rank, other) for other in self.predecessors[rank][index])
        return own + self.remote_predecessors.get(node, ())

    @cached_property
    def queues(self) -> dict[tuple[int, str], tuple[int, ...]]:
        """Return {(global rank, lane): indices of the rank's ops in that lane, in program order}."""
        queues: dict[tuple[int, str], list[int]] = defaultdict(list)
        for rank, index in self.nodes():
            queues[rank, self.op((rank, index)).lane].append(index)
        return {key: tuple(queue) for key, queue in queues.items()}


def analyse(program: Program) -> Dataflow:
    """Return the dataflow of a program with its includes expanded: partners matched, edges derived.

    Raises:
        ProgramError: partners disagree, or an include does not fit. A deadlock is found by `untimed_order` only.
    """
    return analyse_as_written(Program.given(program).expanded)


def analyse_as_written(program: Program) -> Dataflow:
    """Return the dataflow of a program in which an include is one collective op of its ranks.

    Raises:
        ProgramError: partners disagree.
    """
    matched = match(program)
    exposed = exposed_buffers(program)
    forms = program.resolved_ops.form
    known: dict[tuple[int, ...], tuple[tuple[int, ...], ...]] = {}
    before = {}
    for rank, ops in matched.ops.items():
        form = tuple(forms(bound.op) for bound in ops)
        if form not in known:
            known[form] = local_edges(ops, exposed)
        before[rank] = known[form]
    return Dataflow(matched, before, tracked_edges(matched))


class Issuer:
    """Issues ops as lanes and edges allow; the caller says when an issued op is complete.

    The untimed run, the in-process executor and the reference simulator all drive this state machine. They
    differ only in when they call `finish` or `finish_all`.

    Args:
        hosted: whether each op also waits until the host of its rank, a CPU thread, has issued it. The caller
            reports that as `released` of `finish_all`.
    """

    def __init__(self, flow: Dataflow, *, hosted: bool = False) -> None:
        self.flow = flow
        self._lanes: Mapping[str, Lane] = flow.program.lane_of
        self._pending: dict[Node, int] = {}
        self._followers: dict[Node, list[Node]] = defaultdict(list)
        for node in flow.nodes():
            before = flow.waits_for(node)
            self._pending[node] = len(before) + hosted
            for earlier in before:
                self._followers[earlier].append(node)
        self._waiting = {key: list(queue) for key, queue in flow.queues.items()}
        self._in_flight: dict[tuple[int, str], int] = defaultdict(int)
        self.done: set[Node] = set()
        self.issued: set[Node] = set()

    def start(self) -> list[Node]:
        """Issue all ops that can start at the beginning; return them in order of rank and lane."""
        return [node for key in sorted(self._waiting) for node in self._issue(key)]

    def finish(self, node: Node) -> list[Node]:
        """Mark an issued op as complete, issue all ops that can start now, and return these by rank and lane."""
        return self.finish_all((node,))

    def finish_all(self, nodes: Iterable[Node], released: Iterable[Node] = ()) -> list[Node]:
        """Mark issued ops as complete together, issue all that can start now, and return these by rank and lane.

        No lane issues anything before all of `nodes` are marked, so that their order makes no difference.

        Args:
            released: ops that the hosts of their ranks have issued since the last call; with `hosted` only.
        """
        touched: set[tuple[int, str]] = set()
        for node in released:
            self._pending[node] -= 1
            if not self._pending[node]:
                touched.add((node[0], self.flow.op(node).lane))
        for node in nodes:
            key = node[0], self.flow.op(node).lane
            self.done.add(node)
            self._in_flight[key] -= 1
            touched.add(key)
            for follower in self._followers[node]:
                self._pending[follower] -= 1
                if not self._pending[follower]:
                    touched.add((follower[0], self.flow.op(follower).lane))
        return [node for key in sorted(touched) for node in self._issue(key)]

    def _issue(self, key: tuple[int, str]) -> Iterator[Node]:
        rank, name = key
        lane, queue = self._lanes[name], self._waiting[key]
        position = 0
        while position < len(queue) and self._in_flight[key] < lane.width:
            node = rank, queue[position]
            if self._pending[node]:
                if lane.order == "fifo":
                    return
                position += 1
                continue
            del queue[position]
            self._in_flight[key] += 1
            self.issued.add(node)
            yield node

    def deadlock_error(self) -> ProgramError:
        """Return the error to raise when ops are left and none can complete; its message names the cycle."""
        blocked = next(node for node in self.flow.nodes() if node not in self.done)
        trail: list[Node] = []
        while blocked not in trail:
            trail.append(blocked)
            blocked = self._blocker(blocked)
        cycle = trail[trail.index(blocked) :]
        story = " waits for ".join(f"{self.flow.label(node)} of rank {node[0]}" for node in [*cycle, blocked])
        views = self.flow.op(blocked).accesses()
        buffer = views[0][1].buffer if views else None
        return ProgramError(f"deadlock: {story}", op=self.flow.label(blocked), rank=blocked[0], buffer=buffer)

    def _blocker(self, node: Node) -> Node:
        if node in self.issued:
            joint = self.flow.joint(node)
            assert joint is not None
            return next(member for member in joint.members if member not in self.issued)
        for blocker in self.flow.waits_for(node):
            if blocker not in self.done:
                return blocker
        rank = node[0]
        queue = self.flow.queues[rank, self.flow.op(node).lane]
        left = [(rank, i) for i in queue if (rank, i) not in self.done]
        if self._lanes[self.flow.op(node).lane].order == "fifo":
            return [other for other in left if other < node][-1]
        return next(other for other in left if other in self.issued)


def untimed_order(flow: Dataflow, seed: int | None = None) -> list[Event]:
    """Return the events of a program in an order in which all can happen.

    An event is one op, or all ops of a collective, or a send with its recv: (global rank, index) of each.

    Args:
        seed: None for program order as far as lanes and edges allow, else that of a random legal order.

    Raises:
        ProgramError: there is none, as the program deadlocks; the message tells the cycle of waits.
    """
    issuer = Issuer(flow)
    chooser = None if seed is None else random.Random(seed)
    missing = {number: len(joint.members) for number, joint in enumerate(flow.matched.joints)}
    heap: list[tuple[tuple[float, ...] | tuple[int, ...], int, Event]] = []

    def push(node: Node) -> None:
        number = flow.matched.joint_of.get(node)
        event: Event = (node,)
        if number is not None:
            missing[number] -= 1
            if missing[number]:
                return
            event = flow.matched.joints[number].members
        priority = flow.bound_op(event[0]).key if chooser is None else (chooser.random(),)
        heapq.heappush(heap, (priority, event[0][0], event))

    for node in issuer.start():
        push(node)
    order: list[Event] = []
    while heap:
        event = heapq.heappop(heap)[2]
        order.append(event)
        for node in event:
            for issued in issuer.finish(node):
                push(issued)
    if len(issuer.done) < sum(map(len, flow.matched.ops.values())):
        raise issuer.deadlock_error()
    return order
