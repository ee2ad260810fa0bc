"""Context parallelism by ring attention (Liu et al.): sequences are sharded throughout.

Keys and values of a rank's tokens go round all ranks while each works on its own queries; softmax is kept so far.
Nothing but keys and values moves forward, and these and their gradients backward. Weights are whole, and their
gradients are summed. Every rank works on all keys, masked ones included.
"""

from __future__ import annotations

import numpy as np

from meshweave.algorithms.block.problem import BlockProblem
from meshweave.algorithms.block.ring_equations import POSITIONS
from meshweave.algorithms.block.roles import IDLE, RING
from meshweave.algorithms.block.strategy import BlockAlgorithm
from meshweave.algorithms.contract import Array


class RingAttention(BlockAlgorithm):
    """Keys and values go round the ranks that share sequences."""

    name = "ring_attention"
    title = "Ring attention"
    source = "Liu et al., Ring Attention with Blockwise Transformers, 2023, section 3"
    roles = (RING, IDLE)

    def random_inputs(self, problem: BlockProblem, seed: int = 0) -> dict[str, Array]:
        """Return random tensors, and the positions of tokens in a sequence."""
        inputs = super().random_inputs(problem, seed)
        if POSITIONS in inputs:
            inputs[POSITIONS] = np.arange(problem.sequence).astype(inputs[POSITIONS].dtype)
        return inputs
