"""Watching calls that take long: each rank writes its call under way into the store, and compares it there.

A thread of the process checks ten times a second. A call that it sees twice is one that waits, or that computes
for long: the rank writes a record of its calls into the store and reads those of the other ranks of the call.
Calls are out of order where another rank did something else in the call of the same number, or where ranks wait
for each other in calls among different ranks, in a circle. Both are facts, no guesses from time: what a call was
does not change afterwards, and each rank of a circle has been seen twice in the same call.

The rank that notices writes the verdict into its record, for those who wait for it elsewhere, and ends its own
waits: those that poll see the verdict, and connections of gloo are closed, as by a timeout.
"""

from __future__ import annotations

import atexit
import json
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from meshweave.execute.ranks.blame import ranks_text
from meshweave.execute.ranks.patience import join_talker
from meshweave.execute.torch.call_records import REFUSED, ContextCalls, SharedCalls
from meshweave.execute.torch.context import TorchContext
from meshweave.execute.torch.world import SignedStore, close_connections, signed_store

TICK_S = 0.1
"""Seconds between two checks of the calls under way in this process."""

_LONGEST_PAUSE_S = 1.0
_REPLY_S = 1.0  # how long a failed wait is kept for a look at the others
_NUM_PEERS = 32  # whose records one look reads, in turns where there are more
_NUM_LISTED = 16  # calls of a sequence in a record

Record = Mapping[str, Any]
"""The calls of a rank: its "rank", "serial" and "beat" (a count of records), the "current" call or None, its
"sequences" with their last calls, and the "verdict"."""


def record_key(token: str) -> str:
    """Return the store's key for the record of calls of the context that `token` names."""
    return f"meshweave/calls/{token}"


class CallWatch:
    """The thread of a process that watches the calls of its contexts, for one default process group."""

    def __init__(self, world: Any) -> None:
        self._world = weakref.ref(world)
        self._watched: weakref.WeakSet[WatchedCalls] = weakref.WeakSet()
        self._requests: list[tuple[WatchedCalls, threading.Event]] = []
        self._lock, self._wake = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None  # the last one
        self._is_running = self._is_closed = False
        self._answered_at = time.monotonic()

    @classmethod
    def of_world(cls, world: Any) -> CallWatch:
        """Return the watch of `world`, the present default process group; close that of an earlier group."""
        global _watch
        if _watch is None or _watch._world() is not world:
            _close()
            _watch = cls(world)
        return _watch

    def add(self, watched: WatchedCalls) -> None:
        """Watch the calls of a context from now on."""
        with self._lock:
            self._watched.add(watched)
            if not self._is_running:
                # All traffic with the store is the thread's: where its host is stopped, only the thread is stuck.
                store = signed_store()
                self._thread = threading.Thread(
                    target=self._run, args=(store,), name="meshweave-calls", daemon=True
                )
                self._is_running = True
                self._thread.start()

    def remove(self, watched: WatchedCalls) -> None:
        """Stop watching the calls of a context; the thread ends when none is left."""
        with self._lock:
            self._watched.discard(watched)
        self._wake.set()

    def look_now(self, watched: WatchedCalls) -> None:
        """Have the thread compare the call under way in a context with other ranks' at once; wait 1 s at most
        for that.
        """
        done = threading.Event()
        with self._lock:
            if not self._is_running:
                return
            self._requests.append((watched, done))
        self._wake.set()
        done.wait(_REPLY_S)

    def close(self) -> None:
        """Tell the thread to end, and wait for it: up to 1 s, or 6 s where the store has answered lately.

        A thread that hangs in a call of the store goes on alone.
        """
        self._is_closed = True
        self._wake.set()
        if self._thread is not None:  # also where it has just nothing left to do: it has a store to let go of
            join_talker(self._thread, 1.0, lambda: self._answered_at)

    def _run(self, store: SignedStore) -> None:
        try:
            store = store.clone()
            while not self._is_over():
                self._wake.wait(TICK_S)
                self._wake.clear()
                self._look(store)
        except (RuntimeError, OSError):
            pass  # the store is gone, and with it the others' records
        finally:
            with self._lock:
                if self._thread is threading.current_thread():
                    self._is_running = False
                for _, done in self._requests:
                    done.set()

    def _look(self, store: SignedStore) -> None:
        """Look at the calls of all contexts, those of requests first; nothing holds a context from then on."""
        with self._lock:
            requests, self._requests = self._requests, []
            listed = list(self._watched)
        try:
            for watched, _ in requests:
                watched.look(store, is_urgent=True)
            for watched in listed:
                watched.look(store)
                self._answered_at = time.monotonic()
        finally:
            for _, done in requests:
                done.set()

    def _is_over(self) -> bool:
        world = self._world()
        if self._is_closed or world is None or dist.group.WORLD is not world:
            return True
        with self._lock:
            if not self._watched and not self._requests:
                self._is_running = False
                return True
        return False


