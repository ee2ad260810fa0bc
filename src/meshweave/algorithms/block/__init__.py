"""Blocks: several products and what stands between them as one program."""

from __future__ import annotations

from meshweave.algorithms.block.atp import Atp, BlockAlgorithm, BlockProblem, Chunks

ENTRIES: tuple[BlockAlgorithm, ...] = (Atp(),)

__all__ = ["ENTRIES", "Atp", "BlockAlgorithm", "BlockProblem", "Chunks"]
