"""Shapes of meshes, compared."""

from __future__ import annotations

import math
from collections.abc import Sequence

from meshweave.base.errors import LayoutError


def nearest_mesh_shape(planned: Sequence[int], shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape nearest in proportion to the planned one, among those with all sides over 1 if there are any.

    Raises LayoutError where `shapes` is empty.
    """
    if not shapes:
        raise LayoutError("the algorithm has no mesh of that many ranks")

    def distance(shape: tuple[int, ...]) -> float:
        logs = [math.log(mine / theirs) for mine, theirs in zip(shape, planned, strict=True)]
        mean = sum(logs) / len(logs)
        return sum((value - mean) ** 2 for value in logs)

    full = [shape for shape in shapes if min(shape) > 1] or list(shapes)
    return min(full, key=distance)
