"""What this machine can do for a lab. A small lab is built to try it."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass

from meshweave.base.errors import MeshweaveError
from meshweave_lab.description import LabDescription, Link, SwitchLab
from meshweave_lab.network.build import build
from meshweave_lab.network.namespaces import lab_namespaces, leftovers, new_prefix, remove
from meshweave_lab.network.signals import deferred_signals
from meshweave_lab.network.wiring import wire

STILL_WORKS = "plan, simulate, verify and run (over unshaped loopback) work without"


@dataclass(frozen=True)
class Abilities:
    """What this machine can do for a lab.

    Attributes:
        problem: why there can be no lab here, in one line; empty if there can be one.
        can_pace: whether products can be paced with the torch that is installed.
        num_labs: how many labs there are now.
        leftovers: namespaces that killed runs have left.
    """

    problem: str
    can_pace: bool
    num_cores: int
    num_labs: int
    leftovers: tuple[str, ...]

    @property
    def can_build(self) -> bool:
        """Whether a lab can be built on this machine."""
        return not self.problem


_known: list[str] = []


def lab_problem() -> str:
    """Return why there can be no lab on this machine, or ""; it is tried once per process, in about 50 ms."""
    if not _known:
        _known.append(_try())
    return _known[0]


def abilities() -> Abilities:
    """Return what this machine can do for a lab."""
    owners = {name.rpartition("-")[0] for name in lab_namespaces()}
    num_cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return Abilities(lab_problem(), _can_pace(), num_cores, len(owners), tuple(leftovers()))


def _can_pace() -> bool:
    try:
        from torch.library import get_kernel  # noqa: F401
    except ImportError:
        return False
    return True


def obvious_problem() -> str:
    """Return why there can be no lab, as far as one can tell without building one, or ""."""
    if sys.platform != "linux":
        return "it needs Linux network namespaces"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"there is no `{missing[0]}`; install iproute2"
    if os.geteuid() != 0:
        return "it needs root, to make network namespaces"
    return ""


def _try() -> str:
    if reason := obvious_problem():
        return reason
    link = Link(1_000_000, 1_000_000)
    wiring = wire(LabDescription("probe", SwitchLab(2, 1, link, 1e9), 9000, None))
    prefix = new_prefix()
    try:
        with deferred_signals():
            try:
                build(wiring, prefix, 9000)
            finally:
                remove([name for name in lab_namespaces() if name.startswith(prefix)])
    except (MeshweaveError, OSError) as error:
        return " ".join(str(error).replace(prefix, "").split())
    return ""