_watch: CallWatch | None = None


@atexit.register
def _close() -> None:
    if _watch is not None:  # a daemon thread in C++ must not meet the interpreter's end
        _watch.close()


@dataclass(frozen=True)
class _Seen:
    """A rank in a circle of waits, as it was seen once."""

    token: str
    serial: int
    beat: int


class WatchedCalls:
    """The calls of a context as the watch sees them. Other threads call only `publish` and `close`."""

    def __init__(self, order: ContextCalls, context: TorchContext) -> None:
        self._order, self._context = order, weakref.ref(context)
        self._serial = -1  # of the call that the last look saw
        self._beat = 0
        self._due = self._pause_s = 0.0
        self._is_listed = False  # whether the record in the store says that this rank waits
        self._next_peer = 0
        self._abort_lock, self._is_closed = threading.Lock(), False
        self._circle: tuple[_Seen, ...] = ()

    def record(self) -> Record:
        """Return the record of this rank's calls to put into the store; "beat" numbers the records made."""
        order = self._order
        current = order.current
        self._beat += 1
        sequences = [
            [
                list(ranks),
                sequence.count,
                [[n, k.key, k.title, k.refusal] for n, k in list(sequence.recent)[-_NUM_LISTED:]],
            ]
            for ranks, sequence in list(order.sequences.items())
        ]
        return {
            "rank": order.rank,
            "serial": order.serial,
            "beat": self._beat,
            "verdict": order.verdict,
            "current": None if current is None else self._call(current),
            "sequences": sequences,
        }

    def publish(self, store: Any) -> None:
        """Write the record of this rank into `store`."""
        store.set(record_key(self._order.token), json.dumps(self.record()))

    def _call(self, sequence: SharedCalls) -> dict[str, Any]:
        number, kind = sequence.recent[-1]
        tokens = {str(rank): token for rank, token in self._tokens(sequence).items()}
        return {"ranks": list(sequence.ranks), "number": number, "title": kind.title, "tokens": tokens}

    def _tokens(self, sequence: SharedCalls) -> dict[int, str]:
        """Return the tokens of the ranks of a sequence, from other sequences where they have yet to agree."""
        known: dict[int, str] = {}
        for other in list(self._order.sequences.values()):
            known.update(other.tokens)
        known.update(sequence.tokens)
        return {rank: known[rank] for rank in sequence.ranks if rank in known}

    def look(self, store: Any, *, is_urgent: bool = False) -> None:
        """Compare the call under way with other ranks', if the last `look` saw the same call.

        Comparisons of one call are 0.1 s apart at first, and up to 1 s later. Each writes this rank's record.
        Where calls are out of order, or another rank has refused the call or has a verdict, the verdict is
        written to the store and this rank's waits end. Nothing is compared after a verdict.

        Args:
            store: where the ranks' records are.
            is_urgent: compare at once, because a wait has failed.
        """
        order = self._order
        sequence, serial = order.current, order.serial
        was_seen, self._serial = serial == self._serial, -1 if sequence is None else serial
        if sequence is None or not (was_seen or is_urgent):
            self._due, self._pause_s = 0.0, TICK_S
            if self._is_listed:
                self.publish(store)
                self._is_listed = False
            return
        now = time.monotonic()
        if order.verdict or (now < self._due and not is_urgent):
            return
        self._due, self._pause_s = now + self._pause_s, min(2 * self._pause_s, _LONGEST_PAUSE_S)
        self.publish(store)
        self._is_listed = True
        number, _ = sequence.recent[-1]
        verdict = self._judge(store, sequence, number)
        if verdict and order.serial == serial and order.current is sequence:
            order.verdict = verdict
            self.publish(store)
            self._abort_waits()

    # -- judging ---------------------------------------------------------------------------------------------

    def _judge(self, store: Any, sequence: SharedCalls, number: int) -> str:
        """Return why the call `number` of a sequence is out of order, "" if nothing says so."""
        records = {}
        for rank, token in self._peers(sequence):
            record = _read(store, token)
            if record is not None:
                records[rank] = record
        kind = sequence.recent[-1][1]
        failed = {called for called, own in list(sequence.recent) if own.refusal}
        parties: dict[tuple[str, str], list[int]] = {(kind.key, kind.title): [self._order.rank]}
        for rank, record in records.items():
            for called, key, title, refusal in _listed(record, sequence.ranks):
                # A program that failed on that rank alone ends later calls, too: they are out of step.
                is_here = called == number or (called < number and key != REFUSED and called not in failed)
                if refusal and is_here:
                    verb = "refuses" if key == REFUSED else "failed in"
                    return f"rank {rank} {verb} {title} (call {called}): {refusal}"
                if called == number:
                    parties.setdefault((key, title), []).append(rank)
        if len({key for key, _ in parties}) > 1:
            return out_of_order(parties, number)
        for record in records.values():
            if record["verdict"]:
                return str(record["verdict"])
        return self._circular(store, sequence)

    def _peers(self, sequence: SharedCalls) -> list[tuple[int, str]]:
        """Return the ranks to look at now with the tokens of their records, others at the next look."""
        others = sorted((r, token) for r, token in self._tokens(sequence).items() if r != self._order.rank)
        if len(others) <= _NUM_PEERS:
            return others
        start = self._next_peer % len(others)
        self._next_peer = start + _NUM_PEERS
        return (others + others)[start : start + _NUM_PEERS]

    def _circular(self, store: Any, sequence: SharedCalls) -> str:
        """Return in words the circle of waits that this rank is in, once all its ranks were seen in it twice."""
        own = json.loads(json.dumps(self.record()))
        token = self._order.token
        circle = next(_circles(store, [(token, own)], {token}), [])
        seen = tuple(_Seen(token, record["serial"], record["beat"]) for token, record in circle)
        before, self._circle = self._circle, seen
        same = [(old.token, old.serial) for old in before] == [(new.token, new.serial) for new in seen]
        if not seen or not same or any(old.beat >= new.beat for old, new in zip(before, seen, strict=True)):
            return ""
        waits = ", ".join(
            f"rank {record['rank']} is in {record['current']['title']} with {_among(record)}"
            for _, record in circle
        )
        return f"calls are out of order, and ranks wait for each other: {waits}"

    def close(self) -> None:
        """Stop ending the context's waits: its process groups are about to be destroyed."""
        with self._abort_lock:
            self._is_closed = True

    def _abort_waits(self) -> None:
        """End the waits of this rank: close the connections of the context's groups, as a timeout of gloo does."""
        context = self._context()
        if context is None:
            return
        for ranks, group in context.groups():
            if self._order.rank in ranks:
                with self._abort_lock:
                    if not self._is_closed:
                        close_connections([group])


