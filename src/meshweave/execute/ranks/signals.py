"""A last word on a signal, even from a process whose main thread is stuck in C++."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, cast


class SignalReport:
    """Reports on a signal from a thread of its own.

    Python runs signal handlers in the main thread between bytecodes, so not at all while that thread sits in
    a C++ wait. Blocking the signal and waiting for it with `sigwait` is no way out either: threads that gloo
    and others started before would not have it blocked, and the kernel would deliver it there. But the C part
    of the handler runs at once in whatever thread, and writes a byte into the wakeup descriptor, read here.

    Afterwards the signal does what it did before. Only the main thread may make a report or uninstall it.

    Args:
        signum: the signal, whose present handler must be one of Python's.
        line: called once, with the signal and whether the process ignores it; it returns a line to report and the
            ranks that are missing.
        write: called with that line and these ranks.
    """

    def __init__(
        self,
        signum: signal.Signals,
        line: Callable[[signal.Signals, bool], tuple[str, tuple[int, ...]]],
        write: Callable[[str, tuple[int, ...]], None],
    ) -> None:
        self._signum, self._line, self._write = signum, line, write
        self._reported = self._is_called = False
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._thread = threading.Thread(target=self._run, name="meshweave-signals", daemon=True)
        self._thread.start()
        self._next_fd = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._previous = signal.signal(signum, self._on_signal)
        os.register_at_fork(after_in_child=self._forget)

    def uninstall(self) -> None:
        """Restore the previous handler; end the thread, unless other code has set a wakeup descriptor since.

        In any thread but the main one it does nothing.
        """
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread may: stay, and keep the descriptors that are still written to
        if signal.getsignal(self._signum) == self._on_signal:
            signal.signal(self._signum, self._previous)
        ours = signal.set_wakeup_fd(self._next_fd)
        if ours != self._writer:  # somebody came after us and may write to ours when they go
            signal.set_wakeup_fd(ours)
            return
        os.close(self._writer)
        self._thread.join()
        os.close(self._reader)

    def _forget(self) -> None:
        """Let a fork of this process get the signal as if there were no report: the descriptor is the parent's."""
        with contextlib.suppress(ValueError):  # the fork of another thread than the main one
            if signal.getsignal(self._signum) == self._on_signal:
                signal.set_wakeup_fd(-1)
                signal.signal(self._signum, self._previous)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        # Before the report the thread is at it, or is told here, where somebody took the wakeup descriptor. It
        # sends the signal again when it is done.
        if not self._reported:
            self._is_called = True
            with contextlib.suppress(OSError):
                os.write(self._writer, bytes([signum]))
        elif callable(self._previous):
            self._previous(signum, frame)

    def _run(self) -> None:
        while received := os.read(self._reader, 256):
            if self._next_fd >= 0:
                with contextlib.suppress(OSError):
                    os.write(self._next_fd, received)
            # Whoever has set another handler meanwhile takes care of the signal.
            is_ours = self._is_called or signal.getsignal(self._signum) == self._on_signal
            if self._signum in received and is_ours and not self._reported:
                with contextlib.suppress(Exception):  # whatever goes wrong, the signal must have its way
                    self._write(*self._line(self._signum, self._previous == signal.SIG_IGN))
                self._reported = True
                if self._previous == signal.SIG_DFL:
                    _die_by(self._signum)
                elif callable(self._previous):
                    signal.pthread_kill(cast(int, threading.main_thread().ident), self._signum)


def _die_by(signum: int) -> None:
    """End this process by the default action of `signum`, from any thread; its parent sees just that."""
    with contextlib.suppress(OSError, AttributeError):
        libc: Any = ctypes.CDLL(None)  # `signal.signal` is for the main thread only
        libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
        libc.signal(int(signum), None)
        os.kill(os.getpid(), signum)
        time.sleep(1.0)
    os._exit(128 + signum)


def write_stderr(line: str, missing: tuple[int, ...] = ()) -> None:
    """Write a line to stderr, even where another thread holds the lock of `sys.stderr`; nothing for "".

    `missing` is ignored: it is there for callers that pass the line and the ranks that the line names.
    """
    if line:
        os.write(2, f"{line}\n".encode())  # not sys.stderr: the main thread may hold its lock
