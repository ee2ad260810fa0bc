"""The command line. A user's mistake is one line on stderr and exit status 2."""

from __future__ import annotations

import os
import sys


def main(args: list[str] | None = None) -> None:
    """Run the `meshweave` command and exit with its status."""
    try:
        from meshweave.cli.app import run_app

        status = run_app(sys.argv[1:] if args is None else args)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of a pipe has left; nothing is wrong
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    except KeyboardInterrupt:  # before a verb began
        print("interrupted; nothing was written", file=sys.stderr)
        status = 130
    sys.exit(status)
