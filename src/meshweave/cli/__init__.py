"""The command line. A user's mistake is one line on stderr and exit status 2."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading

_AGAIN_S = 0.02
"""Seconds until a lost Ctrl-C is sent again: until the code that dropped it has returned."""


def main(args: list[str] | None = None) -> None:
    """Run the `meshweave` command with `args`, by default the process's arguments, and exit with its status."""
    sys.unraisablehook = _interrupt_again
    try:
        from meshweave.cli.app import run_app

        status = run_app(sys.argv[1:] if args is None else args)
        if sys.stdout is not None:  # else it was closed before
            sys.stdout.flush()
    except BrokenPipeError:  # the reader of a pipe has left; nothing is wrong
        _forget_output()
        status = 0
    except OSError as error:  # of what is printed: outputs and inputs have errors of their own
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise
        _forget_output()
        print(f"error: stdout: cannot write: {error.strerror}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:  # before a verb began
        print("interrupted; nothing was written", file=sys.stderr)
        status = 130
    sys.exit(status)


def _forget_output() -> None:
    """Let what stdout still holds go nowhere, where it cannot be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _interrupt_again(lost: sys.UnraisableHookArgs) -> None:
    """Interrupt the main thread once more where Python dropped its KeyboardInterrupt; else report as Python does.

    The importer's callbacks and finalizers raise to nobody: a Ctrl-C that met one of them would be gone.
    """
    if lost.exc_type is KeyboardInterrupt:
        main_thread = threading.main_thread().ident
        threading.Timer(_AGAIN_S, signal.pthread_kill, (main_thread, signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(lost)
