"""Where in a pool's segments blocks of bytes lie: first fit, and neighbours that are free become one."""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

ALIGN = 256
"""Bytes; what vector units, GPUs and cache lines like."""


def aligned(size: int, to: int = ALIGN) -> int:
    """Return `size` bytes rounded up to a multiple of `to` bytes: 257 -> 512."""
    return -(-size // to) * to


@dataclass
class Segment:
    """`size` contiguous bytes of one rank's memory that all of `ranks` can reach; the owner's segment `number`.

    `free` lists the free blocks as (offset, size) in bytes, ascending by offset; `returned` holds freed blocks
    that are not yet merged into `free`.
    """

    number: int
    size: int
    ranks: frozenset[int]
    free: list[tuple[int, int]] = field(default_factory=list)
    returned: deque[tuple[int, int]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.free = [(0, self.size)]

    def take(self, size: int) -> int | None:
        """Take a block of `size` bytes, a multiple of ALIGN; return its byte offset in the segment.

        Return None where no free block is so large.
        """
        while self.returned:
            self._merge(*self.returned.popleft())
        for at, (offset, room) in enumerate(self.free):
            if room >= size:
                self.free[at : at + 1] = [(offset + size, room - size)] if room > size else []
                return offset
        return None

    def give_back(self, offset: int, size: int) -> None:
        """Note that the block of `size` bytes at byte `offset` is free again; the next `take` merges it.

        It may be called at any moment, even by a garbage collector within `take`.
        """
        self.returned.append((offset, size))

    def _merge(self, offset: int, size: int) -> None:
        self.free = sorted([*self.free, (offset, size)])
        joined: list[tuple[int, int]] = []
        for start, room in self.free:
            if joined and joined[-1][0] + joined[-1][1] == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + room)
            else:
                joined.append((start, room))
        self.free = joined


def block_of(memory: Any, segment: Segment, offset: int, size: int) -> Tensor:
    """Return `size` bytes of `segment` from byte `offset` on as a uint8 tensor that aliases `memory`.

    `memory` is a writable buffer with all bytes of the segment. The block, which was taken before, returns to
    the segment once no tensor refers to it.
    """
    block = (ctypes.c_ubyte * size).from_buffer(memory, offset)
    weakref.finalize(block, segment.give_back, offset, size)  # the last tensor's storage refers to it
    return torch.frombuffer(block, dtype=torch.uint8)


def take(segments: Iterable[Segment], size: int, ranks: Iterable[int]) -> tuple[Segment, int] | None:
    """Take `size` bytes in the first segment with room that all of `ranks` reach; return (segment, byte offset).

    Return None where no segment has room. `size` is a multiple of ALIGN.
    """
    for segment in segments:
        if segment.ranks.issuperset(ranks) and (offset := segment.take(size)) is not None:
            return segment, offset
    return None
