"""Runs command lines in forks of this warm process: a case costs milliseconds, and none can harm the next.

Each has a limit of processor time and of memory, set by the kernel, so that a hang in C code ends too. What a case
said and used comes back as an `Outcome`, and `fault` judges it: status 0, or one line on stderr and status 2.
"""

from __future__ import annotations

import gc
import io
import os
import re
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshweave.base.errors import MAX_LINE

CPU_S = 12
MEMORY_BYTES = 2_000_000_000
WALL_S = 240
"""For a case that waits and computes nothing, beside ten times its processor time on a busy machine."""
_THRESHOLDS = gc.get_threshold()  # of a command, whatever tests have set since
_CRASHED = 70
"""Status of a case that ended in an exception."""


@dataclass(frozen=True)
class Outcome:
    """What one command line did: its status (negative: a signal), output, seconds, and bytes of its own."""

    status: int
    out: str
    err: str
    cpu_s: float
    peak_bytes: int
    most_s: float = CPU_S

    @property
    def is_late(self) -> bool:
        """Return whether it took more processor time than it may; a process of its own may have met the limit."""
        return self.cpu_s > self.most_s or self.status == -signal.SIGXCPU

    def fault(self, allowed: Sequence[int] = (0, 2)) -> str:
        """Return what is wrong with the outcome, or "". `allowed` are the statuses that are right."""
        if self.status < 0:
            return f"ended by {signal.Signals(-self.status).name} after {self.cpu_s:.1f} s of processor time"
        if "Traceback" in self.err:
            return f"a traceback: {' | '.join(self.err.strip().splitlines()[-3:])}"
        if self.status not in allowed:
            return f"status {self.status}: {self.err[:500]}"
        if self.is_late:
            return f"{self.cpu_s:.1f} s of processor time"
        if self.peak_bytes > MEMORY_BYTES:
            return f"{self.peak_bytes >> 20} MiB"
        return self._fault_of_words() if self.status == 2 else ""

    def _fault_of_words(self) -> str:
        """Return what is wrong with an error: it is one line, or in a description file one for each problem."""
        lines = self.err.splitlines()
        problems = re.search(r"\d+ problems$", lines[0]) if lines else None
        if not self.err.startswith("error: ") or len(lines) > (23 if problems else 1):
            return f"{len(lines)} lines: {self.err[:500]}"
        if any(len(line) > MAX_LINE + len("error: ") or not line.isprintable() for line in lines):
            return f"a line that does not print: {self.err[:500]!r}"
        return f"an error and output: {self.out[:200]}" if self.out else ""


def run_forked(action: Callable[[], Any], most_s: float = CPU_S) -> Outcome:
    """Run an action that returns a status in a fork with limits, its stdin empty, and return what came of it."""
    out, err = os.memfd_create("out"), os.memfd_create("err")
    sys.stdout.flush()
    sys.stderr.flush()
    base_bytes = _memory_bytes(1)
    pid = os.fork()
    if pid == 0:
        _be_case(action, out, err, most_s)
    _, status, used = os.wait4(pid, 0)
    texts = []
    for fd in (out, err):
        os.lseek(fd, 0, os.SEEK_SET)
        texts.append(os.read(fd, 1 << 16).decode(errors="replace"))
        os.close(fd)
    code = os.waitstatus_to_exitcode(status)
    own_bytes = max((used.ru_maxrss << 10) - base_bytes, 0)
    return Outcome(code, texts[0], texts[1], used.ru_utime + used.ru_stime, own_bytes, most_s)


def _memory_bytes(field: int) -> int:
    """Return this process's virtual (0) or resident (1) memory."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[field]) * resource.getpagesize()


def _be_case(action: Callable[[], Any], out: int, err: int, most_s: float) -> None:
    status = _CRASHED
    try:
        nothing = os.open(os.devnull, os.O_RDONLY)
        for fd, number in ((nothing, 0), (out, 1), (err, 2)):
            os.dup2(fd, number)
        sys.stdin = io.TextIOWrapper(os.fdopen(0, "rb", closefd=False))
        sys.stdout, sys.stderr = (
            io.TextIOWrapper(os.fdopen(fd, "wb", closefd=False), encoding="utf-8", errors=errors)
            for fd, errors in ((1, "strict"), (2, "backslashreplace"))
        )
        gc.set_threshold(*_THRESHOLDS)
        for number in (signal.SIGALRM, signal.SIGXCPU):
            signal.signal(number, signal.SIG_DFL)
        signal.alarm(WALL_S + 10 * int(most_s))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        used = resource.getrusage(resource.RUSAGE_SELF)
        seconds = int(most_s) + 1 + int(used.ru_utime + used.ru_stime)  # 0 in a fork
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        size = _memory_bytes(0)
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES, size + MEMORY_BYTES))
        status = action()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status if isinstance(status, int) else _CRASHED)
