"""Memory that other ranks reach: what a native transport of one-sided ops gives a bound program.

A `RemoteMemory` is a pool of memory of this process that the other ranks can reach. A program takes a `Window`
of it when it is bound: its exposed buffers on this rank, and a way to those of its other ranks. Everything in a
window is bound once and run many times; whatever it runs is complete in the sense of `ir.program.ops`, so that a
get ends when the elements have come, and a put or accumulate when its source may be overwritten.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor

from meshweave.base.errors import BindError, MeshweaveError, UnsupportedError
from meshweave.execute.memory.pool import Segment, aligned, take
from meshweave.execute.ranks.agreement import exchange
from meshweave.execute.torch.context import TorchContext
from meshweave.execute.torch.views import Action, extent

Key = tuple[str, int]
"""A buffer and a slot of it."""

SIGNALS: Key = ("", 0)
"""Each rank's counters: one for each group it meets in fences, then its flags, each of which another rank sets."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Slot:
    """Shape, strides (in elements) and dtype of one copy of a buffer; `starts_at_zero`: zeroed when set aside."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    starts_at_zero: bool = False

    @classmethod
    def of_counters(cls, count: int, dtype: torch.dtype = torch.int32) -> Self:
        """Return a slot of `count` counters that start at zero, of shape (count,), or (1,) where `count` is 0."""
        return cls((max(count, 1),), (1,), dtype, starts_at_zero=True)

    @property
    def num_bytes(self) -> int:
        """Return the slot's size in bytes, with the gaps that its strides leave between elements."""
        return extent(self.shape, self.strides) * int(self.dtype.itemsize)


@dataclass(frozen=True)
class RemoteSlot:
    """A buffer slot that begins `offset` bytes into segment `number` of rank `rank`. `tensor` is that memory
    where this process maps it; otherwise a tensor of the slot's shape and strides on the device "meta".
    """

    rank: int
    number: int
    offset: int
    tensor: Tensor

    def bytes_of(self, piece: Tensor) -> tuple[int, int]:
        """Return (start, stop), the bytes of the segment that `piece` spans; `piece` is a view of `tensor`."""
        skipped = piece.storage_offset() - self.tensor.storage_offset()
        start = self.offset + skipped * piece.dtype.itemsize
        return start, start + extent(piece.shape, piece.stride()) * piece.dtype.itemsize


@dataclass(frozen=True)
class Exposure:
    """What a program on `ranks` asks of this rank's memory. A slot's key is (buffer name, index of the slot).

    Attributes:
        groups: sets of ranks that meet in fences, the same list on every rank; the first is all `ranks`.
        what: names the program in errors, such as "program summa".
        wanted: the slots to set aside on this rank.
        given: tensors of this rank that lie in the pool already, by the slot that each is.
        num_flags: number of this rank's flags: integers that another rank sets and this rank waits for.
    """

    ranks: Sequence[int]
    groups: Sequence[Sequence[int]]
    what: str
    wanted: Mapping[Key, Slot] = field(default_factory=dict)
    given: Mapping[Key, Tensor] = field(default_factory=dict)
    num_flags: int = 0


@dataclass(frozen=True)
class ExposedSlots:
    """Slots by key: `own` are this rank's (`rank`), `remote` every rank's. `groups`: the ranks of each fence."""

    rank: int
    groups: tuple[tuple[int, ...], ...]
    own: Mapping[Key, Tensor]
    remote: Mapping[tuple[int, Key], RemoteSlot]


