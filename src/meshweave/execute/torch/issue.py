"""How the actions of a rank are issued: a thread per lane, or one thread in one order that all ranks share."""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Mapping, Sequence

from meshweave.base.errors import BindError
from meshweave.execute.torch.analysis import RankAnalysis
from meshweave.execute.torch.context import TorchContext
from meshweave.execute.torch.lanes import EarlyPost, LaneRun, cross_lane_waits
from meshweave.execute.torch.streams import Streams
from meshweave.execute.torch.views import Action, steps_of
from meshweave.execute.torch.wire import GroupEntry, GuardedCollective, MessageExchange
from meshweave.ir.program import BoundOp
from meshweave.ir.program.ops import COMPUTE_KINDS, Call, Recv

Execute = Callable[[], Mapping[int, tuple[int, int]]]
"""Runs a rank's part of a program once, and returns the start and end of each op in nanoseconds, if traced."""


def _lanes(ops: Sequence[BoundOp]) -> list[str]:
    """Return the lanes that a rank uses, that with most calls first, or where equal with most compute ops.

    The calling thread runs the first: functions of calls find there what a caller has set for its thread alone.
    """
    num_local: dict[str, tuple[int, int]] = {}
    for bound in ops:
        calls, local = num_local.get(bound.op.lane, (0, 0))
        is_call, is_local = isinstance(bound.op, Call), bound.op.kind in COMPUTE_KINDS
        num_local[bound.op.lane] = calls + is_call, local + is_local
    return sorted(num_local, key=num_local.__getitem__, reverse=True)


def has_one_order(analysis: RankAnalysis) -> bool:
    """Return whether each op of a rank waits for the op before it, so that no two ops ever run at once."""
    ops, edges = analysis.ops, analysis.edges
    return all(ops[at].op.lane == ops[at - 1].op.lane or at - 1 in edges[at] for at in range(1, len(ops)))


def thread_per_lane(
    context: TorchContext,
    analysis: RankAnalysis,
    actions: Sequence[Action],
    trace: bool,
    shared: Container[str],
) -> Execute:
    """Return a function that runs `actions[i]` for each op i of the rank: a thread per lane, in program order.

    The calling thread runs the lane with most `call` ops, or with most compute ops where lanes have equally many
    `call` ops. Where ops can only run one after another it runs them all: a handover between threads takes longer
    than a small op. With `trace`, or where the context has a recorder, the function returns {op index: (start,
    end) in nanoseconds of CLOCK_MONOTONIC}, else {}. Buffers named in `shared` lie in memory that other ranks use,
    or ops of other buffers: nothing is received there before its op.
    """
    ops = analysis.ops
    names = _lanes(ops)
    lane_of = [names.index(bound.op.lane) for bound in ops]
    if ops and has_one_order(analysis):
        names, lane_of = names[:1], [0] * len(ops)
    lanes = [LaneRun() for _ in names]
    for index, needed in enumerate(cross_lane_waits(lane_of, analysis.edges, len(lanes))):
        lane = lanes[lane_of[index]]
        lane.actions.append(actions[index])
        lane.waits.append(tuple((lanes[other], count) for other, count in needed))
        lane.labels.append(f"{ops[index].label} of lane {ops[index].op.lane}")
        lane.indices.append(index)
    _post_receives_early(analysis, actions, lanes, shared)
    return LaneExecution(context, lanes, trace)


