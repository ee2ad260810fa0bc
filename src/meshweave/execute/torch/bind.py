"""A program on tensors of one rank, over `torch.distributed`: bound once, run many times.

Binding instantiates the ops of this rank alone, derives its local edges, allocates scratch and staging, makes
every view a tensor and every op a closure. What is left for a run is to walk lists of closures.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshweave.base.errors import BindError, UnsupportedError, require_known
from meshweave.execute.calls import Calls, CallTable
from meshweave.execute.memory.base import RemoteMemory
from meshweave.execute.ranks.agreement import agree_once
from meshweave.execute.torch.analysis import RankAnalysis
from meshweave.execute.torch.bind_options import (
    Mode,
    Products,
    UpdateOrder,
    check_serial,
    check_update_order,
    checked_mode,
    checked_products,
)
from meshweave.execute.torch.buffers import RankBuffers, allocate, check_tensors, check_value
from meshweave.execute.torch.call_order import BoundCall, bound_call, share_refusal
from meshweave.execute.torch.comm import bind_communication
from meshweave.execute.torch.compute import Binder
from meshweave.execute.torch.context import TorchContext
from meshweave.execute.torch.graphs import CapturedRun, check_graph
from meshweave.execute.torch.issue import Execute, LaneExecution, one_order, thread_per_lane
from meshweave.execute.torch.lanes import BUSY
from meshweave.execute.torch.one_sided import OneSidedAccess
from meshweave.execute.torch.views import Action, Staging, overlaps_itself
from meshweave.execute.torch.wire import Wire
from meshweave.ir.program import BoundOp, Program
from meshweave.ir.program.ops import COMPUTE_KINDS
from meshweave.lower.linearise import linearise
from meshweave.trace import Span, Trace


class BoundProgram:
    """A program bound to the memory of one rank; made by `bind`.

    `inputs` and `outputs` are the local tensors of input and output buffers, by name, `scratch` slot 0 of each
    scratch buffer. All runs use these: read results before the next run. New input may be written into `inputs`.
    """

    def __init__(
        self,
        analysis: RankAnalysis,
        context: TorchContext,
        memory: RankBuffers,
        execute: Execute,
        trace: bool,
        call: BoundCall | None,
        calls: CallTable,
    ) -> None:
        self.program, self.rank, self.context = analysis.program, analysis.rank, context
        self._call, self._calls = call, calls
        self._unset, self._execute, self._is_traced = memory.unset, execute, trace
        self._analysis, self._running = analysis, threading.Lock()
        buffers = analysis.buffers
        visible = {name: memory.given.get(name, memory.slots[name, 0]) for name in buffers}
        self.inputs = {name: visible[name] for name, b in buffers.items() if b.kind == "input"}
        self.outputs = {name: visible[name] for name, b in buffers.items() if b.kind == "output"}
        self.scratch = {name: memory.slots[name, 0] for name, b in buffers.items() if b.kind == "scratch"}
        self._places = {value.untyped_storage().data_ptr() for value in self.inputs.values()}
        self._expanded = {name for name, value in self.inputs.items() if overlaps_itself(value)}
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

    @property
    def peak_stash_bytes(self) -> int:
        """Return the most bytes that this rank's stashes (`execute.calls`) held at once, over all runs so far."""
        return self._calls.peak_stash_bytes

    @property
    def next_run(self) -> int:
        """Return a hash below 65,521 of the next run: equal on ranks that run it, most likely unequal on others.

        Callers put it into data that ranks exchange, to notice ranks in different runs. It is made of the number
        of the program and that of its ranks' next call; 0 for a program that does not communicate.
        """
        if self._call is None:
            return 0
        return (8191 * self._call.number + self._call.sequence.count + 1) % 65_521

    def run(self, inputs: Mapping[str, Tensor] | None = None) -> Trace | None:
        """Run this rank's part of the program; all its ranks run it together.

        Args:
            inputs: new values by buffer name, copied into the bound tensors first.

        Returns:
            The start and end of each op of this rank if bound with `trace`, else None. Times are CLOCK_MONOTONIC
            in picoseconds; processes of a host share that clock.

        Raises:
            BindError: an input never got a value, or a new value does not fit, here or on another rank; other
                ranks are in another call; the process group of the context is gone.
            RankLostError, DeadlineError: other ranks are missing or late, see `TorchContext`.
            UnsupportedError: an earlier run in this context failed, or another is under way.

        What a call raises comes out as it is, with a note that says where. After any failure ranks are out
        of step, and the context is of no further use.
        """
        if not self._running.acquire(blocking=False):  # before its inputs are written over
            raise UnsupportedError(BUSY)
        try:
            self.context.lane_threads.check_free()  # before this is a call, which others do not make
            return self._run(inputs)
        finally:
            self._running.release()

    def _run(self, inputs: Mapping[str, Tensor] | None) -> Trace | None:
        self.end_begun()
        with torch.no_grad():
            try:
                self._load_all(inputs or {})
            except BindError as error:
                if self._call is not None:
                    self._call.refuse(error)
                raise
            if self._call is None:
                spans = self._execute_on_copies()
            else:
                with self._call:
                    spans = self._execute_on_copies()
        recorder = self.context.recorder
        if recorder is not None and spans:
            recorder.add(self.program, self._trace(spans))
        return self._trace(spans) if self._is_traced else None

    def end_begun(self) -> None:
        """Wait for a run that `begin` left open, of any program in this context, and raise its error if any."""
        if self._call is not None:
            self._call.sequence.order.finish_open()

    def begin(self, take: Callable[[], None]) -> Callable[[], None]:
        """Begin a run on what `inputs` hold, and return a function that ends it; all ranks must call both.

        Where this rank has one lane, on a CPU, with one torch collective, no messages (not those of `meets`)
        and no timing, its transfer overlaps with what the caller does until the returned function is called or
        the context's next call begins. Any other program has run, and `take` was called, when this returns.

        Args:
            take: called once the results are in `outputs`.

        Raises what `run` raises; so does the returned function.
        """
        lanes, call = self._execute, self._call
        if not isinstance(lanes, LaneExecution) or not lanes.has_halves or call is None:
            self.run(self.inputs)
            take()
            return _nothing
        sequence = call.sequence
        with torch.no_grad():
            self.context.lane_threads.check_free()  # before this is a call, which others do not make
            self._load_all(self.inputs)
            with call:
                rest = lanes.begin()

        def finish() -> None:
            with torch.no_grad():
                with sequence.resume():
                    rest()
                take()

        return sequence.order.leave_open(finish).end

    def _execute_on_copies(self) -> Mapping[int, tuple[int, int]]:
        for slot, value in self._copies_in:
            slot.copy_(value)
        spans = self._execute()
        for value, slot in self._copies_out:
            value.copy_(slot)
        return spans

    def _load_all(self, inputs: Mapping[str, Tensor]) -> None:
        for name, value in [(name, self._checked(name, value)) for name, value in inputs.items()]:
            if value is not self.inputs[name]:
                self.inputs[name].copy_(value)
            self._unset.discard(name)
        if self._unset:
            raise BindError(f"input buffer {min(self._unset)} of program {self.program.name} has no value")

    def _checked(self, name: str, value: Tensor) -> Tensor:
        """Return a new value, or a copy where it lies in memory of inputs, to which others are written."""
        if name not in self.inputs:  # in every run: a name is not looked at twice
            require_known(name, self.inputs, f"program {self.program.name} has no input buffer", BindError)
        target = self.inputs[name]
        if value is target:
            return value
        check_value(name, value, tuple(target.shape), target.dtype)
        if name in self._expanded:
            raise BindError(f"buffer {name} is bound to an expanded tensor: no value can be copied into it")
        return value.clone() if value.untyped_storage().data_ptr() in self._places else value

    def _trace(self, spans: Mapping[int, tuple[int, int]]) -> Trace:
        listed: list[Span] = []
        for index, bound in enumerate(self._analysis.ops):
            start_ns, end_ns = spans[index]
            times = start_ns * 1000, end_ns * 1000
            listed.append(Span(self.rank, index, bound.op.lane, bound.op.kind, bound.label, *times))
        return Trace(self.program.name, "torch", tuple(listed))


