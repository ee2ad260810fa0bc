"""The order of calls: what ranks do together is counted and named, and data of one call never serves another.

A call is whatever ranks do together: run a bound program, or agree on something (`ranks.agreement`). Every context
counts the calls among each set of ranks, so that all of them give the same call the same number. Programs are
numbered as they are bound. Two mechanisms rest on these numbers.

- Messages carry the number of their program in their tag (`wire_tag`), so that those of two programs never match,
  whatever sizes they have. Calls in another order then wait for each other; no byte of one is taken for another's.
- A rank that waits for long publishes its call, and compares it (`call_watch`). So an order that differs ends in
  an error that names the ranks and their calls, at once and not at the deadline.

Neither adds a message or a wait to a call. Two calls of one bound program with other operands look alike.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch.distributed as dist

from meshweave.base.errors import BindError, DeadlineError, RankLostError, UnsupportedError
from meshweave.execute.torch.call_records import (
    REFUSED,
    CallKind,
    ContextCalls,
    SharedCalls,
    error_words,
    is_of_distributed,
    is_shared,
    mark_as_shared,
    news_of,
)
from meshweave.execute.torch.call_watch import CallWatch, WatchedCalls
from meshweave.execute.torch.context import TorchContext
from meshweave.execute.torch.groups import PerWorld
from meshweave.execute.torch.world import signed_store

TAGS_PER_PROGRAM = 1 << 16
ENTRY_TAG = TAGS_PER_PROGRAM - 1
"""The tag of the messages by which ranks meet before the first of torch's own collectives in a run."""

_NUM_TAGS = 1 << 31
_TELL_S = 2.0  # that each of two writes to the store may take

TALK = "agree"


class CallSequence(SharedCalls):
    """The calls of one context among one set of ranks.

    Attributes:
        num_bound: number of programs bound so far.
        digests: SHA-256 of the texts of the programs that these ranks have agreed on.
        last_key: the key in the store of the last message of this rank to the others; "" before the first.
        session: number of contexts of this process that have had calls among these ranks, this one included.
    """

    def __init__(self, order: CallOrder, ranks: tuple[int, ...]) -> None:
        super().__init__(ranks)
        self.order, self.num_bound = order, 0
        self.digests: set[str] = set()
        self.last_key = ""
        sessions = _sessions.kept()
        self.session = sessions[ranks] = sessions.get(ranks, 0) + 1

    def begin(self, kind: CallKind) -> int:
        """Begin a call and return its number, from 1. It first ends the call that was left open, if any.

        Raises:
            BindError: the process group of the context is gone.
            UnsupportedError: an earlier call in the context was out of order.

        Raises also what the call that was left open raises.
        """
        order = self.order
        if order.open is not None:
            order.finish_open()
        if order.verdict or dist.group.WORLD is not order.world:
            order.check()
        self.count = count = self.count + 1
        self.recent.append((count, kind))
        order.current = self
        order.serial += 1
        return count

    def end(self, error: BaseException | None = None) -> None:
        """End the call begun last; mark its `error`, if any, so that `share_refusal` does not tell it again."""
        self.order.current = None
        if error is not None:
            mark_as_shared(error)

    def fail(self, error: BaseException | None) -> None:
        """End the call begun last; tell ranks in it or a later call its `error`, if they must know (`news_of`)."""
        self.end(error)
        if (why := news_of(error)) and not self.order.verdict:
            number, kind = self.recent[-1]
            self.recent[-1] = (number, CallKind(kind.key, kind.title, why))
            with contextlib.suppress(RuntimeError, OSError):  # the store may be gone, or hang
                self.order.publish(signed_store(_TELL_S))

    @contextlib.contextmanager
    def agreement(self, what: str) -> Iterator[int]:
        """Begin a call in which ranks exchange messages, yield its number, and end it with the block.

        `what` names the call in errors where the context's `CallOrder` has no title. Raises BindError where the
        process group is gone, UnsupportedError once calls were out of order, and what the call that was left
        open raises, which ends first.
        """
        number = self.begin(CallKind(TALK, self.order.title or what))
        try:
            yield number
        except BaseException as error:
            self.end(error)
            raise
        self.end()

    @contextlib.contextmanager
    def resume(self) -> Iterator[None]:
        """Resume the call begun last, which was left open: the block waits for its rest, and ends it."""
        self.order.current = self
        self.order.serial += 1
        try:
            yield
        except BaseException as error:
            self.end(error)
            raise
        self.end()

    def bind(self, title: str) -> BoundCall:
        """Return the numbered call of a program that all ranks bind now; `title` names the program in errors."""
        self.num_bound += 1
        return BoundCall(self, self.num_bound, title)

    def refuse(self, title: str, error: Exception) -> None:
        """Count a call in whose place this rank raises `error`, and tell the other ranks, which may wait in it.

        `title` names the call in their errors. No-op once calls are out of order or the process group is gone.

        Raises:
            BindError: torch.distributed raised `error`, and another rank refuses this call too, or is in another.
        """
        order = self.order
        is_of_torch = is_of_distributed(error)
        if is_of_torch:
            order.check_verdict()
        if order.verdict or dist.group.WORLD is not order.world:
            return
        why = error_words(error)
        order.open = None  # neither sent nor waited for any more: the others hear of the refusal
        number = self.begin(CallKind(TALK, title))
        if is_of_torch:  # as a group is formed with a rank that refuses, and closes its connections
            order.explain_failure()
        self.recent[-1] = (number, CallKind(REFUSED, title, why))
        self.end(error)
        store = signed_store(_TELL_S)
        with contextlib.suppress(RuntimeError, OSError):  # the store may be gone, or hang
            order.publish(store)
            store.set(self.words_key(number, order.rank), json.dumps({"refuses": why, "title": title}))

    def words_key(self, number: int, rank: int) -> str:
        """Return the store's key for the message of global rank `rank` in call `number`."""
        return f"{self.folder}/{number}/{rank}"

    @property
    def folder(self) -> str:
        """Return the prefix of the keys in the store for the agreements of these ranks in this context."""
        return f"meshweave/talk/{'-'.join(map(str, self.ranks))}/{self.session}"


