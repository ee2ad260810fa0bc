"""Times of what a block does besides its fully connected layers, and of whole training steps."""

from __future__ import annotations

from meshweave.describe.model import load_model
from meshweave.describe.model.attention import other_passes
from meshweave.reproduce.meshslice.study import Block, Study, faster
from meshweave.tune.unrolled import LEADER


def rest_s(study: Study, block: Block) -> float:
    """Seconds by roofline: each operation at the chip's effective FLOP rate or its memory bandwidth, whichever
    takes longer. No launch costs, no communication."""
    chip = study.pod.chip
    return sum(
        max(one.flops / chip.effective_flops_per_s, one.bytes / chip.memory_bytes_per_s) / block.chips
        for one in other_passes(load_model(block.model), study.workload(block))
    )


def end_to_end_gain(study: Study, block: Block, rival: str) -> float:
    """By how many percent MeshSlice trains faster than a rival, other layers included."""
    rest = rest_s(study, block)
    return faster(study.block_s(block, rival) + rest, study.block_s(block, LEADER) + rest)


def rest_share(study: Study, block: Block) -> float:
    """Percent of a block's time with MeshSlice that its other layers take."""
    rest = rest_s(study, block)
    return 100 * rest / (rest + study.block_s(block, LEADER))


def implied_share(gain: float, end_to_end: float) -> float:
    """The share in percent that a gain in the fully connected layers and one end to end imply.

    With the fully connected layers as 1 and the rest as r: (1 + g + r) / (1 + r) = 1 + G, so r = (g - G) / G.
    """
    rest = (gain - end_to_end) / end_to_end
    return 100 * rest / (1 + rest)
