"""Network namespaces that know whose they are: making, finding, entering and removing them.

A name holds the process that owns the namespace by pid and start time, and the pid namespace these count in:
`meshweave-<pid namespace>-<pid>-<start>-<number>-<space>`. A namespace whose owner is gone is a leftover.
Nothing else is ever removed.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from meshweave.base.errors import UnsupportedError
from meshweave.base.owner import Owner
from meshweave_lab.network.entering import (
    NAMED_NAMESPACES,
    enter_named_namespace,
    enter_network_namespace,
)

_NAME = re.compile(r"meshweave-([0-9a-f]+)-([0-9]+)-([0-9]+)-([0-9]+)-([a-z0-9]+)")
_COMMAND_TIMEOUT_S = 60.0
_numbers = itertools.count()


def new_prefix() -> str:
    """Return the prefix of the namespaces of a new lab of this process."""
    return f"meshweave-{Owner.current()}-{next(_numbers)}-"


def lab_namespaces() -> list[str]:
    """Return the names of all namespaces that labs made, of this process or of any other."""
    with suppress(FileNotFoundError):
        return sorted(entry.name for entry in NAMED_NAMESPACES.iterdir() if _NAME.fullmatch(entry.name))
    return []


def leftovers() -> list[str]:
    """Return the names of the namespaces of labs whose process has ended."""
    return [name for name in lab_namespaces() if _owner(name).is_gone]


def _owner(name: str) -> Owner:
    match = _NAME.fullmatch(name)
    assert match is not None, name
    return Owner(match[1], int(match[2]), int(match[3]))


def remove_leftovers() -> list[str]:
    """Remove the namespaces of labs whose process has ended, with all that runs in them; return their names."""
    names = leftovers()
    remove(names)
    return names


def remove(names: Sequence[str]) -> None:
    """Kill every process inside the namespaces, then remove them. A namespace that is gone already is no error.

    Raises UnsupportedError where one cannot be removed.
    """
    assert all(_NAME.fullmatch(name) for name in names), names
    kill_inside(names)
    if names:
        run_batch(["ip", "-force"], [f"netns del {name}" for name in names], check=False)
    # Another process may have removed some at the same time; what is there now is what could not be removed.
    rest = [name for name in names if (NAMED_NAMESPACES / name).exists()]
    if rest:
        raise UnsupportedError(f"cannot remove {len(rest)} network namespaces, {rest[0]} first")


def kill_inside(names: Iterable[str], timeout_s: float = 5.0) -> None:
    """Send SIGKILL to every process inside the namespaces until there is none, or the time is up."""
    inodes = set()
    for name in names:
        with suppress(FileNotFoundError):
            stat = (NAMED_NAMESPACES / name).stat()
            inodes.add((stat.st_dev, stat.st_ino))
    until = time.monotonic() + timeout_s
    while inodes and (pids := _pids_in(inodes)) and time.monotonic() < until:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def _pids_in(inodes: set[tuple[int, int]]) -> list[int]:
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):  # it ended, or is a zombie
                stat = (entry / "ns" / "net").stat()
                if (stat.st_dev, stat.st_ino) in inodes:
                    pids.append(int(entry.name))
    return pids


def run_batch(command: Sequence[str], lines: Sequence[str], *, check: bool = True) -> None:
    """Run `ip` or `tc` on many lines at once. Raises UnsupportedError with the first line of its error output."""
    if not lines:
        return
    try:
        done = subprocess.run(
            [*command, "-batch", "-"],
            input="\n".join(lines) + "\n",
            capture_output=True,
            text=True,
            timeout=_COMMAND_TIMEOUT_S,
            process_group=0,  # Ctrl-C is for us: what takes things down must not be interrupted by it
        )
    except FileNotFoundError:
        raise UnsupportedError(f"there is no `{command[0]}`; install iproute2") from None
    if check and done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        number = re.search(r"Command failed -:(\d+)", done.stderr)
        line = lines[int(number[1]) - 1] if number else lines[0]
        raise UnsupportedError(f"`{' '.join(command)} {line}` failed: {said[0]}")


@contextmanager
def inside(name: str) -> Iterator[None]:
    """Move this thread into namespace `name` for the block. Sockets and threads made in the block stay there."""
    back = os.open(f"/proc/self/task/{threading.get_native_id()}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        enter_named_namespace(name)
        try:
            yield
        finally:
            enter_network_namespace(back)
    finally:
        os.close(back)
