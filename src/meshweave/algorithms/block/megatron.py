"""Tensor parallelism of Megatron-LM on one mesh axis, with and without sequence parallelism.

Each rank has some groups of heads and FFN features. Without sequence parallelism the product that leaves them is
summed by an all-reduce, and so is the gradient of what enters them (Shoeybi et al. 2019). With it each rank has
a part of each sequence of the residual: products are scattered by a reduce-scatter and gathered before the next
one, and gathered again for the gradient of its weight, so that no rank keeps whole sequences (Korthikanti et al.,
MLSys '23). Norms and residuals are then no longer computed on all ranks.
"""

from __future__ import annotations

from meshweave.algorithms.block.roles import IDLE, INNER, SEQUENCE_INNER
from meshweave.algorithms.block.strategy import BlockAlgorithm


class Megatron(BlockAlgorithm):
    """In each half an all-reduce after the second product forward and after the first one's backward part.

    It is ATP on a mesh (N, 1).
    """

    name = "megatron"
    title = "Megatron 1D"
    source = "Shoeybi et al., Megatron-LM, 2019, section 3"
    roles = (INNER, IDLE)


class MegatronSequence(BlockAlgorithm):
    """Sequence parallelism: reduce-scatters and all-gathers in place of all-reduces."""

    name = "megatron_sp"
    title = "Megatron 1D with sequence parallelism"
    source = "Korthikanti et al., Reducing Activation Recomputation, MLSys '23, section 4.2"
    roles = (SEQUENCE_INNER, IDLE)
