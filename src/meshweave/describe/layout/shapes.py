"""Choosing and comparing the shapes of meshes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from meshweave.base.errors import LayoutError


def nearest_mesh_shape(planned: Sequence[int], shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape nearest in proportion to the planned one; with all sides over 1 if there is one.

    Raises:
        LayoutError: `shapes` is empty.
    """
    if not shapes:
        raise LayoutError("the algorithm has no mesh of that many ranks")

    def distance(shape: tuple[int, ...]) -> float:
        logs = [math.log(size / wanted) for size, wanted in zip(shape, planned, strict=True)]
        mean = sum(logs) / len(logs)
        return sum((value - mean) ** 2 for value in logs)

    full = [shape for shape in shapes if min(shape) > 1] or list(shapes)
    return min(full, key=distance)


def near_square(count: int) -> tuple[int, int]:
    """Return (rows, columns) of the mesh of `count` ranks that is nearest to a square, with rows <= columns."""
    rows = max(divisor for divisor in range(1, math.isqrt(count) + 1) if count % divisor == 0)
    return rows, count // rows


def device_meshes(num_devices: int) -> tuple[tuple[int, int], ...]:
    """Return all meshes (d1, d2) of `num_devices` devices, the smallest d2 first: ATP-1, ATP-2, ..."""
    small = [d for d in range(1, math.isqrt(num_devices) + 1) if num_devices % d == 0]
    divisors = sorted({*small, *(num_devices // d for d in small)})
    return tuple((num_devices // d2, d2) for d2 in divisors)
