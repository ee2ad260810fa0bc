"""Who is still there: heartbeats in the store, a deadline on every wait, an error that names the missing.

A rank that dies takes its connections along, and the ranks that notice first leave with an error and take
theirs along too. What a survivor sees is therefore "connection closed" by *some* neighbour, seldom by the
culprit. Heartbeats settle it. Each rank counts up one key of the `torch.distributed` store; a rank that
leaves for a reason says so in the same key; a rank that is silent without having said anything is lost.

Suspicion alone never raises. Only a wait that has failed or run over its deadline looks at the others, so a
healthy run costs one small `set` and one `check` per rank and interval, however many ranks there are.

Clocks of different hosts are never compared: an observer watches whether a count changes, for as long as it
itself is awake to watch.
"""

from __future__ import annotations

import atexit
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from types import TracebackType
from typing import Protocol, Self

from meshweave.base.errors import DeadlineError, MeshweaveError, RankLostError, UnsupportedError
from meshweave.execute.ranks.blame import Beat, BlamedRanks, HeartbeatWatch, State, blame, ranks_text
from meshweave.execute.ranks.signals import SignalReport, write_stderr

_LOST_KEY = "meshweave/lost"


class Store(Protocol):
    """The part of `torch.distributed.Store` that is needed here."""

    def set(self, key: str, value: str, /) -> None:
        """Write a value."""

    def get(self, key: str, /) -> bytes:
        """Return the value of a key, waiting until there is one."""

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys have values."""

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """Return the values of several keys."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Write `desired` if the value is `expected`, "" meaning none; return the value afterwards."""


class Guard:
    """Wraps one blocking wait; see `Liveness.guard`."""

    __slots__ = ("_liveness", "_peers", "_start", "deadline_s", "what")

    def __init__(self, liveness: Liveness, what: str, deadline_s: float, peers: Iterable[int] | None) -> None:
        self._liveness, self._peers = liveness, peers
        self.what, self.deadline_s, self._start = what, deadline_s, time.monotonic()

    @property
    def waited_s(self) -> float:
        """Seconds since the wait began."""
        return time.monotonic() - self._start

    @property
    def timeout(self) -> timedelta:
        """What is left of the deadline, for calls such as `work.wait(guard.timeout)`; at least 1 ms."""
        # gloo takes a timeout of zero to mean its default.
        return timedelta(seconds=max(self.deadline_s - self.waited_s, 0.001))

    def __enter__(self) -> Self:
        self._start = time.monotonic()
        self._liveness._waits[id(self)] = self.what
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if isinstance(error, RuntimeError | OSError) and not isinstance(error, MeshweaveError):
                overdue = self.waited_s >= self.deadline_s or _says_timeout(error)
                explained = self._liveness._explain(self.what, self.waited_s, overdue, self._peers)
                if explained is not None:
                    raise explained from error
        finally:
            self._liveness._waits.pop(id(self), None)


def _says_timeout(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, TimeoutError) or "timed out" in text or "timeout" in text


