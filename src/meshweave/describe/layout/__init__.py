"""Layouts: which elements of a tensor each rank of a mesh holds."""

from meshweave.describe.layout.intervals import Intervals, chunk_bounds
from meshweave.describe.layout.layouts import (
    Layout,
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    Tile,
)

__all__ = [
    "Intervals",
    "Layout",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "StridedShard",
    "Tile",
    "chunk_bounds",
]
