"""Choosing and comparing the shapes of meshes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from meshweave.base.errors import LayoutError


def nearest_mesh_shape(planned: Sequence[int], shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the one of `shapes` whose proportions are nearest to those of `planned`, with any number of ranks.

    Each has one size for each axis of `planned`; (2, 4) is as near to (4, 8) as (4, 8) itself. Shapes with an
    axis of size 1 count only where there are no others.

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
    rows = max(divisor for divisor in divisors_of(count) if divisor**2 <= count)
    return rows, count // rows


def divisors_of(number: int) -> tuple[int, ...]:
    """Return the divisors of a number, ascending."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))


def factorisations(count: int, num_dims: int) -> tuple[tuple[int, ...], ...]:
    """Return all tuples of `num_dims` sizes whose product is `count`, lexicographically: (1, 6), (2, 3), ..."""
    if num_dims == 1:
        return ((count,),)
    return tuple(
        (d, *sizes) for d in divisors_of(count) for sizes in factorisations(count // d, num_dims - 1)
    )
