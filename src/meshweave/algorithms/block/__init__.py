"""Layers of a transformer as one program, forward and backward.

A strategy is one file that says what each mesh axis does; the guide's page on blocks has an example.
"""

from __future__ import annotations

from meshweave.algorithms.block.all_to_all_heads import AllToAllHeads
from meshweave.algorithms.block.atp import Atp
from meshweave.algorithms.block.data_parallel import DataParallel, ZeroOne, ZeroThree, ZeroTwo
from meshweave.algorithms.block.megatron import Megatron, MegatronSequence
from meshweave.algorithms.block.problem import BlockConfig as BlockConfig
from meshweave.algorithms.block.problem import BlockProblem as BlockProblem
from meshweave.algorithms.block.ring_attention import RingAttention
from meshweave.algorithms.block.roles import BLOCK_ROLES as BLOCK_ROLES
from meshweave.algorithms.block.roles import AxisRole as AxisRole
from meshweave.algorithms.block.strategy import BlockAlgorithm as BlockAlgorithm
from meshweave.algorithms.block.two_d import (
    Collective2d,
    MeshSliceBlock,
    SummaBlock,
    TwoHalfDBlock,
    WangBlock,
)

ENTRIES: tuple[BlockAlgorithm, ...] = (
    MegatronSequence(),
    Megatron(),
    Atp(),
    Collective2d(),
    MeshSliceBlock(),
    WangBlock(),
    SummaBlock(),
    TwoHalfDBlock(),
    DataParallel(),
    ZeroOne(),
    ZeroTwo(),
    ZeroThree(),
    AllToAllHeads(),
    RingAttention(),
)
