"""The heartbeat of this process: a thread that writes its own into the store and reads those of the others.

With each beat it reads the news, too, and with a watch the heartbeats of all ranks. All traffic of a `Liveness`
with the store is this thread's: a store whose host vanished may block a call for good, and then only the thread is
stuck, and everybody else can tell by its rounds.
"""

from __future__ import annotations

import contextlib
import operator
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from meshweave.execute.ranks.blame import Beat, HeartbeatWatch, News, State
from meshweave.execute.ranks.patience import join_talker
from meshweave.execute.ranks.peers import PeerProcesses, own_process
from meshweave.execute.ranks.signing import sign, verify

_NEWS_KEY = "meshweave/news"
_MOST_PROCESSES = 256  # that one beat looks for


class Store(Protocol):
    """The part of `torch.distributed.Store` that is needed here."""

    def set(self, key: str, value: str, /) -> None:
        """Write the value of a key."""

    def get(self, key: str, /) -> bytes:
        """Return the value of `key`; block until the key has one."""

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys have values."""

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """Return the values of `keys`, in their order; block until all have one."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Write `desired` if the value of `key` is `expected` ("": no value yet); return the value afterwards."""


@dataclass
class Pause:
    """A time in which this process was suspended, by a signal or with the whole machine.

    Attributes:
        resumed_at: when the process went on (monotonic seconds); 0 where it has never been suspended.
        length_s: how long it was suspended, in seconds.
        counts: the number of each other rank's heartbeat at the first reading afterwards; None before that.
    """

    resumed_at: float
    length_s: float
    counts: dict[int, int] | None = None


