"""A window whose waits are queued on streams: no fence, flag or update waits for the device on the host.

Each rank has int32 words in device memory: one for each rank of each fence group, then its flags. A stream
writes words of other ranks after what it was given before, and waits for its own (`execute.cuda.trigger`). Sums
are atomic additions by a kernel. The host waits once, at the end of a run. Its deadline stands there, and the
error names the first wait that is not over.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from meshweave.base.errors import DeadlineError, RankLostError
from meshweave.execute.cuda.trigger import WordQueue, reached
from meshweave.execute.memory.base import Exposure, Key, RemoteSlot, Slot, Window
from meshweave.execute.ranks.agreement import waiting
from meshweave.execute.torch.context import TorchContext
from meshweave.execute.torch.views import Action

WORDS: Key = ("words of streams", 0)  # no buffer has a name with blanks
_LOOK_S = 0.05  # between two looks at what is still waited for


def with_words(exposure: Exposure) -> Exposure:
    """Return `exposure` with the slot `WORDS` added: the int32 words that streams write and wait for.

    The slot has one word for each rank of each fence group, then one for each flag.
    """
    num_words = sum(len(group) for group in exposure.groups) + exposure.num_flags
    return replace(exposure, wanted={**exposure.wanted, WORDS: Slot.of_counters(num_words)})


@dataclass(frozen=True)
class StreamWait:
    """A wait queued on a stream: until `word`, an int32 that rank `writer` writes, is at least `value`.

    `what` completes "waits for ..." in errors.
    """

    word: Tensor
    value: int
    writer: int
    what: str


class Queue(Protocol):
    """What a window needs of a device: CUDA's streams, or in tests the calling thread.

    `words` queues writes and waits of int32 words on the device.
    """

    words: WordQueue

    def done(self) -> Callable[[], bool]:
        """Return a function that returns whether all that was queued before this call of `done` is done."""

    def read(self, words: Sequence[Tensor]) -> list[int]:
        """Return the values of `words`, int32 tensors of one element, without waiting for what is queued."""

    def free(self, waits: Sequence[StreamWait]) -> None:
        """Write to the word of each wait the value it waits for, at once: it ends the waits after an error."""


class DeviceQueue:
    """The current stream of a CUDA device, and a side stream for what must not wait behind queued work."""

    def __init__(self, device: torch.device, words: WordQueue) -> None:
        """Make the side stream on `device`, of high priority; `words` queues writes and waits of int32 words."""
        self.words, self._device = words, device
        self._beside = torch.cuda.Stream(device, priority=-1)

    def done(self) -> Callable[[], bool]:
        """Return a function that returns whether what the current stream was given before this call is done."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return lambda: bool(event.query())

    def read(self, words: Sequence[Tensor]) -> list[int]:
        """Return the values of `words`, int32 tensors of one element, without waiting for other streams."""
        with torch.cuda.stream(self._beside):
            return [int(word) for word in words]

    def free(self, waits: Sequence[StreamWait]) -> None:
        """Write to the word of each wait the value it waits for, on the side stream.

        After an error this ends the waits of other streams whose writer will never come.
        """
        with torch.cuda.stream(self._beside):
            for wait in waits:
                self.words.write(wait.word, wait.value)