def _nothing() -> None:
    """End a run that has ended."""


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
    update_order: UpdateOrder = "fixed",
    num_threads: int | None = None,
    products: Products = "library",
    graph: bool = False,
    meets: bool = True,
    agreed: Program | None = None,
    twin: BoundProgram | None = None,
) -> BoundProgram:
    """Bind the ops of one rank to its tensors, ready to run. All ranks of the program must call it.

    Ranks bind their programs in the same order; see `TorchContext`. The first time that a program is bound in a
    context, and each time with `memory`, its ranks check that all bind the same program.

    Mode "threads" (the default on a CPU) runs each lane in a thread of its own, in program order one op at a
    time, also where the lane is declared wider or ready-first. Mode "linear" (the default on CUDA) issues all
    ops from the calling thread in `order`, with a stream and a communicator per lane on CUDA. NCCL needs an
    order that all ranks share and in which no op waits for a later one: by default that of `lower.linearise`.
    The CUDA path has run with ranks that share one GPU, over NCCL, and not on several GPUs.

    Args:
        rank: the global rank, that of this process.
        context: by default that of the tensors' device in the default process group.
        tensors: by buffer name, local shards of input buffers and, if wanted, memory for output buffers. They
            are aliased, not copied. Inputs left out get their value in the first `run`. Outputs left out are
            allocated. A tensor whose dims lie in memory in the buffer's `order` needs the fewest copies.
        calls: the functions that `call` ops name; see `execute.calls`. Their results are copied to `outs`.
        order: op indices, for mode "linear", the same sequence of communication on all ranks. None is the order
            of `lower.linearise`; with `memory` program order, which fences make the same.
        trace: let `run` return a Trace.
        memory: holds the buffers that other ranks read and write, for a program with one-sided ops. Given tensors
            inside this memory are aliased. Other tensors of such buffers are copied into it before each run, and
            out of it afterwards.
        update_order: in which order several ranks update the same elements of `memory`: "fixed", so that every run
            gives the same bits, or "arrival", which waits less.
        num_threads: CPU threads of each matmul, None for as many as torch uses. Ranks that compute the same
            matmul get the same bits for certain only with the same number of threads.
        products: "tracked" runs the regions of each released matmul of a program with `memory` in one Triton
            kernel that counts its tiles, and updates by atomic additions in order of arrival; see `execute.cuda`.
            "library" runs each matmul as a call of torch.
        graph: capture what a run issues into a CUDA graph at the second run, and replay it from then on. Not for
            programs with one-sided ops or `trace`; `calls` must be fit for capture.
        meets: whether ranks exchange a message, each with each, before the first torch collective in a run, since
            collectives of two programs may match by mistake. False where the caller notices that from the data.
        agreed: the program that ranks compare in place of this one, which follows from `agreed` and from values
            that ranks share, such as counts (`execute.torch.counted`). Ignored where `memory` is used.
        twin: the same program, bound on other memory in the same context; None where there is none. The two
            count as one program: in each run a rank may run either. Only for mode "threads" and programs that
            send no messages, not even those of `meets`.

    Raises:
        BindError: tensors, calls, ranks or options do not fit the program, here or on another rank; ranks bind
            different programs.
        UnsupportedError: the program has one-sided ops and there is no `memory` (give one, or lower them first);
            it cannot be a graph, or "tracked" lacks Triton; an earlier run in this context failed.
        RankLostError, DeadlineError: other ranks are missing or late.
    """
    program = program.expanded
    if context is None:
        context = TorchContext.default(next((getattr(t, "device", "cpu") for t in tensors.values()), "cpu"))
    # What is bound outlives the call, and later ones may be outside inference mode.
    with share_refusal(context, program.ranks, f"program {program.name}"), torch.inference_mode(False):
        how = _HowBound(
            calls, mode, order, trace, memory, update_order, num_threads, products, graph, meets, agreed, twin
        )
        return _bound(program, rank, tensors, context, how)


