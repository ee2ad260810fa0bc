"""Data parallelism of layers: every rank has part of the batch, and gradients of weights are summed over ranks.

The three stages of ZeRO (Rajbhandari et al., SC '20, section 5) keep less and less on each rank. Weights are given
in parts, as the optimizer that is sharded likewise leaves them. Gathers run in a lane of their own: that of a
weight runs beside earlier products, at most one layer ahead of its use. So do reductions of gradients, beside the
backward of earlier layers. Parameters of norms are whole on every rank.
"""

from __future__ import annotations

from meshweave.algorithms.block.roles import (
    BATCH,
    FULLY_SHARDED,
    GATHERED_ONCE,
    IDLE,
    REDUCED_LAST,
)
from meshweave.algorithms.block.strategy import BlockAlgorithm


class DataParallel(BlockAlgorithm):
    """Whole weights on every rank; an all-reduce of each gradient as soon as it is complete."""

    name = "data_parallel"
    title = "Data parallel"
    source = "Li et al., PyTorch Distributed, VLDB '20"
    roles = (BATCH, IDLE)


class ZeroOne(BlockAlgorithm):
    """Weights gathered once; gradients reduced and scattered after the whole backward part."""

    name = "zero1"
    title = "ZeRO-1"
    source = "Rajbhandari et al., ZeRO, SC '20, section 5.1"
    roles = (REDUCED_LAST, IDLE)


class ZeroTwo(BlockAlgorithm):
    """Weights gathered once; each gradient reduced and scattered as soon as it is complete."""

    name = "zero2"
    title = "ZeRO-2"
    source = "Rajbhandari et al., ZeRO, SC '20, section 5.2"
    roles = (GATHERED_ONCE, IDLE)


class ZeroThree(BlockAlgorithm):
    """Weights gathered for each use and freed after it, as fully sharded data parallelism (FSDP) does."""

    name = "zero3"
    title = "ZeRO-3"
    source = "Rajbhandari et al., ZeRO, SC '20, section 5.3; Zhao et al., PyTorch FSDP, VLDB '23"
    roles = (FULLY_SHARDED, IDLE)
