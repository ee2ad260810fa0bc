"""One-sided ops, fences and released writes as bound actions over a `RemoteMemory`.

Where remote views can be aliased, they are operands like any others. Where not, what an op reads from another
rank is fetched to staging first, and what it writes there is delivered from staging. An update of an exposed
buffer is made element by element in one go, also by the rank that owns it: others may update at the same time.

A region that an op reads and others have released has counters in the reader's memory, one for each lane that
writes to it (`counters`): each released write there counts one, and the op starts when the region is whole.
Counters go on from run to run, so that nothing has to be reset. Updates of the same elements wait for one another
by such counters, so that their sums have the same bits in every run, unless they may be made in order of arrival.
A run begins and ends with a fence of all ranks: no rank reads what a peer has not written yet, or overwrites what
a peer still reads.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from meshweave.base.errors import BindError, UnsupportedError
from meshweave.execute.memory.base import Exposure, Key, RemoteMemory, RemoteSlot, Slot
from meshweave.execute.ranks.agreement import agree
from meshweave.execute.torch.analysis import RankAnalysis
from meshweave.execute.torch.buffers import torch_dtype
from meshweave.execute.torch.compute import Binder
from meshweave.execute.torch.context import TorchContext
from meshweave.execute.torch.counters import Count
from meshweave.execute.torch.views import Action, StridedView, bind_view, chain_actions, pair_up
from meshweave.ir.analysis.matching import Node
from meshweave.ir.program import BoundOp, Program
from meshweave.ir.program.ops import COMPUTE_KINDS, UPDATE, Accumulate, Add, Copy, Fence, Get, Matmul, Op, Put
from meshweave.ir.program.views import Range, View, dense_strides

_Result = TypeVar("_Result")


def exposed_slots(program: Program, rank: int, exposed: Container[str]) -> dict[Key, Slot]:
    """Return the slots of those buffers of a rank that are named in `exposed`, by (buffer name, slot)."""
    slots: dict[Key, Slot] = {}
    for buffer in program.buffers:
        if buffer.name in exposed and rank in program.mesh_of[buffer.mesh]:
            shape = program.local_shape(buffer.name, rank)
            one = Slot(shape, dense_strides(shape, buffer.order), torch_dtype(buffer.dtype))
            slots.update(dict.fromkeys(((buffer.name, number) for number in range(buffer.slots)), one))
    return slots


class OneSidedAccess:
    """How a bound program uses a remote memory. Call `set_binder` before `bind`.

    `own` has this rank's tensors in that memory by (buffer name, slot): buffers that other ranks read or write.
    """

    def __init__(
        self,
        memory: RemoteMemory,
        context: TorchContext,
        analysis: RankAnalysis,
        tensors: Mapping[str, Tensor],
    ) -> None:
        """Set memory aside and map other ranks' memory. Collective among the program's ranks. Raises BindError if
        they bind different programs or some have no such memory; RankLostError or DeadlineError for lost ranks."""
        program, rank = analysis.program, analysis.rank
        if memory.is_closed or memory.rank != rank:
            why = "closed" if memory.is_closed else f"that of rank {memory.rank}"
            raise BindError(f"rank {rank} of program {program.name} cannot use this memory: it is {why}")
        self.check_memory(memory)
        self._memory, self._context, self._program, self._rank = memory, context, program, rank
        self._analysis = analysis
        agree(context, program, talk=memory.talk)
        self.exposed = analysis.exposed
        self._counters = analysis.completion_counters
        self._updating: Node = (rank, -1)
        self._counted: dict[tuple[int, int], list[int]] = {}  # steps so far, in all runs
        wanted = exposed_slots(program, rank, self.exposed)
        given = {
            (name, 0): tensor.detach()
            for name, tensor in tensors.items()
            if (name, 0) in wanted and memory.locate(tensor.detach(), program.ranks) is not None
        }
        wanted.update(self.own_slots(analysis))
        num_flags = self._counters.num_counters()
        self._groups = analysis.fence_groups
        what = f"program {program.name}"
        self._window = memory.expose(Exposure(program.ranks, self._groups, what, wanted, given, num_flags))
        self.own = {key: self._window.own[key] for key in wanted}
        self._begin = self._window.fence(0, f"all ranks to begin program {program.name}")
        self._end = self._window.fence(0, f"all ranks to end program {program.name}")
        self._run = 0

    def check_memory(self, memory: RemoteMemory) -> None:
        """Raise UnsupportedError where a subclass cannot use `memory`. This class takes any."""

    def own_slots(self, analysis: RankAnalysis) -> dict[Key, Slot]:
        """Return further slots that this rank exposes beside those of the program's buffers, by (name, slot).

        Here {}; a subclass that keeps counters of its own in remote memory returns the slots of these.
        """
        return {}

    def between_fences(self, execute: Callable[[], _Result]) -> Callable[[], _Result]:
        """Return a function that runs `execute` between two fences of all ranks of the program.

        That function returns what `execute` returns. It raises UnsupportedError where the memory is closed, an
        earlier run failed or another is under way, and RankLostError or DeadlineError where other ranks are
        missing or late.
        """
        lane_threads = self._context.lane_threads

        def run() -> _Result:
            with lane_threads.reserve():
                if self._memory.is_closed:
                    raise UnsupportedError(f"the memory of program {self._program.name} is closed")
                self._run += 1
                self._begin()
            result = execute()
            with lane_threads.reserve():
                self._end()
                self._window.settle()
            return result

        return run

    def set_binder(self, binder: Binder) -> None:
        """Keep the binder, which makes tensors of views, for `bind`."""
        self._binder = binder

    def view(self, view: View) -> Tensor:
        """Return the whole buffer slot of a remote view as a tensor; on device "meta" if it cannot be mapped."""
        return self._remote_slot(view).tensor

    def bind(self, index: int, bound: BoundOp, bind_local_or_matched: Callable[[BoundOp], Action]) -> Action:
        """Return a function without arguments that runs op number `index` of this rank.

        Before the op it waits until all released writes to what the op reads are done. Afterwards it counts the
        op's own released writes in the memory of the ranks that read them.

        Args:
            bound: the op, resolved for this rank.
            bind_local_or_matched: binds an op that has nothing to do with remote memory.

        Raises UnsupportedError where the memory cannot run the op, BindError for a fence without this rank.
        """
        op, node = bound.op, (self._rank, index)
        self._updating = node
        remote = any(view.rank is not None for _, view in op.accesses())
        shared_update = any(mode == UPDATE and view.buffer in self.exposed for mode, view in op.accesses())
        if remote or shared_update or isinstance(op, Fence):
            action = self._bind(bound)
        else:
            action = bind_local_or_matched(bound)
        steps = [action]
        if counts := self._counters.to_start.get(node):
            steps.insert(0, self._wait_for(counts, f"which {bound.label} reads"))
        for reader, counter in self._counters.counts.get(node, ()):
            steps.append(self._count(reader, counter))
        return chain_actions(steps)

    def _wait_for(self, counts: Sequence[Count], why: str) -> Action:
        """Return what waits until counters of this rank have counted what an op needs."""
        region = " and ".join(dict.fromkeys(count.region for count in counts))
        what = f"region {region} of rank {self._rank}, {why}"
        totals = [self._counters.totals[self._rank, count.counter] for count in counts]
        needed = [(total, total - count.needed) for total, count in zip(totals, counts, strict=True)]
        wait_for = self._window.await_flags(
            [count.counter for count in counts], [count.writer for count in counts], what
        )
        return lambda: wait_for([self._run * total - short for total, short in needed])

    def _count(self, reader: int, counter: int) -> Action:
        """Return what counts one more step. The lane that this op is in is the only one that counts here."""
        notify, counted = (
            self._window.notify(reader, counter),
            self._counted.setdefault((reader, counter), [0]),
        )

        def count() -> None:
            counted[0] += 1
            notify(counted[0])

        return count

    def _bind(self, bound: BoundOp) -> Action:
        op = bound.op
        match op:
            case Fence(over=over):
                assert isinstance(over, tuple)
                if self._rank not in over:
                    raise BindError(
                        f"{bound.label} runs over ranks {over}, rank {self._rank} is none of them"
                    )
                what = f"{bound.label} in lane {op.lane}"
                return self._window.fence(self._groups.index(tuple(sorted(over))), what)
            case Get(src=src, out=out) | Put(src=src, out=out) | Accumulate(src=src, out=out):
                return chain_actions(self._move(op, out, src))
            case Copy(src=src, out=out):
                return chain_actions(self._move(op, out, src))
            case Matmul():
                return chain_actions(self._matmul(op))
            case Add(src=src, out=out) if self._needs_staging(src) and not self._needs_staging(out):
                local, before = self._staged(op.lane, "remote src", src)
                return chain_actions(
                    [*before, self._binder.local(BoundOp(bound.key, replace(op, src=local)))]
                )
        if self._memory.is_aliased and op.kind in COMPUTE_KINDS:
            return self._binder.local(bound)
        raise UnsupportedError(
            f"{bound.label} of rank {self._rank} reaches into another rank's memory, which {self._memory.kind} "
            f"memory has no {op.kind} for: get and put instead"
        )

    # -- moving ----------------------------------------------------------------------------------------------

    def _move(self, op: Op, out: View, src: View) -> list[Action]:
        before: list[Action] = []
        if self._needs_staging(src):
            if out.rank is None and not _updates(op):
                return self._fetch(op.lane, self._binder.view(out), src)
            src, before = self._staged(op.lane, "remote src", src)
        local = self._binder.view(src)
        if _updates(op):
            return [*before, *self._update(op, out, local)]
        same_rank = (self._rank if out.rank is None else out.rank) == (
            self._rank if src.rank is None else src.rank
        )
        return [*before, *self._store(op.lane, out, local, apart=same_rank and out.overlaps(src))]

    def _matmul(self, op: Matmul) -> list[Action]:
        a, b, before = op.a, op.b, list[Action]()
        if self._needs_staging(a):
            a, before = self._staged(op.lane, "remote a", a)
        if self._needs_staging(b):
            b, fetched = self._staged(op.lane, "remote b", b)
            before += fetched
        op = replace(op, a=a, b=b)
        update, away = op.accesses()[-1][0] == UPDATE, self._needs_staging(op.out)
        if not update and not away:
            return [*before, self._binder.local(BoundOp((), replace(op, release=None)))]
        if op.accumulate and not update:
            raise UnsupportedError(
                f"{op.name or op.kind} of rank {self._rank} accumulates into another rank's memory: release it"
            )
        product = self._stage(op.lane, "remote product", op.out.shape, self._dtype(op.out))
        action = self._binder.local(BoundOp((), replace(op, out=product, release=None, accumulate=0)))
        result = self._binder.view(product)
        deliver = self._update(op, op.out, result) if update else self._store(op.lane, op.out, result)
        return [*before, action, *deliver]

    def _fetch(self, lane: str, into: StridedView, src: View) -> list[Action]:
        """Gets a remote view that cannot be aliased."""
        slot, remote = self._remote_slot(src), self._remote(src)
        if into.dtype == remote.dtype and (pairs := pair_up(into, remote)) is not None:
            return [self._window.get(here, slot, piece) for here, piece in pairs if here.numel()]
        between = StridedView.of(self._binder.staging.get(lane, "fetched", remote.shape, remote.dtype))
        pairs = pair_up(between, remote)
        assert pairs is not None
        gets = [self._window.get(here, slot, piece) for here, piece in pairs if here.numel()]
        return [*gets, *self._binder.staging.transfer(lane, into, between)]

    def _store(self, lane: str, out: View, src: StridedView, *, apart: bool = False) -> list[Action]:
        if not self._needs_staging(out):
            return self._binder.staging.transfer(lane, self._binder.view(out), src, apart=apart)
        slot, pairs, before = self._paired(lane, out, src)
        return [*before, *(self._window.put(slot, piece, value) for piece, value in pairs)]

    def _update(self, op: Op, out: View, src: StridedView) -> list[Action]:
        slot, pairs, before = self._paired(op.lane, out, src)
        how = op.op if isinstance(op, Accumulate) else "sum"
        if counts := self._counters.to_update.get(self._updating):
            before = [*before, self._wait_for(counts, "which others update first")]
        return [*before, *(self._window.accumulate(slot, piece, value, how) for piece, value in pairs)]

    def _paired(
        self, lane: str, out: View, src: StridedView
    ) -> tuple[RemoteSlot, list[tuple[Tensor, Tensor]], list[Action]]:
        """Parts of an exposed view beside what goes there, of its dtype, and what gathers that."""
        slot, remote = self._remote_slot(out), self._remote(out)
        pairs = pair_up(remote, src) if src.dtype == remote.dtype else None
        before: list[Action] = []
        if pairs is None:
            between = StridedView.of(self._binder.staging.get(lane, "sent", src.shape, remote.dtype))
            before, pairs = self._binder.staging.transfer(lane, between, src), pair_up(remote, between)
            assert pairs is not None
        return slot, [(piece, value) for piece, value in pairs if value.numel()], before

    # -- views -----------------------------------------------------------------------------------------------

    def _needs_staging(self, view: View) -> bool:
        """Whether no tensor of this process can alias it."""
        return view.rank is not None and not self._memory.is_aliased

    def _owner(self, view: View) -> int:
        rank = self._rank if view.rank is None else view.rank
        assert isinstance(rank, int)
        return rank

    def _remote_slot(self, view: View) -> RemoteSlot:
        assert isinstance(view.slot, int)
        return self._window.remote[self._owner(view), (view.buffer, view.slot)]

    def _remote(self, view: View) -> StridedView:
        return bind_view(view, self._remote_slot(view).tensor)

    def _dtype(self, view: View) -> torch.dtype:
        return self._remote_slot(view).tensor.dtype

    def _staged(self, lane: str, use: str, src: View) -> tuple[View, list[Action]]:
        """A local stand-in for a remote view, and what fills it."""
        local = self._stage(lane, use, src.shape, self._dtype(src))
        return local, self._fetch(lane, self._binder.view(local), src)

    def _stage(self, lane: str, use: str, shape: tuple[int, ...], dtype: torch.dtype) -> View:
        name = f"{use} of lane {lane}: {shape} {dtype}"  # no buffer has a name with blanks
        self._binder.memory[name, 0] = self._binder.staging.get(lane, use, shape, dtype)
        return View(name, tuple(Range(0, size) for size in shape), 0)


def _updates(op: Op) -> bool:
    return any(mode == UPDATE for mode, _ in op.accesses())
