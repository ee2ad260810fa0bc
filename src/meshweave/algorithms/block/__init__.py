"""Layers of a transformer as one program, forward and backward.

A strategy is one file that says what each mesh axis does; the guide's page on blocks has an example.
"""

from __future__ import annotations

from meshweave.algorithms.block.atp import Atp
from meshweave.algorithms.block.megatron import Megatron, MegatronSequence
from meshweave.algorithms.block.problem import BlockConfig, BlockProblem
from meshweave.algorithms.block.strategy import BlockAlgorithm

ENTRIES: tuple[BlockAlgorithm, ...] = (Atp(), Megatron(), MegatronSequence())

__all__ = ["ENTRIES", "Atp", "BlockAlgorithm", "BlockConfig", "BlockProblem", "Megatron", "MegatronSequence"]
