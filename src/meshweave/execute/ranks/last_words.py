"""What a process says when an error or a launcher's signal ends it: because of which ranks.

An error of gloo that nobody catches names a neighbour's port, and no rank. It is explained before it is printed.
"""

from __future__ import annotations

import atexit
import signal
import sys
import threading
from collections.abc import Callable
from types import TracebackType

from meshweave.base.errors import MeshweaveError
from meshweave.execute.ranks.liveness import Liveness
from meshweave.execute.ranks.monitor import user_line
from meshweave.execute.ranks.signals import SignalReport, write_stderr

_LONGEST_CHAIN = 10  # of causes that are looked at

_is_installed = False


_TRANSPORT = ("gloo", "pair closure", "closed by peer", "connection reset", "broken pipe", "timed out")


def is_transport(error: BaseException) -> bool:
    """Return whether an error looks like one of gloo or of the store, by its class name ("Dist...") or message."""
    words = str(error).lower()
    return type(error).__name__.startswith("Dist") or any(each in words for each in _TRANSPORT)


def install_last_words(current: Callable[[], Liveness | None]) -> None:
    """Make this process print which ranks are to blame where an uncaught error or SIGTERM ends it.

    `current` returns the `Liveness` of this process, or None. A second call does nothing. SIGTERM is handled only
    if this is called in the main thread and SIGTERM has no handler yet; a handler that is set later replaces it.
    """
    global _is_installed
    if _is_installed:
        return
    _is_installed = True
    printed = sys.excepthook

    def explain(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        explained = _explained(error, traceback, current())
        if explained is None:
            printed(kind, error, traceback)
        else:
            printed(type(explained), explained, explained.__traceback__)

    sys.excepthook = explain
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        report = SignalReport(signal.SIGTERM, lambda *what: _line(current(), *what), write_stderr)
        atexit.register(report.uninstall)  # whoever hangs in its last steps can be ended


def _line(liveness: Liveness | None, signum: signal.Signals, is_ignored: bool) -> tuple[str, tuple[int, ...]]:
    if liveness is None or not liveness.can_explain:
        return "", ()
    return liveness.signal_line(signum, is_ignored)


def _explained(
    error: BaseException, traceback: TracebackType | None, liveness: Liveness | None
) -> MeshweaveError | None:
    """Return the error that names the ranks for which a collective of torch failed; None where none did."""
    chain: list[BaseException] = []
    inner: BaseException | None = error
    while inner is not None and len(chain) < _LONGEST_CHAIN:
        chain.append(inner)
        inner = inner.__cause__ or inner.__context__
    if any(isinstance(each, MeshweaveError) for each in chain) or not any(map(is_transport, chain)):
        return None
    place = ""
    while traceback is not None:
        place = user_line(traceback.tb_frame.f_code.co_filename, traceback.tb_lineno) or place
        traceback = traceback.tb_next
    if liveness is None:
        return None
    try:
        with liveness.guard(f"a collective of torch at {place}"):
            raise error
    except MeshweaveError as explained:
        return explained
    except BaseException:
        return None
