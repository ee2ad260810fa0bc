"""Context parallelism by ring attention (Liu et al.): sequences are sharded throughout.

Keys and values of a rank's tokens go round all ranks while each works on its own queries, by online softmax.
Nothing but keys and values moves forward, and these and their gradients backward. Weights are whole, and their
gradients are summed. Every rank works on all keys, masked ones included.
"""

from __future__ import annotations

from meshweave.algorithms.block.roles import IDLE, RING
from meshweave.algorithms.block.strategy import BlockAlgorithm


class RingAttention(BlockAlgorithm):
    """Keys and values go round the ranks that share sequences."""

    name = "ring_attention"
    title = "Ring attention"
    source = "Liu et al., Ring Attention with Blockwise Transformers, 2023, section 3"
    roles = (RING, IDLE)
