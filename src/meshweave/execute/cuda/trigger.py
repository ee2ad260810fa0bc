"""A copy that starts on a GPU when a counter in its memory is there: T3's trigger, with no kernel and no host.

It has never been run: no machine with a GPU was at hand.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshweave.base.errors import UnsupportedError


def wait_for_count(stream: Any, counters: Tensor, region: int, count: int) -> None:
    """Let what is queued on a CUDA stream from here on wait until a region's counter is at least `count`.

    Raises UnsupportedError where the CUDA bindings for Python are missing, or the driver refuses.
    """
    try:
        from cuda.bindings import driver
    except ImportError:
        raise UnsupportedError("a stream waits for a counter by way of cuda-bindings: install them") from None
    word = counters.data_ptr() + region * counters.element_size()
    at_least = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
    (status,) = driver.cuStreamWaitValue32(stream.cuda_stream, word, count, at_least)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise UnsupportedError(f"the driver does not let a stream wait for a counter: {status}")


def copy_when_whole(
    stream: Any, target: Tensor, region_tensor: Tensor, counters: Tensor, region: int, count: int
) -> None:
    """Queue a copy of a region, to a peer's symmetric memory for one, for when its counter is at `count`."""
    wait_for_count(stream, counters, region, count)
    with torch.cuda.stream(stream):
        target.copy_(region_tensor, non_blocking=True)
