"""Memory that a step frees serves the next one: the system clears no page anew."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from meshweave.execute.torch import host_memory

STEPS, BLOCK = 5, 24 << 20
PAGES_A_STEP = 4 * BLOCK // os.sysconf("SC_PAGE_SIZE")
SCRIPT = f"""
import ctypes, resource, sys
from meshweave.execute.torch.host_memory import keep_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
kept = keep_freed_memory() if sys.argv[1] == "keep" else None
for step in range({STEPS} + 1):
    if step == 1:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [ctypes.c_void_p(libc.malloc({BLOCK})) for _ in range(4)]
    for block in blocks:
        libc.memset(block, 1, {BLOCK})
    for block in blocks:
        libc.free(block)
print(kept, (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // {STEPS})
"""


def _faults(what: str, **env: str) -> tuple[str, int]:
    """Return what the function said, and the page faults of a step that takes and frees four blocks."""
    own = {name: value for name, value in os.environ.items() if name not in host_memory._SET_BY_USER}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, what],
        env=own | env,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    kept, faults = done.stdout.split()
    return kept, int(faults)


pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")


def test_a_step_takes_the_memory_of_the_one_before() -> None:
    assert _faults("keep") == ("True", pytest.approx(0, abs=PAGES_A_STEP / 20))
    assert _faults("give back")[1] > PAGES_A_STEP / 4


def test_what_a_user_has_set_stays() -> None:
    kept, faults = _faults("keep", MALLOC_TRIM_THRESHOLD_="131072")
    assert kept == "False" and faults > PAGES_A_STEP / 4
