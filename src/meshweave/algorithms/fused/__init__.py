"""Fused products: communication that starts as tiles of a product are finished, or that starts its tiles."""

from __future__ import annotations

from meshweave.algorithms.fused.all_gather import AllGatherAtConsumer
from meshweave.algorithms.fused.all_to_all import FusedAllToAll
from meshweave.algorithms.fused.copied_reduce_scatter import CopiedReduceScatter
from meshweave.algorithms.fused.direct_reduce_scatter import DirectReduceScatter
from meshweave.algorithms.fused.looped_all_gather import LoopedAllGather
from meshweave.algorithms.fused.looped_reduce_scatter import LoopedReduceScatter
from meshweave.algorithms.fused.product import NoChoice, Tiles
from meshweave.algorithms.fused.ring_reduce_scatter import RingReduceScatter
from meshweave.algorithms.fused.rings import ring_problems
from meshweave.algorithms.fused.sequential import SequentialReduceScatter
from meshweave.algorithms.fused.sequential_all_gather import SequentialAllGather

ENTRIES = (
    RingReduceScatter(),
    DirectReduceScatter(),
    CopiedReduceScatter(),
    AllGatherAtConsumer(),
    FusedAllToAll(),
    SequentialReduceScatter(),
    LoopedReduceScatter(),
    SequentialAllGather(),
    LoopedAllGather(),
)

__all__ = [
    "ENTRIES",
    "AllGatherAtConsumer",
    "CopiedReduceScatter",
    "DirectReduceScatter",
    "FusedAllToAll",
    "LoopedAllGather",
    "LoopedReduceScatter",
    "NoChoice",
    "RingReduceScatter",
    "SequentialAllGather",
    "SequentialReduceScatter",
    "Tiles",
    "ring_problems",
]
