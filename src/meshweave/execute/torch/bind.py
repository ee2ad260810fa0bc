"""A program on tensors of one rank, over `torch.distributed`: bound once, run many times.

Binding instantiates the ops of this rank alone, derives its local edges, allocates scratch and staging, makes
every view a tensor and every op a closure. What is left for a run is to walk lists of closures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from meshweave.base.errors import BindError, ProgramError, did_you_mean
from meshweave.execute.calls import Calls, CallTable
from meshweave.execute.memory.base import RemoteMemory
from meshweave.execute.torch.analysis import RankAnalysis
from meshweave.execute.torch.comm import bind_communication
from meshweave.execute.torch.compute import Binder
from meshweave.execute.torch.context import TorchContext
from meshweave.execute.torch.lanes import EarlyPost, LaneRun, Streams, cross_lane_waits
from meshweave.execute.torch.one_sided import OneSidedAccess
from meshweave.execute.torch.views import Action, ActionSequence, Staging, empty_in_order
from meshweave.execute.torch.wire import MessageExchange, Wire
from meshweave.ir.analysis.dataflow import analyse, untimed_order
from meshweave.ir.program import BoundOp, Lane, Program
from meshweave.ir.program.ops import COMPUTE_KINDS, Recv
from meshweave.lower.linearise import linearise
from meshweave.trace import Span, Trace

Mode = Literal["threads", "linear"]


def torch_dtype(dtype: str) -> torch.dtype:
    """Return the torch dtype that a program calls `dtype`."""
    resolved = getattr(torch, dtype)
    assert isinstance(resolved, torch.dtype)
    return resolved


class BoundProgram:
    """A program bound to the memory of one rank; made by `bind`.

    `inputs` and `outputs` are the tensors of the rank's input and output buffers, by buffer name. They stay
    the same from run to run: read results before the next run, or copy them. To give new input without a
    copy, write into `inputs`.
    """

    def __init__(
        self,
        analysis: RankAnalysis,
        context: TorchContext,
        memory: _Buffers,
        execute: Callable[[], Mapping[int, tuple[int, int]]],
        trace: bool,
    ) -> None:
        self.program, self.rank, self.context = analysis.program, analysis.rank, context
        self._unset, self._execute, self._is_traced = memory.unset, execute, trace
        self._ops = [(bound.op.lane, bound.op.kind, bound.label) for bound in analysis.ops] if trace else []
        buffers = analysis.buffers
        visible = {name: memory.given.get(name, memory.slots[name, 0]) for name in buffers}
        self.inputs = {name: visible[name] for name, b in buffers.items() if b.kind == "input"}
        self.outputs = {name: visible[name] for name, b in buffers.items() if b.kind == "output"}
        self._copies_in = [
            (memory.slots[name, slot], value)
            for name, value in self.inputs.items()
            for slot in range(buffers[name].slots)
            if memory.slots[name, slot] is not value
        ]
        self._copies_out = [
            (value, memory.slots[name, 0])
            for name, value in self.outputs.items()
            if memory.slots[name, 0] is not value
        ]

    def run(self, inputs: Mapping[str, Tensor] | None = None) -> Trace | None:
        """Run this rank's part of the program; all its ranks run it together.

        Args:
            inputs: new values by buffer name, copied into the bound tensors first.

        Returns:
            The spans of this rank if bound with `trace`. Their times are those of CLOCK_MONOTONIC, which the
            processes of a host share.

        Raises:
            BindError: an input never got a value, or a new value does not fit.
            RankLostError, DeadlineError: other ranks are missing or late, see `TorchContext`.
            UnsupportedError: an earlier run in this context failed, or another is under way.

        What a call raises comes out as it is, with a note that says where. After any failure ranks are out
        of step, and the context is of no further use.
        """
        with torch.no_grad():
            for name, value in (inputs or {}).items():
                self._load(name, value)
            if self._unset:
                raise BindError(
                    f"input buffer {min(self._unset)} of program {self.program.name} has no value"
                )
            for slot, value in self._copies_in:
                slot.copy_(value)
            spans = self._execute()
            for value, slot in self._copies_out:
                value.copy_(slot)
        return self._trace(spans) if self._is_traced else None

    def _load(self, name: str, value: Tensor) -> None:
        if name not in self.inputs:
            raise BindError(
                f"program {self.program.name} has no input buffer '{name}'{did_you_mean(name, self.inputs)}"
            )
        target = self.inputs[name]
        if value is not target:
            _check(name, value, tuple(target.shape), target.dtype)
            target.copy_(value)
        self._unset.discard(name)

    def _trace(self, spans: Mapping[int, tuple[int, int]]) -> Trace:
        listed: list[Span] = []
        for index, (lane, kind, label) in enumerate(self._ops):
            start_ns, end_ns = spans[index]
            listed.append(Span(self.rank, index, lane, kind, label, start_ns * 1000, end_ns * 1000))
        return Trace(self.program.name, "torch", tuple(listed))


def bind(
    program: Program,
    rank: int,
    tensors: Mapping[str, Tensor],
    *,
    context: TorchContext | None = None,
    calls: Calls | None = None,
    mode: Mode | None = None,
    order: Sequence[int] | None = None,
    trace: bool = False,
    memory: RemoteMemory | None = None,
) -> BoundProgram:
    """Bind the ops of one rank to its tensors, ready to run. All ranks of the program must call it.

    Ranks bind their programs in the same order; see `TorchContext`.

    Mode "threads" (the default on a CPU) runs each lane in a thread of its own, in program order one op at a
    time, also where the lane is declared wider or ready-first. Mode "linear" (the default on CUDA) issues all
    ops from the calling thread in `order`, with a stream and a communicator per lane on CUDA. NCCL needs an
    order that all ranks share and in which no op waits for a later one: by default that of `lower.linearise`.
    The CUDA path follows NCCL's rules but its tests need several GPUs, and none of this project's own runs
    has exercised it.

    Args:
        rank: the global rank, that of this process.
        context: by default that of the tensors' device in the default process group.
        tensors: by buffer name, local shards of input buffers and, if wanted, memory for output buffers. They
            are aliased, not copied. Inputs left out get their value in the first `run`. Outputs left out are
            allocated. A tensor with the memory order of the buffer's `order` needs least staging.
        calls: the functions that `call` ops name; see `execute.calls`. Their results are copied to `outs`.
        order: op indices, for mode "linear", the same sequence of communication on all ranks. None is the order
            of `lower.linearise`; with `memory` program order, which fences make the same.
        trace: let `run` return a Trace.
        memory: holds the buffers that other ranks read and write, for a program with one-sided ops. All ranks
            then check that they bind the same program. Given tensors inside this memory are aliased. Other tensors
            of such buffers are copied into it before each run, and out of it afterwards.

    Raises:
        BindError: tensors, calls, ranks or order do not fit the program; with `memory`, ranks bind different ones.
        UnsupportedError: the program has one-sided ops and there is no `memory` (give one, or lower them first).
    """
    program = program.expanded
    if context is None:
        context = TorchContext.default(next((tensor.device for tensor in tensors.values()), "cpu"))
    mode = _checked_mode(program, rank, context, mode, order)
    analysis = RankAnalysis(program, rank, memory is not None, context.shares_groups)
    ops = analysis.ops
    _check_tensors(analysis, tensors, context.device)
    _check_serial(program)
    remote = (
        OneSidedAccess(memory, context, analysis, tensors)
        if memory is not None and analysis.exposed
        else None
    )
    buffers = _allocate(analysis, tensors, context.device, remote.own if remote else {})
    matched = analysis.matched_program
    context.prepare(matched, analysis.channels)
    aliased = remote.view if remote and memory is not None and memory.is_aliased else None
    binder = Binder(rank, buffers.slots, Staging(context.device), CallTable(calls or {}, program), aliased)
    wire = Wire(context, binder, matched, analysis.wire_orders, analysis.channels)

    actions = _bind_ops(ops, binder, wire, remote)
    if mode == "linear":
        if order is None:
            order = range(len(ops)) if remote else linearise(program)[rank]
        execute = _linear(context, analysis, actions, order, trace)
    else:
        execute = _threads(context, analysis, actions, trace)
    execute = remote.between_fences(execute) if remote else execute
    return BoundProgram(analysis, context, buffers, execute, trace)


def _bind_ops(
    ops: Sequence[BoundOp], binder: Binder, wire: Wire, remote: OneSidedAccess | None
) -> list[Action]:
    """Return the action of each op: local, communication that other ranks match, or one-sided."""

    def local_or_matched(bound: BoundOp) -> Action:
        return binder.local(bound) if bound.op.kind in COMPUTE_KINDS else bind_communication(wire, bound)

    if remote is None:
        return [local_or_matched(bound) for bound in ops]
    remote.set_binder(binder)
    return [remote.bind(index, bound, local_or_matched) for index, bound in enumerate(ops)]


def _checked_mode(
    program: Program, rank: int, context: TorchContext, mode: Mode | None, order: Sequence[int] | None
) -> Mode:
    """Return the mode to bind for. Raises what `bind` does where rank, context, mode and order do not fit."""
    context.lane_threads.check()
    if rank not in program.ranks:
        raise BindError(f"program {program.name} has no rank {rank}")
    if context.rank not in (None, rank):
        raise BindError(f"cannot bind rank {rank} in the process of rank {context.rank}")
    mode = mode or ("linear" if context.device.type == "cuda" else "threads")
    if mode == "threads" and context.device.type != "cpu":
        raise BindError(f"mode 'threads' is for tensors on a CPU, not on {context.device}: take 'linear'")
    if order is not None and mode != "linear":
        raise BindError("an order is for mode 'linear'")
    return mode


def _check_serial(program: Program) -> None:
    """Refuse a program that needs its wide or ready-first lanes to end: here each runs one op at a time."""
    serial = tuple(Lane(lane.name) for lane in program.lanes)
    if serial == program.lanes:
        return
    try:
        untimed_order(analyse(replace(program, lanes=serial)))
    except ProgramError as error:
        raise BindError(
            f"lanes run one op at a time here, in program order; that ends in a {error}"
        ) from None


@dataclass(frozen=True)
class _Buffers:
    """The memory of a rank's buffers.

    Attributes:
        slots: the tensor of each (buffer, slot).
        given: tensors of the caller that are copied to and from their slot, because the slot is in remote memory.
        unset: names of inputs that have no value yet.
    """

    slots: dict[tuple[str, int], Tensor]
    given: dict[str, Tensor]
    unset: set[str]


def _check_tensors(analysis: RankAnalysis, tensors: Mapping[str, Tensor], device: torch.device) -> None:
    program, rank = analysis.program, analysis.rank
    bindable = {name: b for name, b in analysis.buffers.items() if b.kind in ("input", "output")}
    for name, tensor in tensors.items():
        if name not in bindable:
            raise BindError(
                f"rank {rank} of program {program.name} has no input or output buffer '{name}'"
                f"{did_you_mean(name, bindable)}"
            )
        _check(name, tensor, program.local_shape(name, rank), torch_dtype(bindable[name].dtype))
        if tensor.device.type != device.type:
            raise BindError(f"buffer {name} is on {tensor.device}, its context on {device}")


def _allocate(
    analysis: RankAnalysis,
    tensors: Mapping[str, Tensor],
    device: torch.device,
    exposed: Mapping[tuple[str, int], Tensor],
) -> _Buffers:
    """Return the buffers of a rank, allocating those that the caller gave no tensor for.

    Args:
        exposed: slots that other ranks read or write, which are allocated already.
    """
    slots = dict(exposed)
    given: dict[str, Tensor] = {}
    for buffer in analysis.buffers.values():
        shape, dtype = analysis.program.local_shape(buffer.name, analysis.rank), torch_dtype(buffer.dtype)
        for slot in range(buffer.slots):
            if (buffer.name, slot) not in exposed:
                slots[buffer.name, slot] = empty_in_order(shape, dtype, buffer.order, device)
        if buffer.name in tensors:
            tensor = tensors[buffer.name].detach()
            if (buffer.name, 0) not in exposed:
                slots[buffer.name, 0] = tensor
            elif exposed[buffer.name, 0].data_ptr() != tensor.data_ptr():
                given[buffer.name] = tensor
    inputs = {name for name, buffer in analysis.buffers.items() if buffer.kind == "input"}
    return _Buffers(slots, given, inputs - set(tensors))


def _check(name: str, value: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(value.shape) != shape or value.dtype != dtype:
        raise BindError(
            f"buffer {name} is of shape {shape} and {dtype}, "
            f"what was given of {tuple(value.shape)} and {value.dtype}"
        )


def _lanes(ops: Sequence[BoundOp]) -> list[str]:
    """Return the lanes that a rank uses, that with most compute ops first: the calling thread runs it."""
    num_local: dict[str, int] = {}
    for bound in ops:
        num_local[bound.op.lane] = num_local.get(bound.op.lane, 0) + (bound.op.kind in COMPUTE_KINDS)
    return sorted(num_local, key=lambda name: -num_local[name])


def _threads(
    context: TorchContext, analysis: RankAnalysis, actions: Sequence[Action], trace: bool
) -> Callable[[], Mapping[int, tuple[int, int]]]:
    ops = analysis.ops
    names = _lanes(ops)
    lane_of = [names.index(bound.op.lane) for bound in ops]
    lanes = [LaneRun(name) for name in names]
    for index, needed in enumerate(cross_lane_waits(lane_of, analysis.edges, len(lanes))):
        lane = lanes[lane_of[index]]
        lane.actions.append(actions[index])
        lane.waits.append(tuple((lanes[other], count) for other, count in needed))
        lane.labels.append(ops[index].label)
        lane.indices.append(index)
    _post_receives_early(analysis, actions, lanes, lane_of)
    lane_threads = context.lane_threads

    def execute() -> Mapping[int, tuple[int, int]]:
        if lanes:
            lane_threads.run(lanes, trace=trace)
        if not trace:
            return {}
        return {index: span for lane in lanes for index, span in zip(lane.indices, lane.spans, strict=True)}

    return execute


def _post_receives_early(
    analysis: RankAnalysis, actions: Sequence[Action], lanes: Sequence[LaneRun], lane_of: Sequence[int]
) -> None:
    """Let a lane that waits in a message exchange post the receives of its next exchange, if their memory is free.

    Receives between two ranks match in the order in which they are posted. So a lane posts no further ahead, and
    not past another kind of communication. Nothing is posted into exposed buffers, which other ranks may still
    read until the next fence.
    """
    ops, before = analysis.ops, analysis.write_edges
    place = {index: at for lane in lanes for at, index in enumerate(lane.indices, 1)}
    for lane in lanes:
        previous: MessageExchange | None = None
        for index in lane.indices:
            if ops[index].op.kind in COMPUTE_KINDS:
                continue
            action = actions[index]
            steps = action.steps if isinstance(action, ActionSequence) else (action,)
            exchange = next((step for step in steps if isinstance(step, MessageExchange)), None)
            # What follows it takes the data out of staging, which the next op may not fill yet; messages
            # have two to fill in turns.
            staged = exchange is not None and exchange is not steps[-1]
            early = exchange is not None and exchange.receives
            if staged and not isinstance(ops[index].op, Recv):
                early = False
            if any(view.buffer in analysis.exposed for view in ops[index].op.writes):
                early = False
            if previous is not None and exchange is not None and early:
                needed: dict[int, int] = {}
                for other in before[index]:
                    needed[lane_of[other]] = max(needed.get(lane_of[other], 0), place[other])
                waits = tuple((lanes[number], count) for number, count in needed.items())
                previous.while_waiting(EarlyPost(waits, exchange.post_receives).run_if_free)
            previous = exchange


def _linear(
    context: TorchContext,
    analysis: RankAnalysis,
    actions: Sequence[Action],
    order: Sequence[int],
    trace: bool,
) -> Callable[[], Mapping[int, tuple[int, int]]]:
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
