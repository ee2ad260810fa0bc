"""Windows of MPI, for ranks that an MPI launcher started: rank n of a program is rank n of COMM_WORLD.

Views travel as they lie, described by derived datatypes; an update is an MPI accumulate, which is atomic for each
element. Remote views are no tensors here: what an op reads or writes elsewhere goes through staging. Waits poll,
so that each has its deadline. MPI alone cannot give up on flushing a window: where that takes longer than the
deadline, this process says so and aborts the job. A launcher that loses a rank ends the others itself.

A passive get of MPICH over a network moves on only while its target is in an MPI call, unless
MPICH_ASYNC_PROGRESS=1; on one host its windows are shared memory.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from meshweave.base.errors import BindError, MeshweaveError, UnsupportedError, require_known
from meshweave.execute.memory.base import SIGNALS, ExposedSlots, RemoteMemory, RemoteSlot, Window
from meshweave.execute.memory.pool import Segment, block_of
from meshweave.execute.ranks.agreement import waiting
from meshweave.execute.torch.context import TorchContext
from meshweave.execute.torch.views import Action, extent

_TALK_TAG, _FENCE_TAG = 1, 2
_OPS = {"sum": "SUM", "prod": "PROD", "max": "MAX", "min": "MIN"}
_NUMBERS = {
    torch.int8: "INT8_T", torch.int16: "INT16_T", torch.int32: "INT32_T", torch.int64: "INT64_T",
    torch.uint8: "UINT8_T", torch.float32: "FLOAT", torch.float64: "DOUBLE",
}  # fmt: skip
_CARRIERS = {1: "UINT8_T", 2: "UINT16_T", 4: "UINT32_T", 8: "UINT64_T"}


@dataclass
class MpiMemory(RemoteMemory):
    """A pool in windows of MPI; see the module docstring.

    `close` is collective among the ranks that used it together.
    """

    kind: ClassVar[str] = "mpi"
    is_aliased: ClassVar[bool] = False

    mpi: Any = None
    comm: Any = None
    _wins: dict[tuple[tuple[int, ...], int], Any] = field(default_factory=dict)
    _comms: dict[tuple[int, ...], Any] = field(default_factory=dict)
    _name_of: dict[int, tuple[tuple[int, ...], int]] = field(default_factory=dict)  # of a segment's window
    _reached: dict[tuple[int, int], tuple[Any, int]] = field(default_factory=dict)  # window, rank in it
    _types: dict[tuple[object, ...], Any] = field(default_factory=dict)

    @classmethod
    def open(cls, context: TorchContext, pool_bytes: int) -> Self:
        """Open a pool in windows of MPI, see `open_memory`. Collective over MPI's COMM_WORLD.

        Args:
            pool_bytes: bytes that each rank sets aside at its first program; the pool grows where it is too small.

        Raises:
            UnsupportedError: mpi4py or an MPI is missing, MPI lacks THREAD_MULTIPLE, or tensors are not on a
                CPU.
            BindError: this process has another rank or number of ranks in torch.distributed than in MPI.
        """
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            why = "needs mpi4py: pip install 'meshweave[mpi]'"
            if not isinstance(error, ImportError):  # it is there, and finds no MPI
                why = f"finds no MPI: {' '.join(str(error).split())}"
            raise UnsupportedError(f"MPI memory {why}") from None
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise UnsupportedError("MPI memory needs an MPI that was initialised with THREAD_MULTIPLE")
        if context.device.type != "cpu":
            raise UnsupportedError(
                f"MPI memory needs tensors on a CPU, this context's are on {context.device}"
            )
        world = MPI.COMM_WORLD
        rank, size = world.Get_rank(), world.Get_size()
        if context.is_distributed and (context.rank, context.num_ranks) != (rank, size):
            raise BindError(
                f"rank {context.rank} of {context.num_ranks} is rank {rank} of {size} of MPI: "
                "start all ranks with mpiexec"
            )
        return cls(context, rank, size, pool_bytes, mpi=MPI, comm=world.Dup())

    def talk(self, ranks: Sequence[int], words: str, what: str) -> dict[int, str]:
        """All-gather texts by MPI: send `words` to `ranks`, return {rank: its text}. Collective among `ranks`.

        `what` completes "waiting for ..." in errors.

        Raises:
            BindError: MPI has no such rank, or a rank talks with other ranks than this one does.
            RankLostError, DeadlineError: another rank died, or did not come in time.
        """
        ranks = tuple(sorted(ranks))
        if ranks[-1] >= self.num_ranks:
            raise BindError(f"there is no rank {ranks[-1]}: MPI started {self.num_ranks} ranks")
        others = [rank for rank in ranks if rank != self.rank]
        sent = json.dumps([ranks, what, words]).encode()
        heard: dict[int, str] = {self.rank: words}
        with waiting(self.context, what, others) as overdue:
            sends = [self.comm.Isend([sent, len(sent), self.mpi.BYTE], rank, _TALK_TAG) for rank in others]
            status = self.mpi.Status()
            while len(heard) < len(ranks) or not self.mpi.Request.Testall(sends):
                for rank in others:
                    if rank not in heard and self.comm.Iprobe(rank, _TALK_TAG, status):
                        box = bytearray(status.Get_count(self.mpi.BYTE))
                        self.comm.Recv([box, len(box), self.mpi.BYTE], rank, _TALK_TAG)
                        theirs, theirs_what, heard[rank] = json.loads(bytes(box))
                        if tuple(theirs) != ranks:
                            raise BindError(
                                f"rank {self.rank} waits with ranks {ranks} for {what}, "
                                f"rank {rank} with ranks {tuple(theirs)} for {theirs_what}"
                            )
                overdue()
                time.sleep(5e-5)
        return dict(sorted(heard.items()))

    # -- the pool --------------------------------------------------------------------------------------------

    def _address(self, number: int) -> int:
        return int(self._wins[self._name_of[number]].tomemory().address)

    def close(self) -> None:
        """Close the pool: its programs run no more. Collective among the ranks that have made a window together.

        An MPI window in which some rank still has a tensor stays until the process ends; the rest are freed.
        After a failed run nothing is freed, and no rank waits for others.
        """
        if self.is_closed:
            return
        self.is_closed = True
        if self.context.lane_threads.error is not None:  # ranks are out of step
            return
        with contextlib.suppress(MeshweaveError):
            for number, (ranks, count) in self._name_of.items():
                segment = self.segments[number]
                is_free = segment.take(segment.size) is not None
                said = self.talk(ranks, str(int(is_free)), "all ranks to close their memory")
                if set(said.values()) == {"1"}:
                    win = self._wins.pop((ranks, count))
                    win.Unlock_all()
                    win.Free()

    def _room(self, size: int, ranks: Sequence[int], what: str) -> tuple[Segment, int]:
        ranks = tuple(ranks)

        def grow(room: int) -> Segment:
            if ranks not in self._comms:
                group = self.comm.Get_group().Incl(ranks)
                self._comms[ranks] = self.comm.Create_group(group)  # all are here, as they have just said
            name = ranks, sum(1 for others, _ in self._wins if others == ranks)
            win = self._wins[name] = self.mpi.Win.Allocate(room, 1, comm=self._comms[ranks])
            win.Lock_all()
            segment = self.add_segment(room, ranks)
            self._name_of[segment.number] = name
            return segment

        return self.room_or_grow(size, ranks, what, grow)

    def _block(self, segment: Segment, offset: int, size: int) -> Tensor:
        return block_of(self._wins[self._name_of[segment.number]].tomemory(), segment, offset, size)

    def _handle(self, segment: Segment) -> Any:
        return self._name_of[segment.number]

    def _attach(self, rank: int, number: int, handle: Any, ranks: Sequence[int]) -> None:
        members, count = handle
        self._reached[rank, number] = self._wins[tuple(members), count], members.index(rank)

    def _bytes_of(self, rank: int, number: int) -> Tensor:
        raise AssertionError("no rank aliases another's window")

    def _window(self, slots: ExposedSlots) -> Window:
        return _MpiWindow(**vars(slots), memory=self)

    # -- for windows -----------------------------------------------------------------------------------------

    def reach(self, remote: RemoteSlot) -> tuple[Any, int]:
        """Return (the MPI window that holds the segment of `remote`, that rank's number in the window's group)."""
        return self._reached[remote.rank, remote.number]

    def layout(self, tensor: Tensor, element: str) -> Any:
        """Return the committed MPI datatype with the shape and strides of a tensor; equal ones are made once.

        `element` names MPI's type of one element, such as "FLOAT".
        """
        key = element, tuple(tensor.shape), tuple(tensor.stride())
        if key not in self._types:
            datatype, itemsize = getattr(self.mpi, element), tensor.dtype.itemsize
            for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
                datatype = datatype.Create_hvector(size, 1, stride * itemsize)
            if not tensor.ndim:
                datatype = datatype.Dup()
            self._types[key] = datatype.Commit()
        return self._types[key]

    def origin(self, tensor: Tensor, element: str) -> list[Any]:
        """Return [memory, 1, datatype], by which mpi4py reads or writes a local tensor in a transfer.

        `element` names MPI's type of one element, such as "FLOAT".
        """
        num_bytes = extent(tensor.shape, tensor.stride()) * tensor.dtype.itemsize
        memory = self.mpi.buffer.fromaddress(tensor.data_ptr(), num_bytes)
        return [memory, 1, self.layout(tensor, element)]

    def finish(self, request: Any, what: str, peer: int) -> None:
        """Poll until `request`, the MPI request of a transfer from or to rank `peer`, is done.

        `what` completes "waiting for ..." in errors. Raises RankLostError or DeadlineError where the peer died
        or time is up.
        """
        if not request.Test():
            with waiting(self.context, what, [peer]) as overdue:
                while not request.Test():
                    overdue()
                    time.sleep(2e-5)

    def flush(self, wins: Sequence[Any], what: str) -> None:
        """Wait until all accesses of this process through the MPI windows `wins` are done at their targets.

        Aborts the whole MPI job, with a line on stderr that names `what`, after the context's `deadline_s`.
        """
        deadline_s = self.context.deadline_s

        def give_up() -> None:
            sys.stderr.write(
                f"meshweave: rank {self.rank} gave up after {deadline_s:g} s of flushing windows at {what}\n"
            )
            sys.stderr.flush()
            self.comm.Abort(1)

        timer = threading.Timer(deadline_s, give_up)
        timer.daemon = True
        timer.start()
        try:
            for win in wins:
                win.Flush_all()
                win.Sync()
        finally:
            timer.cancel()


@dataclass(frozen=True)
class _MpiWindow(Window):
    memory: MpiMemory

    def get(self, into: Tensor, remote: RemoteSlot, piece: Tensor) -> Action:
        """Return an action that copies `piece` of a rank's memory into `into`, of equal shape."""
        memory, (win, target), number = self.memory, self.memory.reach(remote), _carrier(piece)
        here, there = memory.origin(into, number), self._there(remote, piece, number)
        what = f"a get from rank {remote.rank}"
        return lambda held=into: memory.finish(win.Rget(here, target, there), what, remote.rank)  # type: ignore[misc]

    def put(self, remote: RemoteSlot, piece: Tensor, value: Tensor) -> Action:
        """Return an action that copies `value` into `piece`, of equal shape; then `value` may change."""
        memory, (win, target), number = self.memory, self.memory.reach(remote), _carrier(piece)
        here, there = memory.origin(value, number), self._there(remote, piece, number)
        what = f"a put to rank {remote.rank}"
        return lambda held=value: memory.finish(win.Rput(here, target, there), what, remote.rank)  # type: ignore[misc]

    def accumulate(self, remote: RemoteSlot, piece: Tensor, value: Tensor, op: str) -> Action:
        """Return an action that combines `value` into `piece` by `op`, each element atomically.

        Raises UnsupportedError where `op` is not "sum", "prod", "max" or "min", or MPI has no numbers of the
        dtype, such as bfloat16.
        """
        require_known(op, _OPS, "there is no reduction", UnsupportedError)
        if piece.dtype not in _NUMBERS:
            raise UnsupportedError(f"MPI accumulates no {str(piece.dtype).removeprefix('torch.')}")
        memory, (win, target), number = self.memory, self.memory.reach(remote), _NUMBERS[piece.dtype]
        here, there, how = (
            memory.origin(value, number),
            self._there(remote, piece, number),
            getattr(memory.mpi, _OPS[op]),
        )
        what = f"an update of memory of rank {remote.rank}"

        def run(held: Tensor = value) -> None:
            memory.finish(win.Raccumulate(here, target, there, how), what, remote.rank)

        return run

    def _there(self, remote: RemoteSlot, piece: Tensor, number: str) -> list[Any]:
        return [remote.bytes_of(piece)[0], 1, self.memory.layout(piece, number)]

    def _all_wins(self) -> list[Any]:
        wins = [self.memory.reach(remote)[0] for remote in self.remote.values()]
        return list({id(win): win for win in wins}.values())

    def fence(self, group: int, what: str) -> Action:
        """Return an action that flushes all windows, then waits until all ranks of the group run it."""
        ranks, memory, wins = self.groups[group], self.memory, self._all_wins()
        at, tag = ranks.index(self.rank), _FENCE_TAG + group
        hops = [1 << turn for turn in range(max(len(ranks) - 1, 0).bit_length())]
        pairs = [(ranks[(at + hop) % len(ranks)], ranks[(at - hop) % len(ranks)]) for hop in hops]
        others = [rank for rank in ranks if rank != self.rank]
        byte = memory.mpi.BYTE

        def run() -> None:
            memory.flush(wins, what)
            with waiting(memory.context, what, others) as overdue:
                for to, source in pairs:  # a dissemination barrier: after hop n one knows of 2 ** n ranks
                    both = [
                        memory.comm.Irecv([bytearray(1), 1, byte], source, tag),
                        memory.comm.Isend([b"x", 1, byte], to, tag),
                    ]
                    while not memory.mpi.Request.Testall(both):
                        overdue()
                        time.sleep(2e-5)
            for win in wins:
                win.Sync()

        return run

    def notify(self, rank: int, flag: int) -> Callable[[int], object]:
        """Return a function that flushes all windows, then sets flag number `flag` of `rank` to its argument."""
        memory, remote = self.memory, self.remote[rank, SIGNALS]
        at = self.flag_at(flag)
        (win, target), piece = memory.reach(remote), remote.tensor[at : at + 1]
        there, box, wins = (
            self._there(remote, piece, "INT64_T"),
            torch.zeros(1, dtype=torch.int64),
            self._all_wins(),
        )
        here = memory.origin(box, "INT64_T")
        what = f"what was written to rank {rank}"

        def run(value: int) -> None:
            memory.flush(wins, what)
            box[0] = value
            memory.finish(win.Raccumulate(here, target, there, memory.mpi.REPLACE), what, rank)
            memory.flush([win], what)

        return run

    def await_flags(
        self, flags: Sequence[int], peers: Sequence[int], what: str
    ) -> Callable[[Sequence[int]], object]:
        """Return a function of `values` that polls until own flag `flags[i]` is at least `values[i]`."""
        memory, mine = self.memory, self.own[SIGNALS].numpy()
        places, wins = [self.flag_at(flag) for flag in flags], self._all_wins()
        of_flags = memory.reach(self.remote[self.rank, SIGNALS])[0]  # which other ranks' need not be in

        def run(values: Sequence[int]) -> None:
            with waiting(memory.context, what, [peer for peer in peers if peer != self.rank]) as overdue:
                while not all(mine[at] >= value for at, value in zip(places, values, strict=True)):
                    overdue()
                    memory.comm.Iprobe(memory.mpi.ANY_SOURCE, _TALK_TAG)  # so that MPI gets on
                    of_flags.Sync()
                    time.sleep(2e-5)
            for win in wins:
                win.Sync()

        return run


def _carrier(tensor: Tensor) -> str:
    """A datatype as wide as the elements, which are not looked at."""
    return _CARRIERS[tensor.dtype.itemsize]
