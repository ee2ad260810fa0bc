"""Memory of the host that tensors free is kept for those of the next step, as torch keeps that of a GPU.

Where a training step on a CPU frees its activations, glibc gives their pages back to the system, which then clears
each page anew for the next step. Its limits for this are settings of malloc (mallopt(3)). A step needs memory for
the same tensors as the one before. Blocks that fit nothing which was freed make the peak higher than where each
tensor is mapped by itself.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
_NEVER = -1
_LARGEST_KEPT = (1 << 30, 32 << 20)
"""Bytes of a tensor from which its memory is given back: the first that this glibc takes."""
_SET_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""Variables of the environment by which a user has chosen the limits."""


@functools.cache
def keep_freed_memory() -> bool:
    """Set glibc's malloc to keep freed memory for later tensors; return whether it does. Later calls do nothing.

    Return False and change nothing where the C library is not glibc, or where environment variables set the
    limits of malloc. Other allocators (jemalloc, tcmalloc) ignore the setting.
    """
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in _SET_BY_USER):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    is_kept = any(mallopt(_MMAP_THRESHOLD, num_bytes) for num_bytes in _LARGEST_KEPT)
    return bool(is_kept and mallopt(_TRIM_THRESHOLD, _NEVER))
