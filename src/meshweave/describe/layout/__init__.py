"""Layouts: which elements of a tensor each rank of a mesh holds."""

from meshweave.describe.layout.layouts import (
    Intervals,
    Layout,
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    Tile,
    chunk_bounds,
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