@dataclass(frozen=True)
class Window(ExposedSlots, ABC):
    """One program's part of the memory. Methods but `settle` and `flag_at` return functions that do the work.

    An action is a function without arguments. `piece` is a view of `remote.tensor`, a slot of some rank. `group`
    indexes `groups`. `what` completes "waiting for ..." in a failing wait's RankLostError or DeadlineError.
    """

    @abstractmethod
    def get(self, into: Tensor, remote: RemoteSlot, piece: Tensor) -> Action:
        """Return an action that copies `piece` of another rank into the local tensor `into`, of equal shape."""

    @abstractmethod
    def put(self, remote: RemoteSlot, piece: Tensor, value: Tensor) -> Action:
        """Return an action that copies the local tensor `value` into `piece` of another rank, of equal shape."""

    @abstractmethod
    def accumulate(self, remote: RemoteSlot, piece: Tensor, value: Tensor, op: str) -> Action:
        """Return an action that does `piece = op(piece, value)`, atomically for each element.

        `op` is "sum", "prod", "max" or "min". A rank needs it for its own memory too, where others may update
        that at the same time. Raises UnsupportedError where the memory cannot do it.
        """

    @abstractmethod
    def fence(self, group: int, what: str) -> Action:
        """Return an action that waits until all ranks of the group run it and their accesses are done."""

    def arrive(self, group: int) -> Action:
        """Return an action, the first half of a fence: it tells the group that this rank is there; never waits."""
        return _nothing

    def await_arrivals(self, group: int, what: str) -> Action:
        """Return an action, the second half of a fence: it waits until all ranks of the group have arrived.

        Where a memory cannot split fences, this is the whole fence, and `arrive` does nothing.
        """
        return self.fence(group, what)

    @abstractmethod
    def notify(self, rank: int, flag: int) -> Callable[[int], object]:
        """Return a function of `value` that sets flag `flag` of `rank` to it, after this thread's earlier puts."""

    @abstractmethod
    def await_flags(
        self, flags: Sequence[int], peers: Sequence[int], what: str
    ) -> Callable[[Sequence[int]], object]:
        """Return a function of `values` that waits until every flag `flags[i]` of this rank is >= `values[i]`.

        `peers[i]` is the rank that sets flag `flags[i]`.
        """

    def await_counts(
        self, key: Key, places: Sequence[int], peers: Sequence[int], what: str
    ) -> Callable[[Sequence[int]], object]:
        """Return a function of `values` that waits until element `places[i]` of slot `key` is >= `values[i]`.

        The slot holds this rank's int32 counters. Rank `peers[i]` increases element `places[i]` by atomic adds in
        device memory, see `execute.cuda`. Raises UnsupportedError where the memory has no such counters.
        """
        raise UnsupportedError("tiles are counted in memory that ranks map: shared or symmetric")

    def settle(self) -> None:
        """Block the host until all waits queued on device streams are over; no-op where none are queued there.

        Raises RankLostError or DeadlineError where ranks died or are late.
        """

    def flag_at(self, flag: int) -> int:
        """Return the index of flag number `flag` in a rank's slot `SIGNALS`, after one counter per fence group."""
        return len(self.groups) + flag


def _nothing() -> None:
    pass


