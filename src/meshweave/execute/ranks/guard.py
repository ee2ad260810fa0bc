"""A guard around one blocking wait: if it fails, the error says because of whom."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Protocol, Self

from meshweave.base.errors import MeshweaveError, RankLostError
from meshweave.execute.ranks.heart import Heart
from meshweave.execute.ranks.peers import RanksEndedError

_FIRST_LOOK_S, _LOOK_S = 0.3, 0.2  # at whether the processes of ranks that are waited for still run


class FailureExplainer(Protocol):
    """What explains why a wait has failed; `Liveness` is the implementation.

    Attributes:
        heart: the heartbeat of this process.
        waits: the guards of the waits that this process is in now, by `id(guard)`.
    """

    heart: Heart
    waits: dict[int, Guard]

    def explain(self, wait: Guard, overdue: bool, peers: Iterable[int] | None) -> MeshweaveError | None:
        """Return the error to raise for a failed wait: RankLostError for ranks to blame, else DeadlineError.

        Return None where the wait broke off before its deadline and no rank is to blame or gave up first, or
        where this rank has left the others.

        Args:
            overdue: whether the wait reached its deadline, instead of breaking off with an error.
            peers: the ranks waited for; None if unknown.
        """


class Guard:
    """A context manager around one blocking wait, which explains a failure inside; see `Liveness.guard`."""

    __slots__ = ("_liveness", "_next_look", "_peers", "_start", "deadline_s", "unheard", "what")

    def __init__(
        self, liveness: FailureExplainer, what: str, deadline_s: float, peers: Iterable[int] | None
    ) -> None:
        self._liveness, self._peers = liveness, peers
        self.what, self.deadline_s, self._start = what, deadline_s, time.monotonic()
        self.unheard: Sequence[int] = ()
        """The ranks that have not come, where the caller knows; a missed deadline names them."""
        self._next_look = self._start + _FIRST_LOOK_S

    @property
    def waited_s(self) -> float:
        """Return the seconds since the wait began."""
        return time.monotonic() - self._start

    @property
    def timeout(self) -> timedelta:
        """Return the time left until the deadline, for calls such as `work.wait(guard.timeout)`; at least 1 ms."""
        # gloo takes a timeout of zero to mean its default.
        return timedelta(seconds=max(self.deadline_s - self.waited_s, 0.001))

    def check_peers(self, unheard: Callable[[], Sequence[int]]) -> None:
        """Raise RanksEndedError where the process of a peer still waited for has ended.

        The guard turns that error into RankLostError. Call it at each poll of a wait; it looks every 0.2 s at
        most. Only processes on this host are seen, on Linux.

        Args:
            unheard: returns the ranks still waited for; called only once a peer's process has ended. Where it
                raises RuntimeError or OSError, as the store does, nothing is raised.
        """
        if self._peers is None or (now := time.monotonic()) < self._next_look:
            return
        self._next_look = now + _LOOK_S
        if ended := set(self._liveness.heart.ended(self._peers)):
            try:
                ended.intersection_update(unheard())
            except (RuntimeError, OSError):
                return
            if ended:
                raise RanksEndedError(ended)

    def __enter__(self) -> Self:
        self._start = time.monotonic()
        self._next_look = self._start + _FIRST_LOOK_S
        self._liveness.waits[id(self)] = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if isinstance(error, RuntimeError | OSError) and not isinstance(error, MeshweaveError):
                overdue = self.waited_s >= self.deadline_s or _says_timeout(error)
                peers = error.ranks if isinstance(error, RanksEndedError) else self._peers
                explained = self._liveness.explain(self, overdue, peers)
                if explained is None and isinstance(error, RanksEndedError):
                    explained = RankLostError(f"{error} while waiting for {self.what}", error.ranks)
                if explained is not None:
                    raise explained from error
        finally:
            self._liveness.waits.pop(id(self), None)


def _says_timeout(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, TimeoutError) or "timed out" in text or "timeout" in text
