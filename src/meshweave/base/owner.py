"""Processes as owners of what may outlive them: temporary folders and network namespaces that say whose they are.

A name holds the process that owns the thing by pid and start time, and the pid namespace these count in. So a pid
that another process has got since is told apart, and a process of another container is never taken to have ended.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_FOLDER = re.compile(r"meshweave-[a-z]+-([0-9a-f]+)-([0-9]+)-([0-9]+)-[^-]*")


@dataclass(frozen=True)
class Owner:
    """A process that owns a temporary folder or network namespace, whose name holds `str(owner)`.

    `pid_space` is its pid namespace (inode in hex), `start` the clock ticks since boot when it started.
    """

    pid_space: str
    pid: int
    start: int

    @classmethod
    def current(cls) -> Owner:
        """Return this process as an owner. Raises OSError where there is no /proc to read."""
        return cls(_pid_space(), os.getpid(), _start_of(os.getpid()) or 0)

    @classmethod
    def parse(cls, text: str) -> Owner:
        """Return the owner whose `str` is `text`. Raises ValueError for other text."""
        pid_space, pid, start = text.split("-")
        return cls(pid_space, int(pid), int(start))

    @property
    def is_gone(self) -> bool:
        """Return whether the process has ended; False for a pid of another namespace, where nobody can tell."""
        return self.pid_space == _pid_space() and _start_of(self.pid) != self.start

    def __str__(self) -> str:
        return f"{self.pid_space}-{self.pid}-{self.start}"


def _pid_space() -> str:
    return f"{int(str(Path('/proc/self/ns/pid').readlink()).strip('pid:[]')):x}"


def _start_of(pid: int) -> int | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


@contextmanager
def temporary_folder(purpose: str) -> Iterator[str]:
    """Yield the path of a new folder that this user alone can enter, and remove it afterwards.

    First the folders are removed that processes of this user left when they were killed. A folder whose process
    still runs, or may run in another container, stays; so does what other users own.

    Args:
        purpose: lower-case letters, a part of the name.
    """
    try:
        name = f"meshweave-{purpose}-{Owner.current()}-"
        remove_leftover_folders()
    except OSError:  # no /proc: then nobody can tell whose a folder is
        name = f"meshweave-{purpose}-"
    with tempfile.TemporaryDirectory(prefix=name, ignore_cleanup_errors=True) as folder:
        yield folder


def remove_leftover_folders() -> list[str]:
    """Remove this user's folders of `temporary_folder` whose process has ended; return their paths."""
    removed = []
    for entry in os.scandir(tempfile.gettempdir()):
        match = _FOLDER.fullmatch(entry.name)
        if match is None or not Owner(match[1], int(match[2]), int(match[3])).is_gone:
            continue
        with suppress(OSError):  # another process may be removing it
            if (
                entry.is_dir(follow_symlinks=False)
                and entry.stat(follow_symlinks=False).st_uid == os.geteuid()
            ):
                shutil.rmtree(entry.path)
                removed.append(entry.path)
    return removed
