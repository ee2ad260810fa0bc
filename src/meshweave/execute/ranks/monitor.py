"""A thread that notices lost ranks beside whatever the process does, and ends its waits for them.

Waits of meshweave's own have guards. A collective that torch runs by itself (the redistribution of a DTensor, the
norm of gradients, FSDP2) has none, and one over gloo that waits for a stopped process does not come back. So each
process watches the ranks next to it in a circle. Whom it finds silent or ended it looks for once more, with all
others, and tells all: whom anybody accuses is in the news that every heart reads.

A lost rank alone ends nothing: this process may not need it any more. Only where it has waited for half a second
are the connections of its groups closed, which ends waits over gloo with an error. What still waits a second later
cannot be helped but by ending the process, in one line that names the lost ranks and the place.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Protocol

from meshweave.base.errors import RankLostError
from meshweave.execute.ranks.heart import Heart
from meshweave.execute.ranks.signals import write_stderr

LOST_STATUS = os.EX_TEMPFAIL
"""The exit status of a process that its monitor ended, 75: start it again."""

_NUM_WATCHED = 2  # ranks that each rank watches
_LOOK_S = 0.1
_WAITING_S = 0.5  # in one place, after which waits are ended
_HELPLESS_S = 1.5  # in one place, after which the process is
_CLOCK_OF_A_THREAD = 6  # in the last three bits of a clock's number: CPUCLOCK_PERTHREAD_MASK | CPUCLOCK_SCHED


class MonitoredRank(Protocol):
    """What a monitor asks of its rank's `Liveness`."""

    heart: Heart
    rank: int

    @property
    def can_explain(self) -> bool:
        """Return whether this rank may still find out why a wait failed."""

    def find_lost(self, store_hangs: bool = False) -> RankLostError | None:
        """Find out which ranks are lost and tell the others; return an error that names the lost ranks.

        Return None if no rank is to blame, or only ranks that a signal has stopped since this call began, or a
        finished rank whose process hosted the store. `store_hangs`: the store does not answer, so do not listen
        for heartbeats.
        """

    def waits_since(self, seconds: float) -> bool:
        """Return whether some guarded wait of this process is under way for `seconds` or longer."""


class PeerMonitor:
    """The monitor of one `Liveness`: a thread that looks for lost ranks, and then ends this process's waits.

    The thread ends when the `Liveness` can explain no wait any more (`can_explain`), and when the store is gone
    and no rank is found lost. Once ranks are lost it runs until the process ends.

    Args:
        listens_s: seconds that it takes to listen to the heartbeats of all other ranks where one is silent; a part
            of the time that `expect_within` gives.
        end_waits: closes the connections of this process, so that waits over them fail.
        end_process: ends this process; takes the error that names the lost ranks. None for `end_with_line`.
    """

    def __init__(
        self,
        liveness: MonitoredRank,
        listens_s: float,
        end_waits: Callable[[], None],
        end_process: Callable[[RankLostError], None] | None = None,
    ) -> None:
        self._liveness, self._end_waits = liveness, end_waits
        self._end_process = end_process or end_with_line
        heart = liveness.heart
        self._limit_s, self._listens_s = math.inf, listens_s
        self._watch = heart.add_watch(heart.next_ranks(_NUM_WATCHED), math.inf)
        self._thread = threading.Thread(target=self._run, name="meshweave-monitor", daemon=True)
        self._thread.start()

    def expect_within(self, deadline_s: float) -> None:
        """Count ranks as lost about `deadline_s` seconds after their last heartbeat.

        Of these, the last `listens_s` seconds are spent on listening to all ranks, which begins after three
        heartbeat intervals at the earliest, so short deadlines count as longer. The shortest deadline given so
        far holds.
        """
        self._limit_s = min(self._limit_s, max(deadline_s, self._listens_s))
        least_s = 3 * self._liveness.heart.interval_s
        self._watch.stale_s = max(self._limit_s - self._listens_s, least_s)

    def _run(self) -> None:
        liveness, cleared = self._liveness, frozenset[int]()
        rounds, quiet_s, last = -1, 0.0, time.monotonic()
        heart = liveness.heart
        while liveness.can_explain:
            time.sleep(heart.interval_s)
            now = time.monotonic()
            # No more than that: a signal may have stopped this process, and no clock.
            quiet_s = quiet_s + min(now - last, 2 * heart.interval_s) if heart.num_rounds == rounds else 0.0
            rounds, last = heart.num_rounds, now
            suspects = frozenset(self._watch.suspects) | heart.news.lost
            is_quiet = heart.store_gone or quiet_s >= self._limit_s
            if is_quiet:
                suspects |= {liveness.rank}  # or the host of the store
            if not suspects - cleared:
                cleared &= suspects
                continue
            lost = liveness.find_lost(store_hangs=is_quiet)
            if lost is not None:
                self._end_stuck_waits(lost)
            if lost is not None or heart.store_gone:
                return
            cleared = suspects

    def _end_stuck_waits(self, lost: RankLostError) -> None:
        waits = _WaitingThreads()
        while True:
            time.sleep(_LOOK_S)
            waits.look()
            if waits.longest_s >= _HELPLESS_S:
                self._end_process(RankLostError(f"{lost} while waiting at {waits.place}", lost.missing))
            if waits.longest_s >= _WAITING_S or self._liveness.waits_since(_WAITING_S):
                self._end_waits()