@dataclass(frozen=True)
class _HowBound:
    """Arguments of `bind`, which documents them."""

    calls: Calls | None
    mode: Mode | None
    order: Sequence[int] | None
    trace: bool
    memory: RemoteMemory | None
    update_order: UpdateOrder
    num_threads: int | None
    products: Products
    graph: bool
    meets: bool
    agreed: Program | None
    twin: BoundProgram | None


def _bound(
    program: Program, rank: int, tensors: Mapping[str, Tensor], context: TorchContext, how: _HowBound
) -> BoundProgram:
    """Return the bound program of `bind`."""
    memory, order, trace = how.memory, how.order, how.trace
    mode = checked_mode(program, rank, context, how.mode, order)
    check_update_order(how.update_order)
    if how.twin is not None and (how.twin.program != program or how.twin.context is not context):
        raise BindError(
            f"the twin of program {program.name} is to be the same program, bound in the same context"
        )
    tracks = checked_products(how.products, memory)
    in_arrival_order = tracks or how.update_order == "arrival"
    analysis = RankAnalysis(
        program, rank, memory is not None, context.shares_groups, in_arrival_order, tracks
    )
    ops = analysis.ops
    if how.graph:
        check_graph(context, is_one_sided=analysis.is_one_sided, is_timed=trace)
    in_place = check_tensors(analysis, tensors, context.device)
    check_serial(program)
    remote = None
    if memory is not None and analysis.exposed:
        remote = _access(tracks)(memory, context, analysis, tensors)
    buffers = allocate(analysis, tensors, context.device, remote.own if remote else {})
    matched = analysis.matched_program
    if analysis.channels and remote is None:
        agree_once(context, how.agreed or program)
    context.prepare(matched, analysis.channels)
    communicates = bool(analysis.channels) or remote is not None
    if how.twin is not None:
        call = how.twin._call
    else:
        call = bound_call(context, program.ranks, f"program {program.name}") if communicates else None
    aliased = remote.view if remote and memory is not None and memory.is_aliased else None
    table = CallTable(how.calls or {}, program, rank)
    binder = Binder(rank, buffers.slots, Staging(context.device), table, aliased, how.num_threads)
    wire = Wire(context, binder, matched, analysis.wire_orders, analysis.channels, call, how.meets)

    actions = _bind_ops(ops, binder, wire, remote)
    if (waits := context.waits) is not None:
        pairs = zip(ops, actions, strict=True)
        actions = [waits.around_compute(act) if op.op.kind in COMPUTE_KINDS else act for op, act in pairs]
    if mode == "linear":
        issued = order if order is not None else range(len(ops)) if remote else linearise(program)[rank]
        execute = one_order(context, analysis, actions, issued, trace)
    else:
        execute = thread_per_lane(context, analysis, actions, trace, analysis.exposed | in_place)
    if how.twin is not None and (not isinstance(execute, LaneExecution) or execute.sends_messages):
        raise BindError(f"program {program.name} has a twin: that is for mode 'threads', without messages")
    if how.graph:
        execute = CapturedRun(execute, context.device)
    execute = remote.between_fences(execute) if remote else execute
    if context.waits is not None:
        execute = context.waits.around_run(execute)
    return BoundProgram(analysis, context, buffers, execute, trace, call, table)


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


def _access(tracks: bool) -> type[OneSidedAccess]:
    if not tracks:
        return OneSidedAccess
    from meshweave.execute.cuda.access import TrackedAccess

    return TrackedAccess
