"""Blocking calls that take no timeout, or do not keep it, bounded by the caller.

Forming a group of gloo may take 30 s whatever timeout it was given: so long it waits for a connection to a
stopped process. A call to a store whose host is stopped does not return at all. Such a call runs in a helper
thread here, and only that is stuck. Helpers whose call has ended take the next one.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")

_LOOK_S = 0.05
_SLOW_S = 5.0  # that a store which answers is waited for
_HANGING_S = 3.0  # without an answer: then it is taken to hang, and not to be slow
_MAX_IDLE = 4


class _Helper:
    """A thread that runs one call after another."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        threading.Thread(target=self._serve, name="meshweave-call", daemon=True).start()

    def run(self, call: Callable[[], None]) -> None:
        """Queue a call for the thread, and return at once."""
        self._calls.put(call)

    def _serve(self) -> None:
        while True:
            self._calls.get()()
            if len(_idle) >= _MAX_IDLE:
                return
            _idle.append(self)


_idle: list[_Helper] = []
os.register_at_fork(after_in_child=_idle.clear)  # the threads are the parent's


def _helper() -> _Helper:
    try:
        return _idle.pop()
    except IndexError:
        return _Helper()


def call_within(
    timeout_s: float, function: Callable[[], T], meanwhile: Callable[[], object] | None = None
) -> T:
    """Return what `function` returns, or raise what it raises, if it ends in `timeout_s` seconds.

    Args:
        function: runs in another thread, which goes on alone if the function does not end in time.
        meanwhile: called every 50 ms while this thread waits; an error that it raises ends the wait.

    Raises:
        TimeoutError: the function did not end in time.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    ended = threading.Event()

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)
        finally:
            ended.set()

    _helper().run(run)
    until = time.monotonic() + timeout_s
    while not ended.wait(min(_LOOK_S, max(until - time.monotonic(), 0.0))):
        if meanwhile is not None:
            meanwhile()
        if time.monotonic() >= until and not ended.is_set():
            raise TimeoutError(f"timed out after {timeout_s:.1f} s")
    if errors:
        raise errors[0]
    return results[0]


def join_talker(thread: threading.Thread, patience_s: float, answered_at: Callable[[], float]) -> None:
    """Wait until `thread`, which uses a store, ends: at most `patience_s` seconds, 5 more if the store is alive.

    Waiting matters at the end of the interpreter: a thread that returns from C++ then aborts the process. A thread
    whose store hangs never returns.

    Args:
        answered_at: returns when the store last answered, in seconds of the monotonic clock; a store that
            answered less than 3 s ago is alive.
    """
    thread.join(patience_s)
    if thread.is_alive() and time.monotonic() - answered_at() < _HANGING_S:
        thread.join(_SLOW_S)