_numbers = itertools.count()
_sessions: PerWorld[int] = PerWorld()
"""Contexts in which a set of ranks has called something: contexts come and go, and marks stay in the store."""


class OpenCall:
    """A call whose transfer is under way while the caller does other things, until `end`.

    Args:
        finish: waits for the transfer, and takes its result.
    """

    def __init__(self, order: CallOrder, finish: Callable[[], None]) -> None:
        self._order, self._finish = order, finish
        self._lock = threading.RLock()  # an answer may be looked at by threads that write logs
        self._has_begun = False
        self._error: BaseException | None = None

    def end(self) -> None:
        """Run `finish` the first time. Raises the error of `finish`, if any, every time.

        Called from within `finish`, which may begin calls itself, it returns at once.
        """
        with self._lock:
            if not self._has_begun:
                self._has_begun = True
                try:
                    self._finish()
                except BaseException as error:
                    self._error = error
                if self._order.open is self:
                    self._order.open = None
            if self._error is not None:
                raise self._error


class BoundCall:
    """A bound program as a call; a context manager around each run of it."""

    __slots__ = ("_kind", "number", "sequence")

    def __init__(self, sequence: CallSequence, number: int, title: str) -> None:
        self.sequence, self.number = sequence, number
        self._kind = CallKind(f"program {number}", title)

    def __enter__(self) -> None:
        self.sequence.begin(self._kind)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.sequence.fail(error)

    def refuse(self, error: Exception) -> None:
        """Tell the other ranks that this rank does not run the program, because of `error`."""
        self.sequence.refuse(self._kind.title, error)


