"""Fused products: communication that starts as tiles of a product are finished, or that starts its tiles."""

from __future__ import annotations

from meshweave.algorithms.fused.all_gather import AllGatherAtConsumer as AllGatherAtConsumer
from meshweave.algorithms.fused.all_to_all import FusedAllToAll as FusedAllToAll
from meshweave.algorithms.fused.copied_reduce_scatter import CopiedReduceScatter as CopiedReduceScatter
from meshweave.algorithms.fused.direct_reduce_scatter import DirectReduceScatter as DirectReduceScatter
from meshweave.algorithms.fused.looped_all_gather import LoopedAllGather as LoopedAllGather
from meshweave.algorithms.fused.looped_reduce_scatter import LoopedReduceScatter as LoopedReduceScatter
from meshweave.algorithms.fused.product import NoChoice as NoChoice
from meshweave.algorithms.fused.product import Tiles as Tiles
from meshweave.algorithms.fused.ring_reduce_scatter import RingReduceScatter as RingReduceScatter
from meshweave.algorithms.fused.rings import ring_problems as ring_problems
from meshweave.algorithms.fused.sequential import SequentialReduceScatter as SequentialReduceScatter
from meshweave.algorithms.fused.sequential_all_gather import SequentialAllGather as SequentialAllGather

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