@dataclass
class RemoteMemory(ABC):
    """A pool of memory that other ranks reach, made by `open_memory`; see the module docstring.

    `segments` are this rank's, by number. `is_aliased`: this process maps other ranks' memory as tensors, which
    kernels can read. A program's memory returns to the pool when no tensor refers to it any more.
    """

    kind: ClassVar[str] = ""
    is_aliased: ClassVar[bool] = True

    context: TorchContext
    rank: int
    num_ranks: int
    pool_bytes: int = 16 << 20
    segments: dict[int, Segment] = field(default_factory=dict)
    is_closed: bool = False

    def talk(self, ranks: Sequence[int], words: str, what: str) -> dict[int, str]:
        """All-gather texts: send `words` to `ranks`, return {rank: its text}, own included. Collective in `ranks`.

        `what` completes "waiting for ..." in errors. Raises BindError where ranks are in different calls,
        RankLostError or DeadlineError where one died or is late.
        """
        return exchange(self.context, ranks, words, what)

    def together(self, ranks: Sequence[int], what: str, work: Callable[[], _T]) -> tuple[_T, dict[int, Any]]:
        """Run `work` on all of `ranks`; return (result here, {rank: its result after a round trip as JSON}).

        `what` completes "waiting for ..." in errors. Raises BindError where calls differ or `work` raises
        MeshweaveError or OSError on any rank; RankLostError or DeadlineError where a rank died or is late.
        """
        mine: Any = None
        try:
            mine = work()
            words = json.dumps({"is": mine})
        except (MeshweaveError, OSError) as error:
            words = json.dumps({"error": " ".join(str(error).split()) or type(error).__name__})
        said = {rank: json.loads(text) for rank, text in self.talk(ranks, words, what).items()}
        why: dict[str, list[int]] = {}
        for rank, answer in said.items():
            if "error" in answer:
                why.setdefault(answer["error"], []).append(rank)
        if why:
            listed = "; ".join(f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in why.items())
            raise BindError(f"{self.kind} memory: {listed}")
        return mine, {rank: answer["is"] for rank, answer in said.items()}

    def expose(self, exposure: Exposure) -> Window:
        """Set a program's slots aside, map other ranks' slots, return its window. Collective in exposure.ranks.

        Raises:
            BindError: the memory is closed, some rank has too little, or cannot reach another's.
            RankLostError, DeadlineError: another rank died, or did not come in time.
        """
        if self.is_closed:
            raise BindError(f"this {self.kind} memory is closed")
        ranks, what, given = tuple(sorted(exposure.ranks)), exposure.what, exposure.given
        groups = tuple(tuple(sorted(group)) for group in exposure.groups)
        slots = {SIGNALS: Slot.of_counters(len(groups) + exposure.num_flags, torch.int64)}
        slots.update((key, slot) for key, slot in exposure.wanted.items() if key not in given)
        own: dict[Key, Tensor] = {}

        def take() -> dict[str, Any]:
            sizes = {key: aligned(slot.num_bytes) for key, slot in slots.items()}
            segment, offset = self._room(max(sum(sizes.values()), 1), ranks, what)
            block = self._block(segment, offset, aligned(max(sum(sizes.values()), 1)))
            places: list[tuple[Key, int, int, Tensor]] = []
            at = 0
            for key, slot in slots.items():
                tensor = block[at : at + slot.num_bytes].view(slot.dtype)
                own[key] = tensor.as_strided(slot.shape, slot.strides)
                if slot.starts_at_zero:
                    own[key].zero_()
                places.append((key, segment.number, offset + at, own[key]))
                at += sizes[key]
            self.finish_writes()
            for key, tensor in given.items():
                place = self.locate(tensor, ranks)
                assert place is not None, key
                own[key] = tensor
                places.append((key, *place, tensor))
            used = sorted({number for _, number, _, _ in places})
            return {
                "segments": [[number, self._handle(self.segments[number])] for number in used],
                "places": [
                    [*key, number, start, list(tensor.shape), list(tensor.stride()), _dtype_name(tensor)]
                    for key, number, start, tensor in places
                ],
            }

        _, tables = self.together(ranks, f"all ranks of {what} to set memory aside", take)

        def attach() -> None:
            for rank, table in tables.items():
                for number, handle in table["segments"]:
                    self._attach(rank, number, handle, ranks)

        self.together(ranks, f"all ranks of {what} to reach it", attach)
        remote = {
            (rank, (name, at)): self._remote_slot(rank, (name, at), own, number, start, shape, strides, dtype)
            for rank, table in tables.items()
            for name, at, number, start, shape, strides, dtype in table["places"]
        }
        return self._window(ExposedSlots(self.rank, groups, own, remote))

    def finish_writes(self) -> None:  # noqa: B027 - most memories queue nothing
        """Wait until this rank's writes queued on a device are in memory; does nothing where none are queued."""

    def room_or_grow(
        self, size: int, ranks: Sequence[int], what: str, grow: Callable[[int], Segment]
    ) -> tuple[Segment, int]:
        """Take `size` bytes of this rank's pool; return (segment, byte offset). If a rank has no room, all grow.

        Collective among `ranks`. `grow(n)` adds a segment of n bytes, called on all of them. `what` names the
        program in errors. Raises BindError where calls differ, RankLostError or DeadlineError for late ranks.
        """
        size = aligned(size)
        block = take(self.segments.values(), size, ranks)
        wish = 0 if block is not None else segment_size(size, self.pool_bytes, self.segments)
        said = self.talk(ranks, str(wish), f"all ranks of {what} to say what they need")
        room = max(int(text) for text in said.values())
        if room:
            segment = grow(room)
            if block is None:
                offset = segment.take(size)
                assert offset is not None
                block = segment, offset
        assert block is not None
        return block

    def _remote_slot(
        self,
        rank: int,
        key: Key,
        own: Mapping[Key, Tensor],
        number: int,
        offset: int,
        shape: list[int],
        strides: list[int],
        dtype_name: str,
    ) -> RemoteSlot:
        if rank == self.rank and self.is_aliased:
            return RemoteSlot(rank, number, offset, own[key])
        dtype = getattr(torch, dtype_name)
        slot = Slot(tuple(shape), tuple(strides), dtype)
        if not self.is_aliased:
            return RemoteSlot(
                rank, number, offset, torch.empty_strided(shape, strides, dtype=dtype, device="meta")
            )
        whole = self._bytes_of(rank, number)[offset : offset + slot.num_bytes]
        return RemoteSlot(rank, number, offset, whole.view(dtype).as_strided(shape, strides))

    def locate(self, tensor: Tensor, ranks: Sequence[int]) -> tuple[int, int] | None:
        """Return (segment number, byte offset in it) where a tensor of this rank begins; None where it is in no
        segment that all of `ranks` reach.
        """
        for number, segment in self.segments.items():
            start = tensor.data_ptr() - self._address(number)
            if 0 <= start < segment.size and segment.ranks.issuperset(ranks):
                return number, start
        return None

    def add_segment(self, size: int, ranks: Sequence[int]) -> Segment:
        """Record a new segment of `size` bytes that `ranks` reach, and return it. Allocates no memory."""
        segment = self.segments[len(self.segments)] = Segment(len(self.segments), size, frozenset(ranks))
        return segment

    @abstractmethod
    def _address(self, number: int) -> int:
        """The address at which a segment of this rank begins."""

    @abstractmethod
    def close(self) -> None:
        """Close the pool: programs in it can run no more. Tensors in use stay valid; collective for MPI only."""

    @abstractmethod
    def _room(self, size: int, ranks: Sequence[int], what: str) -> tuple[Segment, int]:
        """A block of at least `size` bytes; may be collective."""

    @abstractmethod
    def _block(self, segment: Segment, offset: int, size: int) -> Tensor:
        """The bytes of a block. Once nothing refers to them they are free."""

    @abstractmethod
    def _handle(self, segment: Segment) -> Any:
        """What others need to reach a segment, as JSON."""

    @abstractmethod
    def _attach(self, rank: int, number: int, handle: Any, ranks: Sequence[int]) -> None:
        """Makes a rank's segment reachable from here, where it is not yet."""

    @abstractmethod
    def _bytes_of(self, rank: int, number: int) -> Tensor:
        """A segment of another rank, aliased."""

    @abstractmethod
    def _window(self, slots: ExposedSlots) -> Window: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def segment_size(size: int, pool_bytes: int, known: Mapping[int, Segment]) -> int:
    """Return a new segment's bytes: at least `size`; the first `pool_bytes`, others half of all `known` bytes."""
    there = sum(segment.size for segment in known.values())
    return aligned(max(size, pool_bytes if not known else there // 2), 1 << 16)


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
