"""What bound programs of a process share: process groups, lane threads, caches, and the deadline of each wait.

A context that is dropped without `close` lets go of this rank's threads, groups and descriptors once Python
collects it. That is safe for the other ranks as long as this one owes them nothing: a program that has run to
its end has sent all that they wait for. It ends what they may have begun meanwhile, as `close` does: groups are
collective objects, and of no use to the rest once one of their ranks is gone. NCCL's groups and MPI's windows
are freed by all ranks together, so that a dropped context keeps them, and only `close` frees them.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Literal, Protocol, Self, TypeVar

import torch
import torch.distributed as dist

from meshweave.base.errors import (
    BindError,
    DeadlineError,
    MeshweaveError,
    RankLostError,
    UnsupportedError,
    require_seconds,
)
from meshweave.execute.ranks.blame import ranks_text
from meshweave.execute.ranks.liveness import Liveness
from meshweave.execute.ranks.patience import call_within
from meshweave.execute.ranks.peers import RanksEndedError
from meshweave.execute.torch import compat_groups
from meshweave.execute.torch.cache import DEFAULT_CACHE_BYTES, ProgramCache
from meshweave.execute.torch.groups import GroupKey, assign_channels, group_keys, group_name
from meshweave.execute.torch.lanes import LaneThreads
from meshweave.execute.torch.waits import WaitClock
from meshweave.execute.torch.world import close_connections, world_liveness
from meshweave.ir.program import Program
from meshweave.trace import Trace

CacheT = TypeVar("CacheT", bound=MutableMapping[Any, Any])


class GuardedWait(Protocol):
    """A context manager around one blocking wait for other ranks, which explains a failure of the wait.

    The code inside may set `unheard`, the ranks still waited for, before it raises, so that the error names them;
    code that polls calls `check_peers`.
    """

    unheard: Sequence[int]

    @property
    def timeout(self) -> timedelta:
        """Return the time left until the deadline; in a context without `liveness` the whole deadline."""

    def check_peers(self, unheard: Callable[[], Sequence[int]]) -> None:
        """Raise RanksEndedError where the process of a rank still waited for has ended.

        The guard turns that error into RankLostError. `unheard` returns the ranks still waited for.
        """

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


class RunRecorder(Protocol):
    """Receives the trace of each run of a program that is bound in mode "threads", or with `trace`."""

    def add(self, program: Program, trace: Trace) -> None:
        """Store this rank's `trace` (start and end of each op) of one run of `program`."""


