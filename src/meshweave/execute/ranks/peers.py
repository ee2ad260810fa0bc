"""The processes of other ranks on this host: that one has ended is a fact, which no silence has to be waited for.

Each rank writes once into the store which process it is. A rank that waits for others asks the kernel whether
those on its own host, in the same PID namespace, still run (Linux). What it finds out it announces to the ranks on
other hosts.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from meshweave.base.owner import Owner
from meshweave.execute.ranks.blame import ranks_text


class RanksEndedError(RuntimeError):
    """Ends a wait for `ranks` whose processes run no more. The `Guard` of the wait turns it into RankLostError."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self.ranks = tuple(sorted(ranks))
        super().__init__(f"{ranks_text(self.ranks)} ended and closed all connections")


def own_process() -> str:
    """Return text that identifies this process to ranks on the same host; "" where there is no /proc."""
    try:
        return f"{_host()} {Owner.current()}"
    except OSError:  # no /proc
        return ""


class PeerProcesses:
    """Which processes on this host are which ranks, to ask the kernel whether they still run."""

    def __init__(self) -> None:
        self._here: dict[int, Owner] = {}
        self._known: set[int] = set()

    def unknown(self, ranks: Iterable[int]) -> list[int]:
        """Return those of `ranks` for which `add` has not been called, ascending."""
        return sorted(set(ranks) - self._known)

    def add(self, rank: int, words: str) -> None:
        """Record which process `rank` is; `words` is what `own_process` returned on that rank.

        A rank on another host, or with an unreadable text, is never among those that `ended` returns.
        """
        host, _, process = words.partition(" ")
        try:
            if host == _host():
                self._here[rank] = Owner.parse(process)
        except (OSError, ValueError):
            pass
        self._known.add(rank)

    def ended(self, ranks: Iterable[int]) -> list[int]:
        """Return those of `ranks` whose processes, on this host, have ended, ascending."""
        return sorted(rank for rank in ranks if rank in self._here and _has_ended(self._here[rank]))


def _has_ended(process: Owner) -> bool:
    if not process.is_gone:
        return False
    try:
        os.kill(process.pid, 0)
    except PermissionError:  # another user's, which /proc may hide (hidepid)
        return False
    except ProcessLookupError:
        pass
    return True


def _host() -> str:
    """Return a word for the kernel that runs this process: pid namespaces of two hosts may have one number."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