def out_of_order(parties: Mapping[tuple[str, str], list[int]], number: int) -> str:
    """Return the sentence of an error that says which ranks did what in call `number`.

    `parties` is {(key, title) of a `CallKind`: the global ranks that did this in the call}.
    """
    titles = [title for _, title in parties]
    sides: list[str] = []
    for (key, title), ranks in sorted(parties.items(), key=lambda party: min(party[1])):
        text = f"{title}, bound as {key}" if titles.count(title) > 1 else title
        verb = ("is" if len(ranks) == 1 else "are") + " in" if not sides else "in"
        sides.append(f"{ranks_text(ranks)} {verb} {text} (call {number})")
    return f"calls are out of order: {', '.join(sides)}"


def _among(record: Record) -> str:
    others = [rank for rank in record["current"]["ranks"] if rank != record["rank"]]
    return f"{ranks_text(others)} (call {record['current']['number']})"


def _read(store: Any, token: str) -> Record | None:
    key = record_key(token)
    if not store.check([key]):
        return None
    record: Record = json.loads(store.get(key))
    return record


def _count(record: Record, ranks: list[int]) -> int:
    """Return the calls that a rank has begun among `ranks`."""
    return next((count for members, count, _ in record["sequences"] if members == ranks), 0)


def _listed(record: Record, ranks: tuple[int, ...]) -> list[tuple[int, str, str, str]]:
    """Return (number, key, title, refusal) of the last calls among `ranks`, as far as the record has them."""
    return next((recent for members, _, recent in record["sequences"] if members == list(ranks)), [])


def _circles(
    store: Any, path: list[tuple[str, Record]], visited: set[str]
) -> Iterator[list[tuple[str, Record]]]:
    """Yield circles of ranks that each wait, in a call of its own, for the next, which has not begun that call.

    Args:
        path: (token, record) of ranks that wait for each other so far, the first of which closes the circle.
        visited: tokens that lead nowhere else.
    """
    record = path[-1][1]
    current = record["current"]
    if current is None:
        return
    first = path[0][1]
    for rank in current["ranks"]:
        if rank == record["rank"]:
            continue
        if len(path) > 1 and rank == first["rank"]:
            if _count(first, current["ranks"]) < current["number"]:
                yield path
            continue
        token = current["tokens"].get(str(rank))
        if token is None or token in visited or len(visited) > _NUM_PEERS:
            continue
        visited.add(token)
        other = _read(store, token)
        if other is None or other["current"] is None or other["current"]["ranks"] == current["ranks"]:
            continue
        if _count(other, current["ranks"]) < current["number"]:
            yield from _circles(store, [*path, (token, other)], visited)
