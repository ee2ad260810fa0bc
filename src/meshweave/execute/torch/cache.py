"""Bound programs that a context keeps, the least recently used of them dropped where they grow over a limit.

To bind a program is collective among its ranks, and so is to bind it anew once it was dropped. So all of them must
drop the same program at the same call, though each knows only what it does itself. That holds here because every
decision is a function of values that these ranks share:

- programs of different sets of ranks do not compete: a rank of two sets sees calls that the others do not. The
  limit is one for each set of ranks;
- the ranks of a set call its programs in the same order, as with any communicator, so recency is the same on all;
- the size of a program is that on the rank where it is largest (`program_bytes`), which each rank works out for
  itself. What is really allocated or free is never asked.
"""

from __future__ import annotations

import ctypes
import gc
import math
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, MutableMapping, Sequence
from functools import cache
from typing import Any, Generic, TypeVar

import torch

from meshweave.base.units import format_bytes
from meshweave.ir.program import Program

DEFAULT_CACHE_BYTES = 1 << 30
"""The default limit, in bytes for each set of ranks: room for some 1,000 small products or 10 of 4096 x 4096."""

BYTES_PER_OP = 4096
BYTES_PER_PROGRAM = 1 << 16
"""What Python's objects for a program take, beside its buffers."""

_NUM_REMEMBERED = 64
_LEAST_COLLECTED = 32 << 20

ValueT = TypeVar("ValueT")


class CachedProgram(Generic[ValueT]):
    """What a `ProgramCache` keeps of one program.

    Attributes:
        key: what the program is kept under.
        value: what was given to `ProgramCache.put`, such as a bound program.
        num_bytes: the program's size in bytes on the rank where it is largest.
    """

    __slots__ = ("_recency", "_ties", "key", "num_bytes", "value")

    def __init__(
        self,
        key: Hashable,
        value: ValueT,
        num_bytes: int,
        recency: OrderedDict[Hashable, CachedProgram[Any]],
    ) -> None:
        self.key, self.value, self.num_bytes = key, value, num_bytes
        self._recency = recency
        self._ties: list[tuple[MutableMapping[Any, Any], Any]] = []

    def touch(self) -> ValueT:
        """Mark this program as the most recently used; return `value`. All its ranks must call it together."""
        if self.key in self._recency:
            self._recency.move_to_end(self.key)
        return self.value

    def tie(self, mapping: MutableMapping[Any, Any], key: Any) -> None:
        """Have `mapping[key]` removed when this program is dropped."""
        if (mapping, key) not in self._ties:
            self._ties.append((mapping, key))

    def drop(self) -> None:
        """Remove all entries that `tie` named from their mappings; they are of no use without this program."""
        for mapping, key in self._ties:
            mapping.pop(key, None)
        self._ties.clear()


class ProgramCache:
    """The programs that a context keeps; see the module docstring.

    Args:
        limit_bytes: the most bytes to keep for each set of ranks. The newest program stays even if it is larger.
    """

    def __init__(self, limit_bytes: int = DEFAULT_CACHE_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self._programs: dict[tuple[int, ...], OrderedDict[Hashable, CachedProgram[Any]]] = {}
        self._bytes: dict[tuple[int, ...], int] = {}
        self._dropped: OrderedDict[Hashable, None] = OrderedDict()  # the last keys
        self._uncollected_bytes = 0
        self._most_uncollected = min(limit_bytes // 4, max(limit_bytes // 16, _LEAST_COLLECTED))
        self._has_warned = False

    def num_bytes(self, ranks: Sequence[int]) -> int:
        """Return the bytes of all programs kept for this set of ranks, each counted at its size on the rank where
        it is largest.
        """
        return self._bytes.get(tuple(ranks), 0)

    def __len__(self) -> int:
        return sum(map(len, self._programs.values()))

    def get(self, ranks: Sequence[int], key: Hashable) -> CachedProgram[Any] | None:
        """Return the program kept for `ranks` under `key` and mark it most recently used; None if there is none.

        All of `ranks` must call it together.
        """
        recency = self._programs.get(tuple(ranks))
        program = None if recency is None else recency.get(key)
        if program is not None:
            program.touch()
        return program

    def put(
        self, ranks: Sequence[int], key: Hashable, value: ValueT, num_bytes: int
    ) -> CachedProgram[ValueT]:
        """Keep a program under `key`, drop the least recently used of the same ranks down to the limit, return it.

        All of `ranks` must call it together. The new program stays even if it alone is over the limit.

        Args:
            value: what to keep, such as a bound program.
            num_bytes: the program's size in bytes on the rank where it is largest; equal on all ranks.
        """
        recency = self._programs.setdefault(tuple(ranks), OrderedDict())
        previous = recency.get(key)
        total = self.num_bytes(ranks) + num_bytes - (0 if previous is None else previous.num_bytes)
        program = recency[key] = CachedProgram(key, value, num_bytes, recency)
        recency.move_to_end(key)
        self._warn_if_thrashing(key, num_bytes)
        while total > self.limit_bytes and len(recency) > 1:
            dropped_key, dropped = recency.popitem(last=False)
            dropped.drop()
            total -= dropped.num_bytes
            self._uncollected_bytes += dropped.num_bytes
            self._dropped[dropped_key] = None
            if len(self._dropped) > _NUM_REMEMBERED:
                self._dropped.popitem(last=False)
        self._bytes[tuple(ranks)] = total
        # Lanes of a bound program refer to each other, and Python's collector counts objects, not their bytes.
        if self._uncollected_bytes > self._most_uncollected:
            self._uncollected_bytes = 0
            gc.collect()
            _malloc_trim()(0)
        return program

    def clear(self) -> None:
        """Drop all programs of all sets of ranks."""
        for recency in self._programs.values():
            for program in recency.values():
                program.drop()
        self._programs.clear()
        self._bytes.clear()
        self._dropped.clear()

    def _warn_if_thrashing(self, key: Hashable, num_bytes: int) -> None:
        if key in self._dropped and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"a program of {format_bytes(num_bytes)} that was dropped is bound again: those in use need "
                f"more than the {format_bytes(self.limit_bytes)} of this context; give it more cache_bytes",
                RuntimeWarning,
                stacklevel=3,
            )


@cache
def _malloc_trim() -> Callable[[int], object]:
    """Return glibc's function that gives free memory back to the system; elsewhere one that does nothing.

    Programs of many sizes come and go beside others that stay. Without it pages that are free in part add up: over
    5,000 steps of a training that binds some programs in each step, to a tenth of what the process has.
    """
    try:
        trim: Callable[[int], object] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return lambda pad: None
    return trim


def program_bytes(program: Program) -> int:
    """Estimate the bytes of a bound program on the rank where it takes most; the result is equal on all ranks.

    It is twice the bytes of the largest shard of each buffer, for the buffers and for staging, plus
    `description_bytes`.
    """
    total = 0
    for buffer in program.buffers:
        itemsize = getattr(torch, buffer.dtype).itemsize
        shapes = (program.local_shape(buffer.name, rank) for rank in program.mesh_of[buffer.mesh].ranks)
        total += buffer.slots * itemsize * max(map(math.prod, shapes))
    return 2 * total + description_bytes(program)


def description_bytes(program: Program) -> int:
    """Estimate the bytes of Python's objects for a program on the rank with most ops, loops not unrolled."""
    num_ops = Counter(rank for _, ranks in program.ops_with_ranks() for rank in ranks)
    return BYTES_PER_PROGRAM + BYTES_PER_OP * max(num_ops.values(), default=0)