class Liveness:
    """This rank's heartbeat, and what it can find out about the others'.

    Args:
        store: the store all ranks share. A connection of its own is cloned from it, so that a blocking `get`
            of the caller cannot hold the heartbeat up. To start over in the same store, wrap it in a
            `PrefixStore`: marks of ranks that have left stay.
        rank: this rank.
        ranks: all ranks that beat in `store`, this one included or not.
        interval_s: seconds between heartbeats.
        stale_s: seconds of silence after which a rank counts as lost. Longer than anything that may hold up a
            healthy process: a paused machine, C code that keeps the GIL.
        deadline_s: seconds a guarded wait may take unless it says otherwise.
        store_rank: the rank whose process hosts the store, where it is one of the ranks.

    Also a context manager: leaving it closes it, with the error if there is one.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        ranks: Iterable[int],
        *,
        interval_s: float = 0.2,
        stale_s: float = 2.0,
        deadline_s: float = 60.0,
        store_rank: int | None = None,
    ) -> None:
        assert 0 < interval_s < stale_s, (interval_s, stale_s)
        self.rank, self.deadline_s = rank, deadline_s
        self._others = tuple(sorted(set(ranks) - {rank}))
        self._interval_s, self._stale_s, self._store_rank = interval_s, stale_s, store_rank
        # Longest wait for the heartbeats to settle while nobody is in doubt; twice that in any case.
        self._settle_s = stale_s + max(5 * interval_s, stale_s / 2)
        clone: Callable[[], Store] | None = getattr(store, "clone", None)
        self._store = clone() if clone is not None else store

        self._waits: dict[int, str] = {}  # what guards are waiting for, to be named when a signal comes
        self._round = threading.Condition()  # guards all below; notified after each round of the thread
        self._wake = threading.Event()
        self._watches: list[HeartbeatWatch] = []
        self._known: set[int] = set()  # others that have beaten at least once: reading them cannot block
        self._accused: set[int] = set()  # ranks named as lost, by us or by anybody
        self._state: State = "alive"
        self._detail = ""
        self._version = self._stored_version = (
            0  # of our state and accusations: the current, and the last in the store
        )
        self._store_gone = self._closing = self._closed = False
        self._signals: SignalReport | None = None
        # All traffic with the store is the thread's: a store whose host vanished may block a call for good,
        # and then only the thread is stuck, and everybody else can tell by its rounds.
        self._thread = threading.Thread(target=self._run, name="meshweave-liveness", daemon=True)
        self._thread.start()
        # A daemon thread inside a C++ call must not meet the interpreter's end, which may abort the process.
        atexit.register(self._close_at_exit)

    # -- for the caller --------------------------------------------------------------------------------------

    def guard(
        self, what: str, deadline_s: float | None = None, *, peers: Iterable[int] | None = None
    ) -> Guard:
        """Return a context manager for a blocking distributed call: if the call fails, it says because of whom.

        The guard cannot interrupt the call. Where the call takes a timeout, give it the guard's:
        `with liveness.guard("the halo of layer 3") as wait: work.wait(wait.timeout)`. A call that succeeds
        late has succeeded.

        Args:
            what: what is waited for; completes "rank 2 stopped answering while waiting for ...".
            deadline_s: seconds, instead of the deadline given to `Liveness`.
            peers: the ranks waited for, where known: one that has finished is then an error at the deadline.

        Raises (in place of a RuntimeError or OSError from inside):
            RankLostError: some ranks are lost, failed or left early; `missing` names all of them.
            DeadlineError: the wait timed out although every rank still answers, or another rank gave up so.
        """
        return Guard(self, what, self.deadline_s if deadline_s is None else deadline_s, peers)

    def missing(self) -> tuple[int, ...]:
        """Return the ranks that are lost or failed, after listening for up to about `stale_s` seconds.

        A rank that has finished is not missing. That nobody is takes two beats of each rank to know.

        Raises:
            RankLostError: the store is gone, and nobody knows which rank hosts it.
        """
        finding = self._look(patient=False, overdue=True, peers=None)
        if not finding.missing and finding.reason:
            raise RankLostError(finding.reason, ())
        return finding.missing

    def install_signal_report(
        self, signum: signal.Signals = signal.SIGTERM, write: Callable[[str], None] | None = None
    ) -> None:
        """On `signum`, say in one line which ranks are missing, then let the signal do what it did before.

        Launchers end the survivors when one rank dies, often before these have found out why. The report
        comes out even if the main thread is stuck in a C++ wait (one that released the GIL). It delays the
        signal by three beats if all ranks answer, by `stale_s` if one is missing. `write` takes the line,
        which goes to stderr by default. `close`, from the main thread too, restores the previous handler.

        Raises:
            UnsupportedError: not the main thread, or the present handler was not installed from Python.
        """
        if threading.current_thread() is not threading.main_thread():
            raise UnsupportedError("install_signal_report works in the main thread only")
        if signal.getsignal(signum) is None:
            raise UnsupportedError(
                f"{signum.name} has a handler from outside Python, which cannot be chained to"
            )
        assert self._signals is None, "installed twice"
        self._signals = SignalReport(signum, self._signal_line, write or write_stderr)

    def close(self, error: BaseException | None = None) -> None:
        """Say farewell and stop beating; `error` is why this rank leaves, if it does not leave in peace."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._close_at_exit)
        if isinstance(error, SystemExit) and not error.code:
            error = None
        if isinstance(error, RankLostError):
            self._announce("lost", _one_line(error), error.missing)
        elif isinstance(error, DeadlineError):
            self._announce("overdue", _one_line(error))
        elif error is not None:
            self._announce("failed", f"{type(error).__name__}: {_one_line(error)}")
        else:
            self._announce("done")
        self._closing = True
        self._wake.set()
        self._thread.join(self._settle_s)
        if self._signals is not None:
            self._signals.uninstall()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(error)

    def _close_at_exit(self) -> None:
        self.close(getattr(sys, "last_value", None))  # set where an uncaught exception ends the process

    # -- finding out -----------------------------------------------------------------------------------------

    def _explain(
        self, what: str, waited_s: float, overdue: bool, peers: Iterable[int] | None
    ) -> MeshweaveError | None:
        """The error that a failed wait deserves, announced to the others; None if nobody else is to blame."""
        if self._closed:
            return None
        finding = self._look(patient=not overdue, overdue=overdue, peers=peers)
        if finding.reason:
            lost = RankLostError(f"{finding.reason} while waiting for {what}", finding.missing)
            self._announce("lost", _one_line(lost), finding.missing)
            return lost
        if not overdue and not finding.given_up:
            return None
        why = finding.given_up or "every rank still answers"
        late = DeadlineError(f"gave up waiting for {what} after {waited_s:.1f} s: {why}")
        self._announce("overdue", _one_line(late))
        return late

    def _signal_line(self, signum: signal.Signals, ignored: bool) -> str:
        """What to say on a signal; unless it is ignored, it is this rank's farewell too."""
        if not ignored:
            self._announce("stopped", signum.name)
        finding = self._look(patient=False, overdue=True, peers=None)
        waits = " and ".join(sorted(set(self._waits.values())))
        while_ = f" while waiting for {waits}" if waits else ""
        why = finding.reason or finding.given_up or "every other rank still answers"
        return f"meshweave: rank {self.rank} got {signum.name}{while_}: {why}"

    def _look(self, *, patient: bool, overdue: bool, peers: Iterable[int] | None) -> BlamedRanks:
        """Listen until nobody is in doubt, then judge.

        `patient`: where nobody is to blame yet, listen to the end. A connection has just been closed, and who
        closed it may still be tidying up with its heart beating.
        """
        watch = HeartbeatWatch(self._others, interval_s=self._interval_s, stale_s=self._stale_s)
        start = time.monotonic()
        with self._round:
            self._watches.append(watch)
            self._wake.set()
            try:
                self._listen(watch, start, patient)
            finally:
                self._watches.remove(watch)
            if not self._store_gone and watch.num_rounds:
                return blame(self.rank, watch, self._accused, peers, overdue)
            accused = sorted(self._accused - {self.rank})
        if accused:  # its host left because of these, or with these
            return BlamedRanks(tuple(accused), f"{ranks_text(accused)} stopped answering")
        if self._store_rank is None or self._store_rank == self.rank:
            return BlamedRanks((), "the store is gone (nobody knows which rank hosted it)")
        return BlamedRanks(
            (self._store_rank,), f"rank {self._store_rank}, which hosts the store, stopped answering"
        )

    def _listen(self, watch: HeartbeatWatch, start: float, patient: bool) -> None:
        while not self._store_gone:
            waited_s = time.monotonic() - start
            blamed = watch.silent or watch.in_state("failed") or self._accused
            if not watch.is_undecided and (blamed or not patient or waited_s >= self._settle_s):
                return
            # On a loaded machine the rounds come slowly, but not a single one means that the store hangs.
            if waited_s >= (2 * self._settle_s if watch.num_rounds else self._settle_s):
                return
            self._round.wait(self._interval_s)

    def _announce(self, state: State, detail: str = "", accused: Iterable[int] = ()) -> None:
        """Put our state (the first farewell stays) and whom we accuse into the store, and wait for that."""
        with self._round:
            if self._state == "alive":
                self._state, self._detail = state, detail
            news = set(accused) - self._accused
            self._accused |= news
            self._version += 1
            version, until = self._version, time.monotonic() + self._settle_s
            self._wake.set()
            while self._stored_version < version and not self._store_gone and self._thread.is_alive():
                if time.monotonic() >= until:
                    break
                self._round.wait(self._interval_s)
        if news and self.rank == self._store_rank:
            time.sleep(5 * self._interval_s)  # the store dies with us: let everybody read whom we accuse

    # -- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._beat()
        except (RuntimeError, OSError):
            pass  # clients do not reconnect: whoever waits is told that the store is gone
        finally:
            with self._round:
                self._store_gone = True
                self._round.notify_all()

    def _beat(self) -> None:
        count, last = 0, time.monotonic()
        while True:
            closing = self._closing
            self._wake.clear()
            with self._round:
                version, watched = self._version, bool(self._watches)
                beat, accused = Beat(count, self._state, self._detail), set(self._accused)
            self._store.set(_beat_key(self.rank), beat.encode())
            # Also the round trip that proves that the beat has arrived.
            lost = self._merge_lost(accused)
            beats = self._read_beats() if watched else None
            now = time.monotonic()
            with self._round:
                self._accused |= lost
                self._stored_version = version
                if beats is not None:
                    for watch in self._watches:
                        watch.feed(now - last, beats)
                self._round.notify_all()
            if closing:
                return
            count, last = count + 1, now
            self._wake.wait(self._interval_s)

    def _merge_lost(self, accused: set[int]) -> set[int]:
        """The union of what is in the store and `accused`, in the store afterwards too."""
        while True:
            present = self._store.check([_LOST_KEY])
            old = self._store.get(_LOST_KEY).decode() if present else ""
            in_store = {int(word) for word in old.split()}
            if accused <= in_store:
                return in_store
            new = " ".join(map(str, sorted(in_store | accused)))
            if self._store.compare_set(_LOST_KEY, old, new).decode() == new:
                return in_store | accused

    def _read_beats(self) -> dict[int, Beat | None]:
        self._known.update(
            rank for rank in self._others if rank not in self._known and self._store.check([_beat_key(rank)])
        )
        known = sorted(self._known)
        values = self._store.multi_get([_beat_key(rank) for rank in known]) if known else []
        return {rank: Beat.decode(value) for rank, value in zip(known, values, strict=True)}


def _beat_key(rank: int) -> str:
    return f"meshweave/hb/{rank}"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:500]
