"""Who shares which link: how many messages pass each link at once, and the rates that they leave each other.

Links are shared max-min fairly, as a simulation shares them: each message gets an equal share of a link, and what
one cannot use the others have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Flows = Mapping[str, tuple[float, NDArray[np.int64]]]
"""By kind of link, its bytes per second, and how many messages pass each link of that kind at once."""
Counts = NDArray[np.int64]


def torus_flows(
    shape: tuple[int, ...], groups: NDArray[np.int64], one_way: bool = False
) -> tuple[Counts, ...]:
    """Return, for each axis of a torus, how many messages pass each of its links while all ring groups send.

    Each chip sends one message to the next chip of its ring and one to the previous, on the dimension-ordered
    routes of `PlacedMeshes.path`. Entry [d, c] of an axis' array counts those that leave chip c along the axis,
    forwards (d = 0) or backwards (d = 1).

    Args:
        shape: the sizes of the torus, whose chips are numbered in row-major order.
        groups: the chips of each group in the order of its ring, shape (groups, members).
        one_way: whether chips send to the next chip of their ring alone.
    """
    return _torus_flows(shape, groups.shape, groups.tobytes(), one_way)


@lru_cache(maxsize=256)
def _torus_flows(
    shape: tuple[int, ...], size: tuple[int, ...], chips: bytes, one_way: bool
) -> tuple[Counts, ...]:
    groups = np.frombuffer(chips, dtype=np.int64).reshape(size)
    flows = tuple(np.zeros((2, math.prod(shape)), dtype=np.int64) for _ in shape)
    for back, ahead in ((0, -1), (1, 1))[: 1 if one_way else 2]:
        at = list(np.unravel_index(groups.ravel(), shape))
        to = np.unravel_index(np.roll(groups, ahead, axis=1).ravel(), shape)
        for axis, length in enumerate(shape):
            hops = (to[axis] - at[axis]) % length
            forth = 2 * hops < length + 1 - back
            left = np.where(forth, hops, length - hops)
            while left.any():
                moving = left > 0
                np.add.at(flows[axis], ((~forth)[moving] * 1, np.ravel_multi_index(at, shape)[moving]), 1)
                at[axis] = np.where(moving, at[axis] + np.where(forth, 1, -1), at[axis]) % length
                left = left - moving
    return flows


def shared_rates(one: Flows, other: Flows, rates: tuple[float, float]) -> tuple[float, float]:
    """Return the bytes per second that each message gets, of two kinds of traffic that run at once.

    Where the links that carry both are too slow, the messages on them share the rate max-min fairly; the slowest
    link sets the result.

    Args:
        one, other: by kind of link, (its bytes per second, how many messages of this traffic pass each such link).
        rates: (bytes per second of a message of `one` while it runs alone, the same of `other`); upper bounds of
            the result, which has the same order.
    """
    first, second = rates
    for name in one.keys() & other.keys():
        capacity, counts = one[name]
        for pair in set(zip(counts.ravel().tolist(), other[name][1].ravel().tolist(), strict=True)):
            if all(pair) and pair[0] * rates[0] + pair[1] * rates[1] > capacity:
                low = 0 if rates[0] < rates[1] else 1
                least = min(rates[low], capacity / sum(pair))
                most = min(rates[1 - low], (capacity - pair[low] * least) / pair[1 - low])
                own = (least, most) if low == 0 else (most, least)
                first, second = min(first, own[0]), min(second, own[1])
    return first, second
