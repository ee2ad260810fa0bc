"""What a universal product computes and moves, per rank and phase, without writing the program."""

from __future__ import annotations

from collections.abc import Iterable

from meshweave.algorithms.universal.problem import OPERANDS
from meshweave.algorithms.universal.slicing import OwnedBlock, Slicing, split_counts
from meshweave.base.units import dtype_bytes
from meshweave.ir.volume import Load, Phase, Volume


def volume(slicing: Slicing, slices: int | None = None) -> Volume:
    """Exact counts: those of the program that `universal_program` writes, with other `slices` where they are
    given."""
    problem = slicing.problem
    ranks = problem.ranks
    found = Volume(*({rank: Load() for rank in ranks} for _ in range(3)))
    if 0 in problem.sizes:
        return found
    element = dtype_bytes(problem.dtype)
    slices = slicing.config.num_slices if slices is None else slices
    for rank in ranks:
        for operand in OPERANDS[:2]:
            for _, blocks in slicing.partial_sums(operand, rank):
                _fetch(found.before, rank, blocks, element)
                found.before[rank].local_bytes += element * sum(block.num_elements for block in blocks[1:])
        mine = found.during[rank]
        counts = split_counts([run for _, run in slicing.runs(rank)], slices)
        for step, count in zip(slicing.whole_steps[rank], counts, strict=True):
            m, n, k = step.sizes
            mine.flops += 2 * m * n * k
            mine.products += count
            for operand in OPERANDS:
                panel = step.panels[operand]
                if operand != "c":
                    _fetch(found.during, rank, panel.blocks, element, count)
                elif slicing.config.stationary != "c":  # there the product itself adds to what it has
                    _give(found.during, rank, panel.blocks, element, count)
        others = [other for other in slicing.replicas_of(rank) if other != rank]
        for other in others:
            if slicing.config.stationary == "c":
                share = OwnedBlock(other, *slicing.owned_share(rank))
                _fetch(found.after, rank, (share,), element)
                found.after[rank].local_bytes += element * share.num_elements
            _fetch(found.after, rank, (OwnedBlock(other, *slicing.owned_share(other)),), element)
    return found


def _fetch(phase: Phase, rank: int, blocks: Iterable[OwnedBlock], element: int, count: int = 1) -> None:
    for block in blocks:
        size = block.num_elements * element
        if block.owner == rank:
            continue
        phase[rank].received_bytes += size
        phase[rank].messages += count
        phase[block.owner].sent_bytes += size


def _give(phase: Phase, rank: int, blocks: Iterable[OwnedBlock], element: int, count: int) -> None:
    for block in blocks:
        size = block.num_elements * element
        if block.owner == rank:
            phase[rank].local_bytes += size
            continue
        phase[rank].sent_bytes += size
        phase[rank].messages += count
        phase[block.owner].received_bytes += size
        phase[block.owner].local_bytes += size
