"""Times of what a block does besides its fully connected layers, and of whole training steps."""

from __future__ import annotations

from meshweave.describe.model import load_model
from meshweave.tune.unrolled import REFERENCE_ALGORITHM
from meshweave_studies.layer_operations import ops_besides_fc_layers
from meshweave_studies.meshslice.study import FcBlock, MeshSliceStudy
from meshweave_studies.verdict import percent_faster


def other_operations_s(study: MeshSliceStudy, block: FcBlock) -> float:
    """Return the seconds of a block's operations besides its fully connected layers, by roofline.

    Each operation takes the longer of its FLOPs at the chip's effective rate and its bytes at the memory's.
    There are no launch costs and no communication.
    """
    chip = study.pod.chip
    return sum(
        max(op.flops / chip.effective_flops_per_s, op.bytes / chip.memory_bytes_per_s) / block.chips
        for op in ops_besides_fc_layers(load_model(block.model), study.workload(block))
    )


def end_to_end_gain(study: MeshSliceStudy, block: FcBlock, rival: str) -> float:
    """Return by how many percent MeshSlice trains faster than a rival, other layers included."""
    others_s = other_operations_s(study, block)
    return percent_faster(
        study.block_s(block, rival) + others_s, study.block_s(block, REFERENCE_ALGORITHM) + others_s
    )


def other_operations_percent(study: MeshSliceStudy, block: FcBlock) -> float:
    """Return the percent of a block's time with MeshSlice that its other layers take."""
    others_s = other_operations_s(study, block)
    return 100 * others_s / (others_s + study.block_s(block, REFERENCE_ALGORITHM))