class _WaitWithoutLiveness:
    """The guard where nobody listens for heartbeats: it can say what was waited for, not because of whom."""

    __slots__ = ("_what", "timeout", "unheard")

    def __init__(self, what: str, timeout: timedelta) -> None:
        self._what, self.timeout = what, timeout
        self.unheard: Sequence[int] = ()

    def check_peers(self, unheard: Callable[[], Sequence[int]]) -> None:
        """Do nothing: the processes of other ranks are not known."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, RanksEndedError):
            raise RankLostError(f"{error} while waiting for {self._what}", error.ranks) from error
        if isinstance(error, RuntimeError | OSError):
            words = " ".join(str(error).split())
            if "timed out" in words.lower() or "timeout" in words.lower():
                absent = f": {ranks_text(self.unheard)} did not come" if self.unheard else ""
                raise DeadlineError(
                    f"gave up waiting for {self._what} after {self.timeout}{absent}"
                ) from error
            why = words.partition(". ")[0]
            if any(word in words.lower() for word in ("connect", "peer", "socket", "pipe", "closed")):
                raise RankLostError(
                    f"the connection broke while waiting for {self._what}: {why}", ()
                ) from error


_COMPARISONS = -1
"""The channel of no program."""
_numbers = itertools.count()
_by_number: weakref.WeakValueDictionary[int, TorchContext] = weakref.WeakValueDictionary()


class _Observers:
    """Who looks on as the programs of contexts run that belong together."""

    recorder: RunRecorder | None = None
    waits: WaitClock | None = None


class TorchContext:
    """What the bound programs of this process share: its rank, process groups, threads, caches and deadlines.

    Groups are made once per (channel, ranks) and shared by all programs that are bound in this context. Making
    them is collective among the ranks of a group: all ranks of a program bind the same programs in the same
    order. Programs on disjoint ranks, such as replicas, know nothing of each other.

    Args:
        liveness: names the ranks that are missing when a wait fails. None takes that of this process in the
            default process group, which costs a thread and 5 small messages a second to the store. False means
            no liveness: an error can then only say what was waited for.
        deadline_s: seconds that any one wait for other ranks may take, forming groups included.
        device: where buffers live.
        cache_bytes: the memory that bound matmuls and reshards may keep, in bytes for each set of ranks; beyond
            it the least recently used are dropped, on all of their ranks at the same call. It must be equal on
            all ranks.
    """

    def __init__(
        self,
        *,
        liveness: Liveness | Literal[False] | None = None,
        deadline_s: float = 60.0,
        device: torch.device | str = "cpu",
        cache_bytes: int = DEFAULT_CACHE_BYTES,
    ) -> None:
        self.liveness = world_liveness() if liveness is None else liveness or None
        self.deadline_s = deadline_s = require_seconds(deadline_s, "deadline_s")
        if self.liveness is not None:
            self.liveness.watch_peers(deadline_s, close_connections)
        self.device = torch.device(device)
        self.is_distributed = dist.is_available() and dist.is_initialized()
        self.rank: int | None = dist.get_rank() if self.is_distributed else None
        self.num_ranks: int = dist.get_world_size() if self.is_distributed else 1
        self.number = next(_numbers)
        """The number of this context in the process, which a compiled graph holds in place of the context."""
        _by_number[self.number] = self
        self.lane_threads = LaneThreads(
            deadline_s, None if self.liveness is None else self.liveness.check_lost
        )
        self._timeout = timedelta(seconds=deadline_s)
        self._groups: dict[tuple[GroupKey, tuple[int, ...]], Any] = {}
        """By what a group is for and the ranks of the programs that made it: all of these know it, or none."""
        self._caches: dict[type[MutableMapping[Any, Any]], MutableMapping[Any, Any]] = {}
        self._observers = _Observers()
        self._beside: weakref.WeakSet[TorchContext] = weakref.WeakSet()
        self.programs = ProgramCache(cache_bytes)
        """The products and reshards that are bound in this context."""
        keeps_groups = self.device.type == "cuda"
        self._finalizer = weakref.finalize(
            self, _release, self.lane_threads, {} if keeps_groups else self._groups
        )
        self._finalizer.atexit = (
            False  # the ends of the others' connections are theirs until this process ends
        )

    @classmethod
    def numbered(cls, number: int) -> TorchContext:
        """Return the context of this process that has this `number`. Raises BindError where there is none."""
        context = _by_number.get(number)
        if context is None:
            raise BindError(f"context {number} of this process is gone; what was compiled with it cannot run")
        return context

    @classmethod
    def default(cls, device: torch.device | str = "cpu") -> TorchContext:
        """Return this process's context for a device, made once for each default process group and kept."""
        world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        known = _defaults.get(str(device))
        if known is None or known[0] is not world:
            known = _defaults[str(device)] = (world, cls(device=device))
        return known[1]

    def beside(self) -> TorchContext:
        """Return a new context for programs whose `call` ops run programs of this one, such as pipeline stages.

        The new context has the device, deadline, cache limit, liveness, recorder and wait clock of this context.
        It is closed with this context, and a failed run in either breaks both.
        """
        new = TorchContext(
            liveness=self.liveness or False,
            deadline_s=self.deadline_s,
            device=self.device,
            cache_bytes=self.programs.limit_bytes,
        )
        new.lane_threads.fail_with(self.lane_threads)
        new._observers = self._observers
        self._beside.add(new)
        return new

    @property
    def recorder(self) -> RunRecorder | None:
        """Return what receives the traces of runs in this context, see `RunRecorder`; None by default."""
        return self._observers.recorder

    @recorder.setter
    def recorder(self, recorder: RunRecorder | None) -> None:
        """Set what receives the traces from now on; None for nothing."""
        self._observers.recorder = recorder

    @property
    def waits(self) -> WaitClock | None:
        """Return the clock that `count_waits` has started; None where it was not called."""
        return self._observers.waits

    def prepare(self, program: Program, channels: Mapping[str, int] | None = None) -> None:
        """Form the process groups that `program` needs and that are not there yet. Collective; `bind` calls it.

        A program on all ranks of the world forms its groups with all of them; a program on fewer ranks, such as
        one of several replicas, among its own ranks.

        Args:
            channels: the channel number of each communicating lane, by lane name; None for those of the method
                `channels`.

        Raises:
            BindError: a group has ranks that the world does not have, or there is no process group.
            RankLostError, DeadlineError: other ranks are missing or late where a group is formed.
        """
        program = program.expanded
        among_members = self.is_distributed and len(program.ranks) < self.num_ranks
        for key in group_keys(program, self.channels(program) if channels is None else channels):
            channel, ranks = key
            known = key, program.ranks
            if known in self._groups or (among_members and self.rank not in ranks):
                continue
            if not self.is_distributed:
                raise BindError(
                    f"program {program.name} communicates over ranks {ranks}: initialise torch.distributed"
                )
            if ranks[-1] >= self.num_ranks:
                raise BindError(
                    f"program {program.name} has a rank {ranks[-1]}, there are {self.num_ranks} ranks"
                )
            self._groups[known] = self._formed(channel, ranks, among_members)

    def group_of(self, ranks: tuple[int, ...]) -> Any:
        """Return a process group of `ranks`, ascending, for collectives that belong to no program.

        The first call for these ranks forms the group and is collective among them; it raises RankLostError or
        DeadlineError where others are missing or late.
        """
        known = (_COMPARISONS, ranks), ranks
        if known not in self._groups:
            self._groups[known] = self._formed(_COMPARISONS, ranks, len(ranks) < self.num_ranks)
        return self._groups[known]

    def _formed(self, channel: int, ranks: tuple[int, ...], among_members: bool) -> Any:
        with self.guard(f"ranks {ranks} to form a group", ranks) as wait:
            if self.device.type == "cuda":  # whose current device is one of the thread
                group = self._new_group(channel, ranks, among_members)
                if self.rank in ranks:
                    # NCCL connects a group at its first use, which must be one by all of its ranks.
                    dist.all_reduce(torch.zeros(1, device=self.device), group=group)
            else:
                form = partial(self._new_group, channel, ranks, among_members)
                others = [rank for rank in ranks if rank != self.rank]
                look = partial(wait.check_peers, others.copy)
                group = call_within(wait.timeout.total_seconds(), form, look)
        return group

    def _new_group(self, channel: int, ranks: Sequence[int], among_members: bool) -> Any:
        naming = compat_groups.override_group_names(group_name) if among_members else contextlib.nullcontext()
        with naming:
            return dist.new_group(
                list(ranks),
                timeout=self._timeout,
                use_local_synchronization=among_members,
                group_desc=f"meshweave {channel}",
            )

    def channels(self, program: Program) -> dict[str, int]:
        """Return the channel number of each communicating lane, by lane name; see `assign_channels`."""
        return assign_channels(program, shared=self.shares_groups)

    @property
    def shares_groups(self) -> bool:
        """Return whether lanes may share process groups: not on CUDA, as NCCL runs a group's work in one order."""
        return str(self.device.type) != "cuda"

    def group(self, program: Program, channel: int, ranks: Sequence[int]) -> Any:
        """Return the process group of a channel over `ranks`, in any order; call `prepare(program)` before."""
        return self._groups[(channel, tuple(sorted(ranks))), program.ranks]

    def groups(self) -> list[tuple[tuple[int, ...], Any]]:
        """Return the process groups formed so far, as (ranks in ascending order, group)."""
        return [(ranks, group) for ((_, ranks), _), group in list(self._groups.items())]

    def guard(self, what: str, peers: Iterable[int]) -> GuardedWait:
        """Return a context manager for one wait for other ranks; its `timeout` is the time left to the deadline.

        Where a RuntimeError or OSError ends the block it raises RankLostError, which names the lost ranks, or
        DeadlineError where time is up and all still answer. Any other error is raised unchanged. Without
        liveness an error names what was waited for, and not always ranks.

        Args:
            what: completes "waiting for ..." in errors.
            peers: the ranks waited for.
        """
        if self.liveness is None:
            return _WaitWithoutLiveness(what, self._timeout)
        return self.liveness.guard(what, self.deadline_s, peers=peers)

    def count_waits(self) -> WaitClock:
        """Start to count how long runs wait, for programs bound from now on; return the context's one clock of it.

        Raises UnsupportedError on CUDA, where the host does not wait for each op.
        """
        if self.device.type == "cuda":
            raise UnsupportedError("waits are counted on a CPU; on CUDA bind with trace=True")
        clock = self._observers.waits = self._observers.waits or WaitClock()
        return clock

    def cache(self, kind: type[CacheT]) -> CacheT:
        """Return this context's one mapping of class `kind`, which the first call makes, empty.

        A module that keeps things for as long as a context lives declares a class for them, such as
        `class BoundPrograms(dict[Key, BoundProgram])`, and only that module calls `context.cache(BoundPrograms)`.
        `close` calls the `close` method of each value that has one, and empties the mapping.
        """
        cache = self._caches.get(kind)
        if cache is None:
            cache = self._caches[kind] = kind()
        assert isinstance(cache, kind)
        return cache

    def close(self) -> None:
        """End the threads, empty the caches and destroy the process groups; programs bound in this context can
        run no more.

        Collective where groups are NCCL's and where a cache holds memory of MPI: such groups and windows are
        freed by all of their ranks together.
        """
        for inner in list(self._beside):
            inner.close()
        for cache in self._caches.values():
            for value in cache.values():
                if callable(close := getattr(value, "close", None)):
                    with contextlib.suppress(MeshweaveError, RuntimeError):
                        close()
            cache.clear()
        self.programs.clear()
        self._finalizer()
        _release(self.lane_threads, self._groups)


def _release(lane_threads: LaneThreads, groups: dict[Any, Any]) -> None:
    """End the threads of a context and this rank's part in its groups."""
    lane_threads.close()
    for group in groups.values():
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            with contextlib.suppress(RuntimeError, ValueError):  # the world may be gone already
                dist.destroy_process_group(group)
    groups.clear()


_defaults: dict[str, tuple[Any, TorchContext]] = {}  # by device, with the world that each was made for