class CallOrder(ContextCalls):
    """The calls of one context. A wait for other ranks polls `check_verdict`, or is aborted.

    Attributes:
        title: what the calls under way belong to, in words; "" outside of `titled`.
        open: the call that was begun and not yet waited for; None where there is none. The next call waits for
            the open one first.
    """

    def __init__(self, context: TorchContext) -> None:
        rank = context.rank or 0
        super().__init__(rank, f"{rank}.{next(_numbers)}")
        self.world = dist.group.WORLD if context.is_distributed else None
        self.sequences: dict[tuple[int, ...], CallSequence] = {}
        self.title = ""
        self.open: OpenCall | None = None
        self._watched = WatchedCalls(self, context)
        self._watch: CallWatch | None = None

    def sequence(self, ranks: Sequence[int]) -> CallSequence:
        """Return the sequence of calls among `ranks` (in any order, this rank included), made the first time.

        Making it raises BindError where the process group is gone, UnsupportedError once calls were out of order.
        """
        ranks = tuple(sorted(ranks))
        sequence = self.sequences.get(ranks)
        if sequence is None:
            self.check()
            if self._watch is None:
                self.watch()
            sequence = self.sequences[ranks] = CallSequence(self, ranks)
        return sequence

    def leave_open(self, finish: Callable[[], None]) -> OpenCall:
        """Have the next call of this context run `finish` first; this replaces any call that was left open.

        Return the open call, whose `end` runs `finish` earlier.
        """
        self.open = OpenCall(self, finish)
        return self.open

    def finish_open(self) -> None:
        """End the call that was left open, if there is one; raises its error."""
        if (call := self.open) is not None:  # which a thread that writes logs may end meanwhile
            call.end()

    def check(self) -> None:
        """Raise BindError where the process group is gone, UnsupportedError once calls were out of order."""
        if dist.group.WORLD is not self.world:
            raise BindError(
                "the process group of this context is gone: destroy_process_group() was called; call "
                "init_process_group() and use a new context"
            )
        if self.verdict:
            raise UnsupportedError(
                f"an earlier call in this context failed, so that ranks are out of step: {self.verdict}"
            )

    def check_verdict(self) -> None:
        """Raise BindError (`is_echo` True) where the call under way is out of order or failed on another rank."""
        if self.verdict:
            error = BindError(self.verdict)
            error.is_echo = True
            raise error

    def explain_failure(self) -> None:
        """Raise BindError if a wait failed because calls are out of order; first compare them, for 1 s at most."""
        if self._watch is not None and not self.verdict:
            self._watch.look_now(self._watched)
        self.check_verdict()

    def publish(self, store: Any) -> None:
        """Write the record of this rank's calls into `store`, for other ranks to compare."""
        self._watched.publish(store)

    @contextlib.contextmanager
    def titled(self, title: str) -> Iterator[None]:
        """Use `title` in errors for all agreements that begin and programs that are bound in the block."""
        before, self.title = self.title, title
        try:
            yield
        finally:
            self.title = before

    def watch(self) -> None:
        """Have the `CallWatch` thread end waits with an error where calls of ranks differ, until `unwatch`."""
        self._watch = CallWatch.of_world(self.world)
        self._watch.add(self._watched)

    def close(self) -> None:
        """Stop watching the calls for good; the context's groups are about to be destroyed."""
        self._watched.close()
        self.unwatch()

    def unwatch(self) -> None:
        """Stop watching the calls, until `watch`."""
        if self._watch is not None:
            self._watch.remove(self._watched)


class _CallOrders(dict[str, CallOrder]):
    """The one order of calls of a context."""


def call_order(context: TorchContext) -> CallOrder:
    """Return the one `CallOrder` of a context; the first call makes it."""
    orders = context.cache(_CallOrders)
    order = orders.get("")
    if order is None:
        order = orders[""] = CallOrder(context)
    return order


def bound_call(context: TorchContext, ranks: Sequence[int], name: str) -> BoundCall | None:
    """Return the call of a program that all of `ranks` bind now; None where no other rank runs the program.

    Args:
        name: the call's title where the context's `CallOrder` has none.

    Raises BindError where the process group is gone, UnsupportedError where an earlier call was out of order.
    """
    if not context.is_distributed or len(ranks) == 1:
        return None
    order = call_order(context)
    return order.sequence(ranks).bind(order.title or name)


def require_process_group() -> None:
    """Raise BindError where there is no default process group, which DTensors need."""
    if not dist.is_initialized():
        raise BindError(
            "there is no default process group: call torch.distributed.init_process_group() first, in a "
            "script that torchrun starts; destroy_process_group() ends one"
        )


@contextlib.contextmanager
def share_refusal(context: TorchContext, ranks: Sequence[int], title: str) -> Iterator[None]:
    """Tell the other `ranks` of an error that the block raises on this rank alone: they may wait for this rank.

    Not told is an error that all ranks raise, or one of lost or late ranks. The block's error is re-raised, or
    BindError in place of an error of torch.distributed where calls are out of order. Calls and agreements in the
    block have `title`, or that of an outer `share_refusal`.
    """
    if not context.is_distributed or len(ranks) == 1 or context.rank not in ranks:
        yield
        return
    order = call_order(context)
    with order.titled(order.title or title):
        try:
            yield
        except Exception as error:  # of the caller's functions, too: the others must not wait for this rank
            # Of ranks that are lost or late all are told by their liveness, and the store may be lost with them.
            is_told = isinstance(error, RankLostError | DeadlineError) and context.liveness is not None
            if not is_told and not is_shared(error):
                order.sequence(ranks).refuse(order.title, error)
            raise


def wire_tag(number: int, tag: int) -> int:
    """Return the torch.distributed tag for the message `tag` of the program that was bound as `number`.

    It is (number * 65,536 + tag) mod 2**31: tags below 65,536 differ from those of the 32,767 programs bound
    before.
    """
    return (number * TAGS_PER_PROGRAM + tag) % _NUM_TAGS