class _WaitingThreads:
    """The threads of this process that are in torch's or meshweave's waits for other ranks, seen from outside.

    Attributes:
        longest_s: the longest that one of them has been at the same instruction without computing.
        place: where that one is: the innermost line that is neither torch's nor meshweave's.
    """

    def __init__(self) -> None:
        self.longest_s, self.place = 0.0, ""
        self._seen: dict[int, tuple[tuple[int, int], float, float]] = {}

    def look(self) -> None:
        """Look at all threads, and set `longest_s` and `place` by what has changed since the last look."""
        threads = {thread.ident: thread for thread in threading.enumerate()}
        now, seen = time.monotonic(), self._seen
        self._seen, self.longest_s = {}, 0.0
        for ident, frame in sys._current_frames().items():
            thread = threads.get(ident)
            if thread is None or thread.name.startswith("meshweave-") or not _is_in_a_wait(frame):
                continue
            at, cpu_s = (id(frame), frame.f_lasti), _cpu_s(thread.native_id)
            before, since, cpu_before_s = seen.get(ident, (at, now, cpu_s))
            if before != at or cpu_s - cpu_before_s > 0.5 * (now - since):
                since, cpu_before_s = now, cpu_s
            self._seen[ident] = at, since, cpu_before_s
            if now - since > self.longest_s:
                self.longest_s, self.place = now - since, _place_of(frame)


_OURS = f"{Path(__file__).parents[2]}{os.sep}"
_WAITS = (_OURS, f"{os.sep}torch{os.sep}distributed{os.sep}")
_OF_LIBRARIES = (_OURS, f"{os.sep}torch{os.sep}", f"{os.sep}threading.py", "<")


def _is_in_a_wait(frame: FrameType | None) -> bool:
    while frame is not None:
        if any(part in frame.f_code.co_filename for part in _WAITS):
            return True
        frame = frame.f_back
    return False


def _place_of(frame: FrameType | None) -> str:
    """Return the innermost line of a stack that is neither torch's nor meshweave's."""
    while frame is not None:
        if line := user_line(frame.f_code.co_filename, frame.f_lineno):
            return line
        frame = frame.f_back
    return "a line of a library"


def user_line(path: str, line: int) -> str:
    """Return "train.py:42" for line 42 of the file `path`, which is a user's file.

    Return "" for files of torch and meshweave, `threading.py`, and code that is in no file ("<string>").
    """
    return "" if any(part in path for part in _OF_LIBRARIES) else f"{Path(path).name}:{line}"


def _cpu_s(native_id: int | None) -> float:
    """Return how long a thread of this process has computed, in seconds; 0.0 where it has ended, or off Linux.

    The kernel is asked by its own number of the thread: `pthread_getcpuclockid` reads the memory of one that may
    have ended meanwhile, which is a segmentation fault.
    """
    if native_id is None or not sys.platform.startswith("linux"):
        return 0.0
    try:
        return time.clock_gettime(~native_id << 3 | _CLOCK_OF_A_THREAD)
    except OSError:
        return 0.0


def end_with_line(lost: RankLostError) -> None:
    """End this process at once with exit status `LOST_STATUS` and one line on stderr that gives `lost`."""
    write_stderr(f"meshweave: this process ends: RankLostError: {' '.join(str(lost).split())}")
    os._exit(LOST_STATUS)
