"""The orders in which degrees are laid on a cluster, and the links on which each degree then communicates."""

from __future__ import annotations

from functools import lru_cache
from itertools import permutations
from typing import NamedTuple

from meshweave.algorithms.step.problem import DEGREES, Degree
from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.machine.levels import level_sizes

Order = tuple[Degree, ...]
"""Names of degrees, the innermost first."""


class DegreeSizes(NamedTuple):
    """The sizes of the four degrees; `tensor` counts ranks, whatever their mesh."""

    data: int
    pipeline: int
    context: int
    tensor: int


def distinct_orders(cluster: Cluster, sizes: DegreeSizes) -> tuple[Order, ...]:
    """Return orders of the degrees, innermost first, that differ in the links on which a degree communicates.

    Of orders that put every degree on the same links only the first is returned; `DEGREES` comes first of all.
    Degrees of 1 do not count. Data and context, where they are next to each other, also count as one joint degree,
    since their ranks sum gradients in one group.
    """
    return _distinct_orders(level_sizes(cluster.network), sizes)


@lru_cache(maxsize=8192)
def _distinct_orders(levels: tuple[int, ...] | None, sizes: DegreeSizes) -> tuple[Order, ...]:
    data, pipeline, context, tensor = sizes
    size_of: dict[str, int] = {"data": data, "pipeline": pipeline, "context": context, "tensor": tensor}
    orders: dict[tuple[object, ...], Order] = {}
    for order in permutations(DEGREES):
        stride = 1
        strides: dict[str, int] = {}
        places: list[tuple[str, tuple[object, ...]]] = []
        for name in order:
            if size_of[name] > 1:
                strides[name] = stride
                places.append((name, place_on_levels(levels, size_of[name], stride)))
            stride *= size_of[name]
        inner, outer = sorted(("context", "data"), key=lambda name: strides.get(name, 0))
        if inner in strides and strides[outer] == strides[inner] * size_of[inner]:  # one group sums gradients
            both = place_on_levels(levels, size_of["context"] * size_of["data"], strides[inner])
            places.append(("replicas", both))
        orders.setdefault(tuple(sorted(places)), order)
    return tuple(orders.values())


def place_on_levels(levels: tuple[int, ...] | None, size: int, stride: int) -> tuple[object, ...]:
    """Return a cache key of the links on which groups of `size` ranks, `stride` chips apart, communicate.

    The key is (size, stride) on a torus; else `size` and, for each level of the network (a host, a subtree), (how
    many ranks of a group lie in one block of chips, the stride where groups straddle blocks or else 0).

    Args:
        levels: the number of chips in a block of each level; None on a torus, which has no levels.
    """
    if levels is None:
        return size, stride
    return size, *(_members(size, stride, block) for block in levels)


def _members(size: int, stride: int, block: int) -> tuple[int, int]:
    """Return how many of a group lie in a block of chips, and the stride where groups straddle blocks."""
    span = size * stride
    if stride % block == 0:
        return 1, 0
    if block % stride == 0 and (block % span == 0 or span % block == 0):
        return min(size, block // stride), 0
    return max(1, min(size, block // stride)), stride
