"""Fused products: communication that starts as tiles of a product are finished."""

from __future__ import annotations

from meshweave.algorithms.fused.ring_reduce_scatter import RingReduceScatter, TileGranularity

ENTRIES = (RingReduceScatter(),)

__all__ = ["ENTRIES", "RingReduceScatter", "TileGranularity"]
