"""Streams that wait for words in memory, and write them: T3's trigger, with no kernel and no host.

A word is an int32 in memory that the device reaches, also another GPU's where it is symmetric memory. A wait is
over when the word, taken as a count that may wrap around, is at least a value. What a stream does after it, such
as a copy by a copy engine, starts then. A write follows all that was queued before: who sees it sees that too.

Waits, and the copies that they start, have run on one H100 (`benchmarks/gpu/fused.py`).
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from meshweave.base.errors import UnsupportedError

_WRAP = 1 << 32


class WordQueue(Protocol):
    """Queues waits for words and writes of words: on the current stream of a device, or in tests on this thread.

    A word is a tensor of one int32 in memory that the device reaches.
    """

    def wait(self, word: Tensor, value: int) -> None:
        """Queue a wait until `word` is at least `value`; what is queued later starts after it."""

    def write(self, word: Tensor, value: int) -> None:
        """Queue a write of `value` to `word` after all that is queued before."""


class StreamWords:
    """Words that the current CUDA stream waits for and writes."""

    def __init__(self, device: torch.device) -> None:
        """Use the current stream of CUDA `device`. Raises UnsupportedError where the CUDA bindings are missing."""
        if reason := lacks_stream_words():
            raise UnsupportedError(f"streams wait for words in memory by way of cuda-bindings: {reason}")
        self._driver, self._device = _driver(), device
        self._at_least = int(self._driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)

    def wait(self, word: Tensor, value: int) -> None:
        """Queue a wait on the current stream until the int32 `word`, which may have wrapped, is at least `value`.

        Raises UnsupportedError where the driver refuses.
        """
        self._queue("wait for", self._driver.cuStreamWaitValue32, word, value, self._at_least)

    def write(self, word: Tensor, value: int) -> None:
        """Queue a write of `value` to the int32 `word` on the current stream, after all that is queued on it.

        Raises UnsupportedError where the driver refuses.
        """
        self._queue("write", self._driver.cuStreamWriteValue32, word, value, 0)

    def _queue(self, what: str, function: Any, word: Tensor, value: int, flags: int) -> None:
        stream = torch.cuda.current_stream(self._device).cuda_stream
        (status,) = function(stream, word.data_ptr(), value % _WRAP, flags)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise UnsupportedError(f"the driver does not let a stream {what} a word in memory: {status}")


def lacks_stream_words() -> str:
    """Return why no CUDA stream can wait for a word in memory here; "" where it can."""
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return "cuda-bindings is not installed"
    try:
        _driver()
    except Exception as error:  # what it raises where a library is missing differs from version to version
        return " ".join(str(error).split()).partition(". ")[0] or type(error).__name__
    return ""


@cache
def _driver() -> Any:
    from cuda.bindings import driver

    driver.cuDriverGetVersion()  # raises where there is no driver
    return driver


def reached(count: int, value: int) -> bool:
    """Return whether `count`, a 32-bit counter that may have wrapped around, has come to `value`.

    It has where it is equal or less than 2**31 past `value`, modulo 2**32.
    """
    return (count - value) % _WRAP < _WRAP // 2


def copy_when_whole(words: WordQueue, target: Tensor, region: Tensor, counter: Tensor, count: int) -> None:
    """Queue a copy of `region` to `target` on the current stream that starts once `counter` is at least `count`.

    Args:
        words: queues the wait on the same stream as the copy.
        target: the destination, such as a peer's symmetric memory; contiguous like `region`, so that a copy
            engine can make the copy.
        counter: one int32 in device memory.
    """
    words.wait(counter, count)
    target.copy_(region, non_blocking=True)