class Heart:
    """The thread of a rank that writes its heartbeat and reads the others'. Hold `round` to read or change state.

    A beat is one round of the thread: write the own heartbeat, merge the news, read watched ranks' heartbeats.

    Args:
        others: the other ranks that send heartbeats through `store`.
        stale_s: seconds without an answer of the store, or a new heartbeat of a rank, that are too long.
        news: what this rank knows at the start.
        is_wanted: asked before each beat; once it returns False, the beat is the last, with the state "done".

    Attributes:
        interval_s: seconds between beats.
        round: a condition, notified after each beat.
        news: what this rank knows, merged with what it has read in the store.
        store_gone: whether the store has ended, or the thread has stopped without being told to.
        paused_s: how long this process was suspended before the beat that is under way, in seconds; else 0.
        num_rounds: number of beats so far.
        last_pause: the last suspension of this process.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        others: Iterable[int],
        *,
        interval_s: float,
        stale_s: float,
        news: News,
        is_wanted: Callable[[], bool],
    ) -> None:
        self._rank, self._others = rank, tuple(others)
        self.interval_s, self._stale_s, self._is_wanted = interval_s, stale_s, is_wanted
        self.round = threading.Condition()
        self.news, self.store_gone, self.paused_s = news, False, 0.0
        self.last_pause = Pause(0.0, 0.0)
        self.num_rounds = 0
        self._wake = threading.Event()
        self._watches: list[HeartbeatWatch] = []
        self._last_beats: dict[int, Beat] = {}  # of others that have beaten: reading them cannot block
        self._peers, self._sought = PeerProcesses(), frozenset[int]()
        self._state: State = "alive"
        self._detail = ""
        # Of our state and news: the current, and the last in the store.
        self._version = self._stored_version = 0
        self._last_round = self._answered_at = time.monotonic()
        self._closing = False
        self._thread = threading.Thread(
            target=self._run, args=(store,), name="meshweave-liveness", daemon=True
        )
        self._thread.start()

    @contextlib.contextmanager
    def watch(self) -> Iterator[HeartbeatWatch]:
        """Yield a watch of all other ranks' heartbeats, which every beat updates until the block ends.

        The block runs with `round` held, without which no beat can end: `wait_for_beat` releases it meanwhile.
        """
        with self.round:
            watch = self.add_watch(self._others, self._stale_s)
            try:
                yield watch
            finally:
                self._watches.remove(watch)

    def add_watch(self, ranks: Iterable[int], stale_s: float) -> HeartbeatWatch:
        """Return a watch of the heartbeats of `ranks` that every beat updates from now on.

        In it a rank counts as silent after `stale_s` seconds without a new heartbeat.
        """
        watch = HeartbeatWatch(ranks, interval_s=self.interval_s, stale_s=stale_s)
        self._watches.append(watch)
        self._wake.set()
        return watch

    def next_ranks(self, count: int) -> tuple[int, ...]:
        """Return the next `count` ranks after this one in a ring of all ranks; fewer where there are fewer others.

        For example rank 2 of 0..3 and a count of 2 -> (3, 0).
        """
        later = [rank for rank in self._others if rank > self._rank]
        return (*later, *self._others[: len(self._others) - len(later)])[:count]

    def wait_for_beat(self) -> None:
        """Wait for the end of the next beat, `interval_s` seconds at most. The caller must hold `round`."""
        self.round.wait(self.interval_s)

    def ended(self, ranks: Iterable[int]) -> list[int]:
        """Return those of `ranks` whose processes, on this host, are known to have ended.

        A process that is not known yet is looked up at the next beat.
        """
        ranks = set(ranks)
        if unknown := self._peers.unknown(ranks):
            self._sought = frozenset(unknown)
        return self._peers.ended(ranks)

    def has_beaten_since_pause(self, rank: int) -> bool:
        """Return whether `rank` has surely written a heartbeat since this process was last suspended and went on.

        It takes two heartbeats after the first reading: one may have been written before and arrive late.
        """
        first, beat = (self.last_pause.counts or {}).get(rank), self._last_beats.get(rank)
        return first is not None and beat is not None and beat.count >= first + 2

    @property
    def is_beating(self) -> bool:
        """Return whether the thread runs, has its store, and ended a beat in the last `stale_s` seconds.

        Before the first beat ends, the time counts from the start of the thread.
        """
        is_stuck = time.monotonic() - self._last_round > self._stale_s
        return not (self.store_gone or is_stuck) and self._thread.is_alive()

    @property
    def has_left(self) -> bool:
        """Return whether this rank's state is other than "alive"; the store may not have the new state yet."""
        return self._state != "alive"

    def announce(self, state: State, detail: str, news: News, limit_s: float) -> bool:
        """Write this rank's state and `news` into the store; return whether the news were new to this rank.

        It waits `limit_s` seconds at most until they are stored. Once the state is not "alive", it stays.
        """
        with self.round:
            if self._state == "alive":
                self._state, self._detail = state, detail
            before = self.news
            self.news = before.merge(news)
            is_new = self.news != before
            self._version += 1
            version, until = self._version, time.monotonic() + limit_s
            self._wake.set()
            while self._stored_version < version and self.is_beating and time.monotonic() < until:
                self.wait_for_beat()
        return is_new

    def stop(self, limit_s: float) -> None:
        """Beat once more and end the thread; wait for it `limit_s` seconds, 5 more if the store is just slow."""
        self._closing = True
        self._wake.set()
        join_talker(self._thread, limit_s, lambda: self._answered_at)

    # -- the thread ------------------------------------------------------------------------------------------

    def _run(self, store: Store) -> None:
        try:
            clone: Callable[[], Store] | None = getattr(store, "clone", None)
            if clone is not None:
                store = clone()
            self._beat(store)
        except (RuntimeError, OSError):
            pass  # clients do not reconnect: whoever waits is told that the store is gone
        finally:
            with self.round:
                self.store_gone = not self._closing
                self.round.notify_all()

    def _beat(self, store: Store) -> None:
        count, last = 0, time.monotonic()
        store.set(_process_key(self._rank), sign(_process_key(self._rank), own_process()))
        while True:
            closing = self._closing or not self._is_wanted()
            self._wake.clear()
            with self.round:
                if closing and self._state == "alive":
                    self._state = "done"
                version, watches, news = self._version, tuple(self._watches), self.news
                beat = Beat(count, self._state, self._detail, news.digest)
            store.set(_beat_key(self._rank), sign(_beat_key(self._rank), beat.encode()))
            self._answered_at = time.monotonic()
            # Also the round trip that proves that the beat has arrived.
            news = _merge_news(store, news)
            watched = sorted({rank for watch in watches for rank in watch.beats})
            if len(watched) <= _MOST_PROCESSES:
                self._sought |= frozenset(watched)
            self._find_processes(store)
            ended = self._peers.ended(watched)  # before their last words are read
            if self.last_pause.resumed_at and self.last_pause.counts is None:
                read, _ = self._read_beats(store, self._others)
                self.last_pause.counts = {rank: beat.count for rank, beat in read.items() if beat is not None}
            beats, unreadable = self._read_beats(store, watched)
            now = time.monotonic()
            with self.round:
                is_new = news.merge(self.news) != self.news
                self.news = self.news.merge(news)
                self.num_rounds += 1
                self._stored_version, self.paused_s, self._last_round = version, 0.0, now
                self._answered_at = now
                for watch in watches:
                    watch.feed(now - last, beats, unreadable, ended)
                self.round.notify_all()
            if closing:
                return
            count, last = count + 1, now
            if not is_new:  # else say at once that it was heard
                self._wake.wait(self.interval_s)
                slept_s = time.monotonic() - now
                if slept_s > self.interval_s + self._stale_s:  # a signal has stopped this process, perhaps
                    self.paused_s, self.last_pause = slept_s, Pause(time.monotonic(), slept_s)

    def _read_beats(self, store: Store, ranks: Sequence[int]) -> tuple[dict[int, Beat | None], set[int]]:
        """The last heartbeat of each of `ranks`, and those whose value is none of this run, or an old one."""
        keys = {rank: _beat_key(rank) for rank in ranks}
        known = [rank for rank in ranks if rank in self._last_beats or store.check([keys[rank]])]
        values = store.multi_get([keys[rank] for rank in known]) if known else []
        unreadable = set()
        for rank, value in zip(known, values, strict=True):
            text, last = verify(keys[rank], value), self._last_beats.get(rank)
            try:
                beat = Beat.decode(text or "")
            except ValueError:
                beat = None
            if beat is None or (last is not None and beat.count < last.count):
                unreadable.add(rank)
            else:
                self._last_beats[rank] = beat
        return {rank: self._last_beats.get(rank) for rank in ranks}, unreadable

    def _find_processes(self, store: Store) -> None:
        """Look for the processes that somebody waits for."""
        for rank in self._peers.unknown(self._sought) if self._sought else ():
            key = _process_key(rank)
            words = verify(key, store.get(key)) if store.check([key]) else None
            if words is not None:
                self._peers.add(rank, words)
        self._sought = frozenset()