@dataclass(frozen=True)
class StreamWindow(Window):
    """A window whose waits, flags and sums are queued on the current CUDA stream; see the module docstring.

    "Queue" means queue on that stream, without blocking the host. `other_updates` accumulates what no kernel here
    can: other ops than "sum", more than two dims, dtypes without atomic additions.
    """

    context: TorchContext
    queue: Queue
    other_updates: Window
    """Makes the updates that no kernel here makes."""
    _meetings: list[int] = field(init=False)
    """By group how often its ranks have met."""
    _waits: deque[StreamWait] = field(default_factory=deque)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_meetings", [0] * len(self.groups))

    def get(self, into: Tensor, remote: RemoteSlot, piece: Tensor) -> Action:
        """Return an action that queues a copy of `piece` of another rank into `into`, of equal shape."""
        return partial(into.copy_, piece, non_blocking=True)

    def put(self, remote: RemoteSlot, piece: Tensor, value: Tensor) -> Action:
        """Return an action that queues a copy of `value` into `piece` of another rank, of equal shape."""
        return partial(piece.copy_, value, non_blocking=True)

    def accumulate(self, remote: RemoteSlot, piece: Tensor, value: Tensor, op: str) -> Action:
        """Return an action that does `piece = op(piece, value)`, atomically for each element.

        `op` is "sum", "prod", "max" or "min". A sum of at most two dims and of a dtype with atomic additions is
        queued on the stream; `other_updates` does the rest. Raises UnsupportedError where that cannot.
        """
        from meshweave.execute.cuda.kernels import accumulate, lacks_atomic_add

        if op != "sum" or piece.ndim > 2 or lacks_atomic_add(piece.dtype, piece.device):
            return self.other_updates.accumulate(remote, piece, value, op)
        return partial(accumulate, piece, value)

    def fence(self, group: int, what: str) -> Action:
        """Return an action that queues a wait until all ranks of the group have come to the same fence.

        It first queues the writes that tell the others that this rank has come, behind all that the stream was
        given before. The host does not wait.
        """
        ranks = self.groups[group]
        first = sum(len(before) for before in self.groups[:group])
        place = first + ranks.index(self.rank) if self.rank in ranks else 0
        others = [(rank, self._word(rank, place)) for rank in ranks if rank != self.rank]
        mine = [(rank, self.own[WORDS][first + at]) for at, rank in enumerate(ranks) if rank != self.rank]
        words, meetings = self.queue.words, self._meetings

        def run() -> None:
            meetings[group] += 1
            for _, word in others:
                words.write(word, meetings[group])
            for rank, word in mine:
                self._wait(word, meetings[group], rank, what)

        return run

    def notify(self, rank: int, flag: int) -> Callable[[int], object]:
        """Return a function of `value` that queues a write of `value` to flag number `flag` of `rank`."""
        return partial(self.queue.words.write, self._word(rank, self.flag_at(flag)))

    def await_flags(
        self, flags: Sequence[int], peers: Sequence[int], what: str
    ) -> Callable[[Sequence[int]], object]:
        """Return a function of `values` that queues waits until this rank's flags `flags[i]` are >= `values[i]`.

        `peers[i]` is the rank that sets flag `flags[i]`.
        """
        return self.await_counts(WORDS, [self.flag_at(flag) for flag in flags], peers, what)

    def await_counts(
        self, key: Key, places: Sequence[int], peers: Sequence[int], what: str
    ) -> Callable[[Sequence[int]], object]:
        """Return a function of `values` that queues waits until each element `places[i]` is >= `values[i]`.

        The elements are int32 counters in this rank's slot `key`; rank `peers[i]` increases element `places[i]`.
        """
        words = [self.own[key][place] for place in places]

        def run(values: Sequence[int]) -> None:
            for word, value, peer in zip(words, values, peers, strict=True):
                self._wait(word, value, peer, what)

        return run

    def flag_at(self, flag: int) -> int:
        """Return the index of flag number `flag` in a rank's slot `WORDS`, after the words of the fence groups."""
        return sum(len(group) for group in self.groups) + flag

    def settle(self) -> None:
        """Block the host until all that was queued on the current stream before this call is done.

        Raises RankLostError or DeadlineError where other ranks died or time is up; the error names the first
        wait that was not over.
        """
        done = self.queue.done()
        if not done():
            missing = _Missing(self.queue, self._waits)
            others = [rank for rank in self.groups[0] if rank != self.rank]
            try:
                with waiting(self.context, "the end of a program", others, missing.ranks) as overdue:
                    while not done():
                        time.sleep(2e-5)
                        overdue()
            except (RankLostError, DeadlineError) as error:
                first = missing.first()
                with contextlib.suppress(RuntimeError):
                    self.queue.free(tuple(self._waits))
                if first is not None:
                    error.args = (
                        f"rank {self.rank} waits for {first.what}; rank {first.writer} has not counted: {error}",
                    )
                raise
        self._waits.clear()

    def _word(self, rank: int, place: int) -> Tensor:
        return self.remote[rank, WORDS].tensor[place]

    def _wait(self, word: Tensor, value: int, writer: int, what: str) -> None:
        self._waits.append(StreamWait(word, value, writer, what))
        self.queue.words.wait(word, value)


class _Missing:
    """Which waits are not over; looked at seldom, since each look copies words from the device."""

    def __init__(self, queue: Queue, waits: Sequence[StreamWait]) -> None:
        self._queue, self._waits = queue, waits
        self._looked_s = -1.0
        self._known: list[StreamWait] = []

    def ranks(self) -> list[int]:
        """Return the ranks that had not written what is waited for at the last look, at most 0.05 s ago."""
        if time.monotonic() - self._looked_s > _LOOK_S:
            self._known = self._look()
            self._looked_s = time.monotonic()
        return sorted({wait.writer for wait in self._known})

    def first(self) -> StreamWait | None:
        """Return the wait that was queued first of those that are not over; None where all are."""
        return next(iter(self._look()), None)

    def _look(self) -> list[StreamWait]:
        waits = list(self._waits)
        counts = self._queue.read([wait.word for wait in waits])
        return [wait for wait, count in zip(waits, counts, strict=True) if not reached(count, wait.value)]
