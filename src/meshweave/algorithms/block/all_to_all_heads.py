"""Context parallelism by all-to-all (DeepSpeed-Ulysses): sequences are sharded, but for attention heads are.

Before attention each rank sends its part of the sequences of every group of heads to the rank that works on that
group, and after it the reverse. An all-to-all moves 1 / N of what an all-gather does. Weights are whole, and their
gradients are summed.
"""

from __future__ import annotations

from meshweave.algorithms.block.roles import HEADS_FOR_SEQUENCE, IDLE
from meshweave.algorithms.block.strategy import BlockAlgorithm


class AllToAllHeads(BlockAlgorithm):
    """An all-to-all before and one after attention, forward and backward."""

    name = "all_to_all_heads"
    title = "Ulysses"
    source = "Jacobs et al., DeepSpeed Ulysses, 2023, section 3"
    roles = (HEADS_FOR_SEQUENCE, IDLE)
