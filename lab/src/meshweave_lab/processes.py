"""One process per rank with a deadline; what they print comes out line by line with the rank in front."""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any

from meshweave.base.errors import BindError
from meshweave.execute.ranks.blame import ranks_text
from meshweave.execute.ranks.launch import end_text

_POLL_S = 0.05
_MAX_LINE_BYTES = 65536
_PR_SET_PDEATHSIG = 1

LineHandler = Callable[[int, str, bool], None]
"""Takes a rank (-1: the lab itself), a line without its end, and whether it is for stderr."""


def print_line(rank: int, line: str, is_error: bool) -> None:
    """Print `[rank] line`, to stderr if `is_error`; for rank -1, the lab itself, `meshweave lab: line`."""
    stream = sys.stderr if is_error else sys.stdout
    stream.write(f"[{rank}] {line}\n" if rank >= 0 else f"meshweave lab: {line}\n")
    stream.flush()


@dataclass(frozen=True)
class RunResult:
    """How the ranks of a run ended.

    Attributes:
        statuses: by rank, the exit status, -n for signal n.
        ended_by_us: ranks that were ended because another failed, or the time was up.
        timed_out: whether the time was up.
        message: what went wrong, in one line, naming the ranks; "" if nothing did.
    """

    statuses: tuple[int, ...]
    ended_by_us: tuple[int, ...] = ()
    timed_out: bool = False
    message: str = ""

    @property
    def exit_status(self) -> int:
        """The highest exit status of ranks that ended by themselves, 128 + n for signal n.

        Where that is 0, it is 124 if the time was up.
        """
        own = [s for rank, s in enumerate(self.statuses) if rank not in self.ended_by_us]
        worst = max((s if s >= 0 else 128 - s for s in own), default=0)
        return worst or (124 if self.timed_out else 0)


@dataclass
class RankProcesses:
    """The processes of one run. Used as a context manager, it leaves none running that it started."""

    until: float  # monotonic seconds
    on_line: LineHandler
    running: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    statuses: dict[int, int] = field(default_factory=dict)  # in the order of their ends
    ended_by_us: set[int] = field(default_factory=set)
    timed_out: bool = False
    _selector: selectors.DefaultSelector = field(default_factory=selectors.DefaultSelector)
    _pending: dict[tuple[int, bool], bytes] = field(default_factory=dict)

    def start(self, rank: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start a rank in a process group of its own. Raises BindError where the command is not there."""
        try:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                process_group=0,
                preexec_fn=_die_with(os.getpid()),
            )
        except OSError as error:
            raise BindError(f"cannot start {command[0]}: {error.strerror}") from None
        self.running[rank] = process
        for stream, is_error in ((process.stdout, False), (process.stderr, True)):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            self._selector.register(stream, selectors.EVENT_READ, (rank, is_error))

    def wait(self, grace_s: float) -> None:
        """Wait until all ranks have ended, the time is up, or `grace_s` seconds after a first failure; then end
        the rest.
        """
        until, failed = self.until, False
        while self.running:
            now = time.monotonic()
            if now >= until:
                self.timed_out = not failed
                break
            self._pump(min(_POLL_S, until - now))
            self._reap()
            if not failed and any(self.statuses.values()):
                failed, until = True, min(until, time.monotonic() + grace_s)
                self.on_line(-1, f"{_failures(self.statuses, ())}; ending the others in {grace_s:g} s", True)
        self.ended_by_us.update(self.running)
        self._stop_rest()

    def result(self, num_ranks: int) -> RunResult:
        """Return how the ranks ended. All must have ended."""
        message = _failures(self.statuses, self.ended_by_us)
        if self.timed_out:
            late = f"{ranks_text(self.ended_by_us)} had not finished when the time was up"
            message = f"{message}; {late}" if message else late
        statuses = tuple(self.statuses[rank] for rank in range(num_ranks))
        return RunResult(statuses, tuple(sorted(self.ended_by_us)), self.timed_out, message)

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self._signal_rest(signal.SIGKILL)
        for rank, process in self.running.items():
            self.statuses[rank] = process.wait(10.0)
        self.running.clear()
        for key in list(self._selector.get_map().values()):
            self._close(key.fileobj)  # type: ignore[arg-type]
        self._selector.close()

    def _stop_rest(self) -> None:
        """Send SIGTERM, and SIGKILL two seconds later; then read what is still in the pipes."""
        for signum, wait_s in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 5.0)):
            self._signal_rest(signum)
            until = time.monotonic() + wait_s
            while self.running and time.monotonic() < until:
                self._pump(_POLL_S)
                self._reap()
        until = time.monotonic() + 1.0  # a grandchild may hold a pipe open
        while self._selector.get_map() and time.monotonic() < until:
            self._pump(_POLL_S)
        for (rank, is_error), rest in self._pending.items():  # a last line without an end
            self._say(rank, rest, is_error)
        self._pending.clear()

    def _signal_rest(self, signum: int) -> None:
        for process in self.running.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signum)

    def _reap(self) -> None:
        for rank, process in list(self.running.items()):
            status = process.poll()
            if status is not None:
                self.statuses[rank] = status
                del self.running[rank]

    def _pump(self, timeout_s: float) -> None:
        if not self._selector.get_map():
            time.sleep(timeout_s)
            return
        for key, _ in self._selector.select(timeout_s):
            rank, is_error = key.data
            data = os.read(key.fd, _MAX_LINE_BYTES)
            *lines, rest = (self._pending.pop(key.data, b"") + data).split(b"\n")
            if rest and (not data or len(rest) >= _MAX_LINE_BYTES):
                lines, rest = [*lines, rest], b""
            if rest:
                self._pending[key.data] = rest
            for line in lines:
                self._say(rank, line, is_error)
            if not data:
                self._close(key.fileobj)  # type: ignore[arg-type]

    def _say(self, rank: int, line: bytes, is_error: bool) -> None:
        self.on_line(rank, line.decode(errors="replace").rstrip("\r"), is_error)

    def _close(self, stream: IO[bytes]) -> None:
        self._selector.unregister(stream)
        stream.close()


def _die_with(parent_pid: int) -> Callable[[], None]:
    """Return a function for the time between fork and exec: the rank gets SIGKILL when this thread ends."""
    libc: Any = ctypes.CDLL(None)

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent_pid:
            os._exit(1)

    return prepare


def _failures(statuses: Mapping[int, int], left_out: Sequence[int] | set[int]) -> str:
    return ", ".join(f"rank {r} {end_text(s)}" for r, s in statuses.items() if s and r not in left_out)
