"""Signals that must not come between the steps of making and removing things."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Those that ask this process to end."""


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Hold signals that would end this process until the block is done. Outside the main thread, do nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before: dict[int, Any] = {}
    try:
        for signum in SIGNALS:
            if signal.getsignal(signum) not in (None, signal.SIG_IGN):
                before[signum] = signal.signal(signum, lambda signum, _: came.append(signum))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in came:
            signal.raise_signal(signal.Signals(number))
