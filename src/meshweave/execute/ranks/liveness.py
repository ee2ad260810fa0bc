"""Who is still there: heartbeats in the store, a deadline on every wait, an error that names the missing.

A rank that dies takes its connections along, and the ranks that notice first leave with an error and take
theirs along too. What a survivor sees is therefore "connection closed" by *some* neighbour, seldom by the
culprit. Heartbeats settle it. Each rank counts up one key of the `torch.distributed` store; a rank that
leaves for a reason says so in the same key; a rank that is silent without having said anything is lost.

Suspicion alone never raises. Only a wait that has failed or run over its deadline looks at the others, so a
healthy run costs one small `set` and one `check` per rank and interval, however many ranks there are.

Clocks of different hosts are never compared: an observer watches whether a count changes, for as long as it
itself is awake to watch.

Whom a rank accuses is news, one value that every rank reads with each of its heartbeats, and whose digest is in
its next one. A rank that accuses waits until all that still answer have heard it. So they know whom to blame even
where the store ends with the accuser. A rank whose process hosts the store leaves last: it stays until the others
have left, or a little longer than a rank takes to be given up.

What a rank writes is signed, and what is not is ignored; see `signing`.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

from meshweave.base.errors import DeadlineError, MeshweaveError, RankLostError, UnsupportedError
from meshweave.execute.ranks.blame import (
    NO_RANK,
    Beat,
    BlamedRanks,
    HeartbeatWatch,
    News,
    State,
    blame,
    given_up_text,
    ranks_text,
)
from meshweave.execute.ranks.guard import Guard
from meshweave.execute.ranks.heart import Heart, Store, hosts_store
from meshweave.execute.ranks.monitor import PeerMonitor
from meshweave.execute.ranks.signals import SignalReport, write_stderr


class Liveness:
    """This rank's heartbeat, and what it can tell from the heartbeats of the other ranks.

    Args:
        store: the store all ranks share. A connection of its own is cloned from it, so that a blocking `get`
            of the caller cannot hold the heartbeat up. To start over in the same store, wrap it in a
            `PrefixStore`: marks of ranks that have left stay.
        rank: this rank.
        ranks: all ranks that beat in `store`, this one included or not.
        interval_s: seconds between heartbeats.
        stale_s: seconds of silence after which a rank counts as lost. Longer than anything that may hold up a
            healthy process: a paused machine, C code that keeps the GIL.
        deadline_s: seconds that a guarded wait may take by default.
        store_rank: the rank whose process hosts the store, where it is one of the ranks. A rank whose own process
            does finds that out (on Linux), and the others learn it from that rank.
        likely_store_rank: the rank that is taken to host the store where no rank has said that it does.
        is_wanted: called with each heartbeat; once it returns False, this rank leaves in the state "done".

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
        likely_store_rank: int | None = None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        assert 0 < interval_s < stale_s, (interval_s, stale_s)
        self.rank, self.deadline_s, self._is_wanted = rank, deadline_s, is_wanted
        self._stale_s = stale_s
        # Longest wait for the heartbeats to settle while nobody is in doubt.
        self._settle_s = stale_s + max(5 * interval_s, stale_s / 2)
        if store_rank is None:
            store_rank = rank if hosts_store(store) else NO_RANK if rank == likely_store_rank else None
        self._likely_store_rank = likely_store_rank
        self.waits: dict[int, Guard] = {}  # to be named when a signal comes
        self._monitor: PeerMonitor | None = None
        self._verdict: BlamedRanks | None = None  # what the monitor has found
        self.end_process: Callable[[RankLostError], None] | None = None
        """What the monitor ends this process by, where that is not by a line on stderr."""
        self._closed = False
        self._signals: SignalReport | None = None
        self._pid = os.getpid()
        # A connection of its own is cloned from the store, so that no call of others holds a beat up.
        self.heart = Heart(
            store,
            rank,
            sorted(set(ranks) - {rank}),
            interval_s=interval_s,
            stale_s=stale_s,
            news=News(store_rank=store_rank),
            is_wanted=is_wanted,
        )
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
            peers: the ranks waited for; None if unknown. One of these that has finished is to blame for a missed
                deadline too, not only for a wait that broke off.

        Raises (in place of a RuntimeError or OSError from inside):
            RankLostError: some ranks are lost, failed or left early; `missing` names all of them.
            DeadlineError: the wait timed out although every rank still answers, or another rank gave up first.
        """
        return Guard(self, what, self.deadline_s if deadline_s is None else deadline_s, peers)

    def missing(self) -> tuple[int, ...]:
        """Return the ranks that are lost or failed, after reading heartbeats for up to about `stale_s` seconds.

        Where there is none, return the ranks that a signal stopped. A finished rank is not missing, unless it
        hosted the store and the store is gone. Not collective. If all are well it takes two heartbeats of each.

        Raises:
            RankLostError: the store is gone, and nobody knows which rank hosts it.
        """
        finding = self._look(patient=False, overdue=True, peers=None)
        if not finding.missing and finding.reason:
            raise RankLostError(finding.reason, ())
        return finding.missing

    def watch_peers(self, deadline_s: float, end_waits: Callable[[], None]) -> None:
        """Start a thread that ends this process's waits once ranks have ended, or been silent for about
        `deadline_s` seconds.

        Args:
            end_waits: closes the connections of this process; ignored after the first call. The module `monitor`
                says when it is called, and what happens next.
        """
        if self._monitor is None:
            self._monitor = PeerMonitor(self, self._stale_s, end_waits, self.end_process)
        self._monitor.expect_within(deadline_s)

    def find_lost(self, store_hangs: bool = False) -> RankLostError | None:
        """Find out which ranks are lost and tell the others; return an error that names the lost ranks.

        Return None if no rank is to blame, or only ranks that a signal has stopped since this call began, or a
        finished rank whose process hosted the store.

        Args:
            store_hangs: whether the store does not answer, so that listening for heartbeats is of no use.
        """
        finding = self._look(patient=False, overdue=True, peers=None, store_hangs=store_hangs)
        if not finding.missing or finding.has_left:
            return None
        lost = RankLostError(finding.reason, finding.missing)
        self._verdict = finding
        self._announce("lost", f"{_one_line(lost)}{self._while_waiting}", finding.missing)
        return lost

    def check_lost(self) -> None:
        """Raise RankLostError if `find_lost` returned one before; the message says what this process waits for."""
        if self._verdict is not None:
            raise RankLostError(f"{self._verdict.reason}{self._while_waiting}", self._verdict.missing)

    def waits_since(self, seconds: float) -> bool:
        """Return whether some guarded wait of this process is under way for `seconds` or longer."""
        return any(wait.waited_s >= seconds for wait in list(self.waits.values()))

    def install_signal_report(
        self,
        signum: signal.Signals = signal.SIGTERM,
        write: Callable[[str, tuple[int, ...]], None] | None = None,
    ) -> None:
        """Make `signum` report in one line which ranks are missing, then do what the signal did before.

        Launchers end the survivors when one rank dies, often before these have found out why. The report
        comes out even if the main thread is stuck in a C++ wait (one that released the GIL). It delays the
        signal by three heartbeats if all ranks answer, by `stale_s` if one is missing. `write` takes the line
        and the ranks that are missing; by default the line goes to stderr. `close`, if called in the main
        thread too, restores the previous handler.

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
        self._signals = SignalReport(signum, self.signal_line, write or write_stderr)

    @property
    def is_closed(self) -> bool:
        """Return whether this rank has told the others that it leaves, or its store has ended."""
        return self._closed or self.heart.store_gone

    @property
    def can_explain(self) -> bool:
        """Return whether this rank may still find out why a wait failed, even where the store has ended."""
        return not self._closed and self._is_wanted()

    def close(self, error: BaseException | None = None) -> None:
        """Tell the other ranks that this one leaves, for `error` if given, and stop the heartbeat.

        Where this process hosts the store, it first waits for the others to leave: `stale_s / 2` at most after an
        error, otherwise `stale_s` plus the longer of `stale_s / 2` and five heartbeat intervals.
        """
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._close_at_exit)
        if os.getpid() != self._pid:  # a fork: neither the thread nor the rank is here
            return
        if isinstance(error, SystemExit) and not error.code:
            error = None
        if self.heart.has_left and not isinstance(error, RankLostError):
            pass  # the first farewell stays
        elif isinstance(error, RankLostError):
            self._announce("lost", _one_line(error), error.missing)
        elif isinstance(error, DeadlineError):
            self._announce("overdue", _one_line(error))
        elif error is not None:
            self._announce("failed", f"{type(error).__name__}: {_one_line(error)}")
        else:
            self._announce("done")
        if self._hosts_store:  # whatever else it leaves for, the others have heard
            self._wait_for_others(lambda beat: False, self._settle_s if error is None else self._stale_s / 2)
        self.heart.stop(self._settle_s if self.heart.is_beating else 0.0)
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

    def explain(self, wait: Guard, overdue: bool, peers: Iterable[int] | None) -> MeshweaveError | None:
        """Return the error to raise for a failed wait, and report it to the other ranks.

        It is a RankLostError where a rank is to blame, else a DeadlineError where the wait is overdue or another
        rank ran into its own deadline first. None where the wait broke off and no rank is to blame, and always
        where `can_explain` is False.

        Args:
            overdue: whether the wait reached its deadline, instead of breaking off with an error.
            peers: the ranks waited for; None if unknown.
        """
        if not self.can_explain:
            return None
        waited_s = wait.waited_s
        finding = self._look(patient=not overdue, overdue=overdue, peers=peers)
        pause = self.heart.last_pause
        since = time.monotonic() - wait.waited_s - wait.deadline_s  # an earlier wait may have had its answers
        was_paused = self._hosts_store and pause.resumed_at and pause.resumed_at >= since
        if was_paused and not all(map(self.heart.has_beaten_since_pause, finding.missing)):
            # The store was stopped with this rank, and those could not say that they left because of it.
            finding = BlamedRanks((self.rank,), f"{given_up_text(self.rank)} for {pause.length_s:.0f} s")
        if finding.reason:
            lost = RankLostError(f"{finding.reason} while waiting for {wait.what}", finding.missing)
            self._announce("lost", _one_line(lost), finding.missing)
            return lost
        if not overdue and not finding.given_up:
            return None
        why = finding.given_up or "every rank still answers"
        if wait.unheard and not finding.given_up:
            why = f"{ranks_text(wait.unheard)} did not come, and {why}"
        late = DeadlineError(f"gave up waiting for {wait.what} after {waited_s:.1f} s: {why}")
        self._announce("overdue", _one_line(late))
        return late

    def signal_line(self, signum: signal.Signals, ignored: bool) -> tuple[str, tuple[int, ...]]:
        """Return (the line to report on `signum`, the lost ranks), after listening for up to about 2 `stale_s`.

        It also tells the other ranks which are lost (up to 1.5 `stale_s` seconds more); if none is, that this rank
        was stopped, unless `ignored`: the process ignores the signal. Ranks that left are only named in the line.
        """
        waiting = self._while_waiting
        finding = self._look(patient=False, overdue=True, peers=None)
        why = finding.reason or finding.given_up or "every other rank still answers"
        missing = () if finding.has_left else finding.missing
        if missing:
            self._announce("lost", why, missing)
        elif not ignored:
            self._announce("stopped", signum.name)
        return f"meshweave: rank {self.rank} got {signum.name}{waiting}: {why}", missing

    @property
    def _while_waiting(self) -> str:
        waits = " and ".join(sorted({wait.what for wait in list(self.waits.values())}))
        return f" while waiting for {waits}" if waits else ""

    def _look(
        self, *, patient: bool, overdue: bool, peers: Iterable[int] | None, store_hangs: bool = False
    ) -> BlamedRanks:
        """Listen until nobody is in doubt, then judge.

        `patient`: where nobody is to blame yet, listen to the end. A connection has just been closed, and who
        closed it may still be tidying up with its heart beating.
        """
        if self._verdict is not None:
            return self._verdict
        heart, start = self.heart, time.monotonic()
        with heart.watch() as watch:
            if not store_hangs:
                self._listen(watch, start, patient)
            news, paused_s = heart.news, heart.paused_s
            if not heart.store_gone and watch.num_rounds:
                return blame(self.rank, watch, news.lost, peers, overdue)
        host = self._likely_store_rank if news.store_rank is None else news.store_rank
        if self.rank in news.lost or (heart.store_gone and paused_s and host != self.rank):
            paused = f" for {paused_s:.0f} s" if paused_s else ""
            missing = tuple(sorted(news.lost | {self.rank}))
            return BlamedRanks(missing, f"{given_up_text(self.rank)}{paused}")
        if news.lost:  # the store's host left because of these, or with these
            return BlamedRanks(tuple(sorted(news.lost)), f"{ranks_text(news.lost)} stopped answering")
        if host in (None, NO_RANK, self.rank):
            return BlamedRanks((), "the store is gone (nobody knows which rank hosted it)")
        state, _, detail = news.farewell.partition(" ")
        if state == "overdue":
            return BlamedRanks((), "", f"rank {host} gave up first ({detail})")
        if state == "failed":
            return BlamedRanks((host,), f"rank {host} failed ({detail})")
        if state == "done":
            return BlamedRanks((host,), f"rank {host} left early", has_left=True)
        return BlamedRanks((host,), f"rank {host}, which hosts the store, stopped answering")

    def _listen(self, watch: HeartbeatWatch, start: float, patient: bool) -> None:
        heart = self.heart
        while not heart.store_gone:
            waited_s = time.monotonic() - start
            blamed = watch.silent or watch.in_state("failed") or heart.news.lost
            if watch.num_rounds and heart.news.lost:  # others have listened
                return
            if not watch.is_undecided and (blamed or not patient or waited_s >= self._settle_s):
                return
            # On a loaded machine the rounds come slowly, but not a single one means that the store hangs.
            if waited_s >= 2 * self._stale_s or (waited_s >= self._stale_s and not watch.num_rounds):
                return
            heart.wait_for_beat()

    @property
    def _hosts_store(self) -> bool:
        return self.heart.news.store_rank == self.rank

    def _announce(self, state: State, detail: str = "", accused: Iterable[int] = ()) -> None:
        """Put our state (the first farewell stays) and whom we accuse into the store, until all have heard it."""
        heart = self.heart
        farewell = f"{state} {detail}" if self._hosts_store else ""
        if heart.announce(state, detail, News(frozenset(accused), farewell=farewell), self._stale_s):
            self._wait_for_others(lambda beat: beat.heard == heart.news.digest, self._stale_s / 2)

    def _wait_for_others(self, is_enough: Callable[[Beat], bool], limit_s: float) -> None:
        """Wait until each rank that still answers has beaten with a beat that is enough, or has left."""
        heart, until = self.heart, time.monotonic() + limit_s
        with heart.watch() as watch:
            while heart.is_beating and time.monotonic() < until:
                lost = heart.news.lost.union(watch.silent)
                if watch.num_rounds and not any(
                    beat is not None and beat.state == "alive" and rank not in lost and not is_enough(beat)
                    for rank, beat in watch.beats.items()
                ):
                    break
                heart.wait_for_beat()


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:500]