class LaneExecution:
    """Runs the lanes of a rank, each in a thread of its own. A lane's steps run in program order.

    Attributes:
        sends_messages: whether the rank sends or receives messages, other than in torch's collectives.
    """

    def __init__(self, context: TorchContext, lanes: Sequence[LaneRun], trace: bool) -> None:
        self._context, self._lanes, self._is_traced = context, lanes, trace
        steps = [each for lane in lanes for action in lane.actions for each in steps_of(action)]
        waits = [at for at, step in enumerate(steps) if isinstance(step, GuardedCollective)]
        self.sends_messages = any(isinstance(step, MessageExchange | GroupEntry) for step in steps)
        self._halves: tuple[Sequence[Action], GuardedCollective, Sequence[Action]] | None = None
        if len(lanes) == len(waits) == 1 and not self.sends_messages and not trace:
            (at,) = waits
            collective = steps[at]
            assert isinstance(collective, GuardedCollective)
            self._halves = steps[:at], collective, steps[at + 1 :]

    def __call__(self) -> Mapping[int, tuple[int, int]]:
        """Run all lanes; return {op index: (start, end) in nanoseconds of CLOCK_MONOTONIC} if traced, else {}."""
        lanes, is_traced = self._lanes, self._is_traced or self._context.recorder is not None
        if lanes:
            self._context.lane_threads.run(lanes, trace=is_traced)
        if not is_traced:
            return {}
        return {index: span for lane in lanes for index, span in zip(lane.indices, lane.spans, strict=True)}

    @property
    def has_halves(self) -> bool:
        """Return whether `begin` can be called: the rank has one lane with one torch collective, no messages and
        no timing.
        """
        return self._halves is not None and self._context.recorder is None and self._context.waits is None

    def begin(self) -> Callable[[], None]:
        """Run the steps before the one collective, post it, and return a function that waits and runs the rest.

        Call it only where `has_halves`. This and the returned function run in the calling thread, and raise
        UnsupportedError where an earlier run in the context failed or another is under way, RankLostError where
        ranks are known to be lost.
        """
        assert self._halves is not None
        before, collective, after = self._halves
        reserve = self._context.lane_threads.reserve
        with reserve():
            for step in before:
                step()
            collective.post()

        def finish() -> None:
            with reserve():
                collective()
                for step in after:
                    step()

        return finish


def _post_receives_early(
    analysis: RankAnalysis, actions: Sequence[Action], lanes: Sequence[LaneRun], shared: Container[str]
) -> None:
    """Let a lane that waits in a message exchange post the receives of its next exchange, if their memory is free.

    Receives between two ranks match in the order in which they are posted. So a lane posts no further ahead, and
    not past another kind of communication. Nothing is posted into `shared` buffers: other ranks may still read
    them until the next fence, or ops of this rank do so under another name.
    """
    ops, before = analysis.ops, analysis.write_edges
    place = {index: (lane, at) for lane in lanes for at, index in enumerate(lane.indices, 1)}
    for lane in lanes:
        previous: MessageExchange | None = None
        for index in lane.indices:
            if ops[index].op.kind in COMPUTE_KINDS:
                continue
            action = actions[index]
            steps = steps_of(action)
            exchange = next((step for step in steps if isinstance(step, MessageExchange)), None)
            # What follows it takes the data out of staging, which the next op may not fill yet; messages
            # have two to fill in turns.
            staged = exchange is not None and exchange is not steps[-1]
            early = exchange is not None and exchange.receives
            if staged and not isinstance(ops[index].op, Recv):
                early = False
            if any(view.buffer in shared for view in ops[index].op.writes):
                early = False
            if previous is not None and exchange is not None and early:
                needed = dict(sorted((place[other] for other in before[index]), key=operator.itemgetter(1)))
                previous.while_waiting(EarlyPost(tuple(needed.items()), exchange.post_receives).run_if_free)
            previous = exchange


def one_order(
    context: TorchContext,
    analysis: RankAnalysis,
    actions: Sequence[Action],
    order: Sequence[int],
    trace: bool,
) -> Execute:
    """Return a function that issues all `actions`, one per op, from the calling thread in `order` (op indices).

    With `trace` that function returns {op index: (start, end) in nanoseconds of CLOCK_MONOTONIC}, else {}. Raises
    BindError where `order` does not list each op once, or lists an op before one that it must wait for.
    """
    ops, before = analysis.ops, analysis.edges
    if sorted(order) != list(range(len(ops))):
        raise BindError(f"the order must list each of the {len(ops)} ops once")
    place = {index: at for at, index in enumerate(order)}
    for index, earlier in enumerate(before):
        for other in earlier:
            if place[other] > place[index]:
                raise BindError(
                    f"the order has {ops[index].label} before {ops[other].label}, which it must wait for"
                )
    names = _lanes(ops)
    lane_of = [names.index(ops[index].op.lane) for index in order]
    issued = [sorted(place[other] for other in before[index]) for index in order]
    waits = cross_lane_waits(lane_of, issued, len(names))
    labels = [ops[index].label for index in order]
    streams = Streams(
        context.device, [actions[index] for index in order], labels, lane_of, waits, trace=trace
    )
    lane_threads = context.lane_threads

    def execute() -> Mapping[int, tuple[int, int]]:
        with lane_threads.reserve():
            return dict(zip(order, streams.run(), strict=bool(trace)))

    return execute
