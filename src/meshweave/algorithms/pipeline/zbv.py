"""ZB-V: no bubble in the memory of 1F1B, with two stages a rank (Qi et al., arXiv 2401.10241, section 6).

Stages go down the ranks and back up, so rank i of p holds stages i and 2 p - 1 - i, and the last stage is on the
first rank. The first backward then starts where the first forward did, which fills the ranks evenly: each holds at
most 2 p stashes of stages half as large as those of 1F1B. Where forward, input and weight gradient take the same
time, and there are 2 p micro-batches or more, no rank waits once it has begun. Otherwise `zb_auto` may be better.
"""

from __future__ import annotations

from meshweave.algorithms.pipeline.actions import Schedule, folded
from meshweave.algorithms.pipeline.phases import Phase, actions_of_phases
from meshweave.base.errors import LayoutError


def zbv(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Return ZB-V, stages i and 2 P - 1 - i on rank i of P. Raises LayoutError if a number is less than 1."""
    if min(num_ranks, num_micro_batches) < 1:
        raise LayoutError("a pipeline has one rank and one micro-batch or more")
    placement = folded(num_ranks)
    count = max(num_micro_batches, 2 * num_ranks - 1)
    actions = (
        actions_of_phases(
            _phases(rank, num_ranks, count), (rank, 2 * num_ranks - 1 - rank), num_micro_batches
        )
        for rank in range(num_ranks)
    )
    return Schedule(placement, num_micro_batches, tuple(actions))


def _phases(rank: int, num_ranks: int, count: int) -> tuple[Phase, ...]:
    """Return the phases of a rank for `count` micro-batches: "0" is its stage on the way down, "1" the other.

    The rank runs ahead on the way down, until its stage on the way up gets work. From its first input gradient on
    it keeps 2 p stashes: each weight gradient makes room for a forward. Once the forwards are used up, input
    gradients come first, and weight gradients fill what is left of the step.
    """
    above, below = rank, num_ranks - rank
    ahead = above + 2 * below - 1
    return (
        (2 * below - 1, "F0"),
        (above, "F1 F0"),
        (below, "F1 I1 W1"),
        (count - ahead, "F0 I0 W0 F1 I1 W1"),
        (ahead - num_ranks, "I0 W0 F1 I1 W1"),
        (above, "I0 I1"),
        (below, "I0 W0"),
        (above, "W1"),
        (count, "W0"),
    )
