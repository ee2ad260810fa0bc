"""What a universal product computes and moves, per rank and phase, without writing the program."""

from __future__ import annotations

from collections.abc import Iterable

from meshweave.algorithms.universal.issue_order import needs_no_accumulate
from meshweave.algorithms.universal.panels import OwnedBlock
from meshweave.algorithms.universal.problem import OPERANDS
from meshweave.algorithms.universal.reduction import partial_sums, replicas_of, share_to_sum
from meshweave.algorithms.universal.slicing import Slicing, split_counts
from meshweave.base.units import dtype_bytes
from meshweave.ir.volume import PhaseVolume, RankVolume, Volume


def volume(slicing: Slicing, num_slices: int | None = None) -> Volume:
    """Return the exact FLOPs, exchanged bytes and messages of each rank in the program of a slicing.

    They are counted per phase: `before` (sums of partial operands), `during` (the products) and `after` (sums of
    replicas of C). `local_bytes` of a rank counts the elements that are added to its memory, by any rank; local
    copies, and results that are stored without an addition, are left out.

    Args:
        num_slices: replaces the config's `num_slices`; None keeps it.
    """
    problem = slicing.problem
    ranks = problem.ranks
    total = Volume(*({rank: RankVolume() for rank in ranks} for _ in range(3)))
    if 0 in problem.sizes:
        return total
    element_bytes = dtype_bytes(problem.dtype)
    num_slices = slicing.config.num_slices if num_slices is None else num_slices
    adds = not needs_no_accumulate(slicing)
    for rank in ranks:
        for operand in OPERANDS[:2]:
            for _, blocks in partial_sums(slicing, operand, rank):
                _fetch(total.before, rank, blocks, element_bytes)
                added = sum(block.num_elements for block in blocks[1:])
                total.before[rank].local_bytes += element_bytes * added
        load = total.during[rank]
        counts = split_counts([run for _, run in slicing.runs(rank)], num_slices)
        for step, count in zip(slicing.whole_steps[rank], counts, strict=True):
            m, n, k = step.sizes
            load.flops += 2 * m * n * k
            load.num_products += count
            for operand in OPERANDS:
                panel = step.panels[operand]
                if operand != "c":
                    _fetch(total.during, rank, panel.blocks, element_bytes, count)
                elif slicing.config.stationary != "c":  # a product that adds to C where it lies moves nothing
                    _accumulate(total.during, rank, panel.blocks, element_bytes, count, adds)
        _merge_replicas(total.after, slicing, rank, element_bytes)
    return total


def _merge_replicas(phase: PhaseVolume, slicing: Slicing, rank: int, element_bytes: int) -> None:
    """Count how a rank sums its share of C over the replicas, and fetches the shares of the others."""
    for holder in replicas_of(slicing, rank):
        if holder == rank:
            continue
        if slicing.config.stationary == "c":
            share = OwnedBlock(holder, *share_to_sum(slicing, rank))
            _fetch(phase, rank, (share,), element_bytes)
            phase[rank].local_bytes += element_bytes * share.num_elements
        _fetch(phase, rank, (OwnedBlock(holder, *share_to_sum(slicing, holder)),), element_bytes)


def _fetch(
    phase: PhaseVolume, rank: int, blocks: Iterable[OwnedBlock], element_bytes: int, messages: int = 1
) -> None:
    for block in blocks:
        size = block.num_elements * element_bytes
        if block.owner == rank or not size:
            continue
        phase[rank].received_bytes += size
        phase[rank].num_messages += messages
        phase[block.owner].sent_bytes += size


def _accumulate(
    phase: PhaseVolume,
    rank: int,
    blocks: Iterable[OwnedBlock],
    element_bytes: int,
    messages: int,
    adds: bool,
) -> None:
    """Count the results of a product that go to their owners, which add them up or, without `adds`, store them."""
    for block in blocks:
        size = block.num_elements * element_bytes
        phase[block.owner].local_bytes += size * adds
        if block.owner == rank:
            continue
        phase[rank].sent_bytes += size
        phase[rank].num_messages += messages
        phase[block.owner].received_bytes += size
