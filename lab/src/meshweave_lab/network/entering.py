"""Enter network namespaces of Linux: with a thread for a while, or with a process for good."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

NAMED_NAMESPACES = Path("/run/netns")
"""Where `ip netns add` keeps the network namespaces that have names."""

_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000
_MS_REC_SLAVE, _MNT_DETACH = 0x4000 | 0x80000, 2


def enter_network_namespace(descriptor: int) -> None:
    """Move this thread into an open network namespace. Raises OSError, such as without the privilege for it."""
    _check(_libc().setns(descriptor, _CLONE_NEWNET))


def enter_named_namespace(name: str) -> None:
    """Move this thread into the network namespace that `ip netns` knows by a name. Raises OSError."""
    descriptor = os.open(NAMED_NAMESPACES / name, os.O_RDONLY | os.O_CLOEXEC)
    try:
        enter_network_namespace(descriptor)
    finally:
        os.close(descriptor)


def live_in_named_namespace(name: str) -> None:
    """Move this process, of one thread, into a named network namespace as `ip netns exec` starts one there.

    The process gets mounts of its own, with a /sys that shows the interfaces of the namespace. Raises OSError.
    """
    enter_named_namespace(name)
    libc = _libc()
    _check(libc.unshare(_CLONE_NEWNS))
    _check(libc.mount(b"none", b"/", None, _MS_REC_SLAVE, None))
    libc.umount2(b"/sys", _MNT_DETACH)  # fails where there is none
    _check(libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None))


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _check(status: int) -> None:
    if status != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