def _merge_news(store: Store, ours: News) -> News:
    """Return the news of the store and ours, which are in the store afterwards, too."""
    while True:
        value = store.get(_NEWS_KEY) if store.check([_NEWS_KEY]) else b""
        text = verify(_NEWS_KEY, value) if value else None
        try:
            theirs = News.decode(text) if text else News()
        except ValueError:
            theirs = News()
        news = theirs.merge(ours)
        if news == theirs:
            return news
        desired = sign(_NEWS_KEY, news.encode())
        if store.compare_set(_NEWS_KEY, value.decode(errors="replace"), desired).decode() == desired:
            return news


def innermost_store(store: Any) -> Any:
    """Return the store inside of all PrefixStores around it; `store` itself where it is not wrapped."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return store


def hosts_store(store: Any) -> bool:
    """Return whether this process is the server of `store`, a TCPStore, bare or in PrefixStores.

    Always False where the system is not Linux.
    """
    port = getattr(innermost_store(store), "port", None)
    if port is None or not sys.platform.startswith("linux"):
        return False
    listening = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/thread-self/net/{table}").read_text().splitlines()[1:]:
                local, state, inode = operator.itemgetter(1, 3, 9)(line.split())
                if state == "0A" and local.endswith(f":{port:04X}"):
                    listening.add(f"socket:[{inode}]")
    for entry in os.scandir("/proc/self/fd") if listening else ():
        with contextlib.suppress(OSError):
            if str(Path(entry.path).readlink()) in listening:
                return True
    return False


def _beat_key(rank: int) -> str:
    return f"meshweave/hb/{rank}"


def _process_key(rank: int) -> str:
    return f"meshweave/process/{rank}"
