"""Memory that the ranks of one host map into each other: a remote view is a tensor, a get is one copy.

A segment is an anonymous file (memfd) that the others open by way of /proc. It never has a name, so it cannot
outlive its last process however that ends, nor does the size of /dev/shm limit it. Linux only.

An accumulate holds a lock on the bytes that it touches, taken on the segment's file (open file description
locks): it goes with the thread's own descriptor, hence holds between the lanes of a process too, and the kernel
drops it where the holder dies. A fence is a counter per rank that the others poll.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import select
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from meshweave.base.errors import BindError, UnsupportedError
from meshweave.execute.memory.base import (
    SIGNALS,
    ExposedSlots,
    Key,
    RemoteMemory,
    RemoteSlot,
    Window,
    segment_size,
)
from meshweave.execute.memory.mapped import MappedWindow
from meshweave.execute.memory.pool import Segment, aligned, block_of, take
from meshweave.execute.ranks.agreement import waiting
from meshweave.execute.ranks.peers import RanksEndedError
from meshweave.execute.torch.context import TorchContext
from meshweave.execute.torch.views import Action, chain_actions

_CHUNK_BYTES = 1 << 19  # of a large accumulate under one lock, so that ranks that meet take turns
_SPINS = 30
_NAME = "meshweave"
_MEMORY_FILE = f"/memfd:{_NAME}"  # what a descriptor of such a segment is a link to, in /proc
_LOOK_S = 0.02  # between two looks at whether a process still runs


def why_unavailable() -> str:
    """Return why this process cannot share memory with other processes of its host; "" where it can."""
    if not sys.platform.startswith("linux") or not hasattr(os, "memfd_create"):
        return f"needs Linux (memfd), this is {sys.platform}"
    if not hasattr(fcntl, "F_OFD_SETLK"):
        return "this Python has no open file description locks (fcntl.F_OFD_SETLK)"
    return ""


@dataclass
class _Mapping:
    """A segment of some rank in this process: its open file, the mapping, and that as a uint8 tensor."""

    fd: int
    memory: mmap.mmap
    bytes: Tensor


@dataclass
class SharedMemory(RemoteMemory):
    """A pool that the ranks of one host map into each other; see the module docstring."""

    kind: ClassVar[str] = "shared"

    _mapped: dict[tuple[int, int], _Mapping] = field(default_factory=dict)
    _processes: dict[int, int] = field(default_factory=dict)  # a descriptor of each peer's process
    _local: threading.local = field(default_factory=threading.local)

    def __post_init__(self) -> None:
        self._finalizer = weakref.finalize(self, _close_descriptors, self._mapped, self._processes)

    @classmethod
    def open(cls, context: TorchContext, pool_bytes: int, ranks: Sequence[int] | None = None) -> Self:
        """Open a pool for `ranks`, None for all ranks of the context, see `open_memory`; collective among them.

        Raises:
            UnsupportedError: this system has no such memory (`why_unavailable`), or ranks are on several hosts.
            BindError: it failed on another rank.
            RankLostError, DeadlineError: another rank died, or did not come in time.
        """
        if reason := why_unavailable():
            raise UnsupportedError(f"shared memory {reason}")
        memory = cls(context, context.rank or 0, context.num_ranks, pool_bytes)
        ranks = range(memory.num_ranks) if ranks is None else sorted(ranks)
        _, hosts = memory.together(ranks, "all ranks to open shared memory", host_identity)
        elsewhere = [rank for rank, host in hosts.items() if host[0] != hosts[ranks[0]][0]]
        if elsewhere:
            rank = elsewhere[0]
            raise UnsupportedError(
                f"shared memory needs all ranks on one host: rank {ranks[0]} is on {hosts[ranks[0]][1]}, "
                f"rank {rank} on {hosts[rank][1]}"
            )
        return memory

    # -- the pool --------------------------------------------------------------------------------------------

    def _address(self, number: int) -> int:
        return int(self._bytes_of(self.rank, number).data_ptr())

    def close(self) -> None:
        """Close this rank's pool; not collective. Tensors in it stay valid, but its programs run no more."""
        if not self.is_closed:
            self.is_closed = True
            self._finalizer()
            self.segments.clear()

    def _room(self, size: int, ranks: Sequence[int], what: str) -> tuple[Segment, int]:
        size = aligned(size)
        block = take(self.segments.values(), size, ranks)
        if block is not None:
            return block
        room = segment_size(size, self.pool_bytes, self.segments)
        number = len(self.segments)
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, room)  # now, or a write may end in SIGBUS
            self._mapped[self.rank, number] = _map(fd, room)
        except OSError as error:
            os.close(fd)
            raise BindError(f"no {room} bytes of shared memory: {error.strerror}") from None
        segment = self.add_segment(room, ranks)
        offset = segment.take(size)
        assert offset is not None
        return segment, offset

    def _block(self, segment: Segment, offset: int, size: int) -> Tensor:
        return block_of(self._mapped[self.rank, segment.number].memory, segment, offset, size)

    def _handle(self, segment: Segment) -> Any:
        fd = self._mapped[self.rank, segment.number].fd
        return [os.getpid(), fd, os.fstat(fd).st_ino, segment.size]

    def _attach(self, rank: int, number: int, handle: Any, ranks: Sequence[int]) -> None:
        pid, remote_fd, inode, size = handle
        if (rank, number) in self._mapped:
            return
        path = Path(f"/proc/{int(pid)}/fd/{int(remote_fd)}")
        try:
            if path.parent.stat().st_uid != os.geteuid() or not str(path.readlink()).startswith(_MEMORY_FILE):
                raise BindError(
                    f"cannot map the memory of rank {rank}: {path} is none that a rank of this user shares"
                )
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise BindError(
                f"cannot map the memory of rank {rank} (process {pid}): {error.strerror}"
            ) from None
        if (status := os.fstat(fd)).st_ino != inode or status.st_size < size:
            os.close(fd)
            raise BindError(f"cannot map the memory of rank {rank}: its process {pid} is another one here")
        self._mapped[rank, number] = _map(fd, size)
        if rank not in self._processes and hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                self._processes[rank] = os.pidfd_open(pid)

    def _bytes_of(self, rank: int, number: int) -> Tensor:
        return self._mapped[rank, number].bytes

    def _window(self, slots: ExposedSlots) -> Window:
        counters = {
            rank: memoryview(at.tensor.numpy()) for (rank, key), at in slots.remote.items() if key == SIGNALS
        }
        return _SharedWindow(**vars(slots), memory=self, counters=counters)

    # -- waiting ---------------------------------------------------------------------------------------------

    def wait_until(
        self, ready: Callable[[], bool], what: str, peers: Sequence[int], missing: Callable[[], Sequence[int]]
    ) -> None:
        """Poll until `ready` returns True, which the ranks `peers` bring about.

        Args:
            what: completes "waiting for ..." in errors.
            missing: returns those of `peers` that are still waited for.

        Raises RankLostError or DeadlineError where a missing rank died or time is up, BindError where calls
        are out of order, UnsupportedError where another lane of this process has failed.
        """
        with waiting(self.context, what, peers, missing) as overdue:
            start = look = time.monotonic()
            while not ready():
                now = time.monotonic()
                time.sleep(5e-5 if now - start < 0.01 else 2e-4)
                overdue()
                if now - look > _LOOK_S:
                    look = now
                    ended = self._ended(missing())
                    if ended and not ready():
                        raise RanksEndedError(ended)

    def _ended(self, ranks: Sequence[int]) -> list[int]:
        """Return those of `ranks` whose processes run no more."""
        poll = select.poll()
        rank_of = {self._processes[rank]: rank for rank in ranks if rank in self._processes}
        for process in rank_of:
            poll.register(process, select.POLLIN)
        return sorted(rank_of[process] for process, _ in poll.poll(0))

    @contextlib.contextmanager
    def locked(self, rank: int, number: int, start: int, stop: int) -> Any:
        """Hold a lock on bytes [start, stop) of a segment of `rank`: one thread of all ranks has it at a time.

        Args:
            number: which of the rank's segments.

        Raises DeadlineError or RankLostError where the lock is not to be had in time.
        """
        fd = self._lock_fd(rank, number)
        how, undo = (
            struct.pack("hhqqi4x", kind, os.SEEK_SET, start, stop - start, 0)
            for kind in (fcntl.F_WRLCK, fcntl.F_UNLCK)
        )

        def is_mine() -> bool:
            try:
                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, how)
            except OSError as error:
                if error.errno in (errno.EAGAIN, errno.EACCES):
                    return False
                raise
            return True

        if not is_mine():
            everyone = [other for other in range(self.num_ranks) if other != self.rank]
            self.wait_until(is_mine, f"the lock on memory of rank {rank}", everyone, tuple)
        try:
            yield
        finally:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, undo)

    def _lock_fd(self, rank: int, number: int) -> int:
        """Return this thread's own descriptor of a segment: locks belong to what was opened once."""
        descriptors: dict[tuple[int, int], _Descriptor] = self._local.__dict__.setdefault("descriptors", {})
        descriptor = descriptors.get((rank, number))
        if descriptor is None:
            path = f"/proc/self/fd/{self._mapped[rank, number].fd}"
            descriptor = descriptors[rank, number] = _Descriptor(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        return descriptor.fd


@dataclass(frozen=True)
class _SharedWindow(MappedWindow):
    memory: SharedMemory
    counters: Mapping[int, memoryview]

    def accumulate(self, remote: RemoteSlot, piece: Tensor, value: Tensor, op: str) -> Action:
        """Return an action that combines `value` into `piece` by `op`, with a lock on the bytes it changes."""
        combine, locked = self.combiner(op), self.memory.locked

        def step(into: Tensor, term: Tensor) -> Action:
            start, stop = remote.bytes_of(into)

            def run() -> None:
                with locked(remote.rank, remote.number, start, stop):
                    combine(into, term)

            return run

        rows = max(piece.shape[:1].numel() * _CHUNK_BYTES // max(piece.nbytes, 1), 1) if piece.ndim else 1
        if not piece.ndim or rows >= piece.shape[0]:
            return step(piece, value)
        steps = [step(into, term) for into, term in zip(piece.split(rows), value.split(rows), strict=True)]
        first = (
            self.rank * len(steps) // max(self.memory.num_ranks, 1)
        )  # or all would queue at the same chunk
        return chain_actions(steps[first:] + steps[:first])

    def fence(self, group: int, what: str) -> Action:
        """Return an action that waits until all ranks of the group have run it as often as this rank."""
        return chain_actions([self.arrive(group), self.await_arrivals(group, what)])

    def arrive(self, group: int) -> Action:
        """Return an action that counts this rank in at a fence of the group, and does not wait."""
        mine = self.counters[self.rank]

        def run() -> None:
            _full_fence()
            mine[group] += 1

        return run

    def await_arrivals(self, group: int, what: str) -> Action:
        """Return an action that waits until all ranks of the group have arrived as often as this one."""
        others = [rank for rank in self.groups[group] if rank != self.rank]
        mine, theirs = self.counters[self.rank], [(rank, self.counters[rank]) for rank in others]
        memory = self.memory

        def missing() -> list[int]:
            return [rank for rank, counters in theirs if counters[group] < mine[group]]

        def ready() -> bool:
            num_met = mine[group]
            return all(counters[group] >= num_met for _, counters in theirs)

        def run() -> None:
            for _ in range(_SPINS):
                if ready():
                    break
                os.sched_yield()
            else:
                memory.wait_until(ready, what, others, missing)
            _full_fence()

        return run

    def notify(self, rank: int, flag: int) -> Callable[[int], object]:
        """Return a function that sets flag number `flag` of `rank` to its argument, after earlier writes."""
        theirs, at = self.counters[rank], self.flag_at(flag)

        def run(value: int) -> None:
            _full_fence()
            theirs[at] = value

        return run

    def await_flags(
        self, flags: Sequence[int], peers: Sequence[int], what: str
    ) -> Callable[[Sequence[int]], object]:
        """Return a function of `values` that waits until own flag `flags[i]` is at least `values[i]`."""
        return self._await(self.counters[self.rank], [self.flag_at(flag) for flag in flags], peers, what)

    def await_counts(
        self, key: Key, places: Sequence[int], peers: Sequence[int], what: str
    ) -> Callable[[Sequence[int]], object]:
        """Return a function of `values` that waits until element `places[i]` of slot `key` is >= `values[i]`."""
        return self._await(memoryview(self.own[key].numpy()), places, peers, what)

    def _await(
        self, mine: memoryview, places: Sequence[int], peers: Sequence[int], what: str
    ) -> Callable[[Sequence[int]], object]:
        others = sorted({peer for peer in peers if peer != self.rank})

        def run(values: Sequence[int]) -> None:
            def ready() -> bool:
                return all(mine[at] >= value for at, value in zip(places, values, strict=True))

            def missing() -> list[int]:
                listed = zip(places, values, peers, strict=True)
                return sorted({peer for at, value, peer in listed if mine[at] < value} & {*others})

            if not ready():
                self.memory.wait_until(ready, what, others, missing)
            _full_fence()

        return run


class _Descriptor:
    """A file descriptor that is closed with the thread that opened it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.fd)


_order = threading.Lock()


def _full_fence() -> None:
    """Memory accesses before and after it stay there, also on processors that reorder stores."""
    for _ in range(2):
        with _order:
            pass


def _close_descriptors(mapped: dict[Any, _Mapping], processes: dict[int, int]) -> None:
    """Close what a shared memory has open; what is mapped stays as long as tensors are in it."""
    for fd in [*(mapping.fd for mapping in mapped.values()), *processes.values()]:
        os.close(fd)
    mapped.clear()
    processes.clear()


def _map(fd: int, size: int) -> _Mapping:
    memory = mmap.mmap(fd, size)
    return _Mapping(fd, memory, torch.frombuffer(memory, dtype=torch.uint8))


def host_identity() -> list[str]:
    """Return [boot id, host name] of this machine; no two running machines have the same boot id."""
    return [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), socket.gethostname()]
