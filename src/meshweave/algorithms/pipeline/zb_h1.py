"""ZB-H1: 1F1B with the weight gradients put where 1F1B waits (Qi et al., arXiv 2401.10241, section 2.1).

A backward is two actions: the input gradient, for which the stage before waits, and the weight gradient, for which
nobody waits. Rank i of p runs p - i forwards, then input gradients and forwards in turn as in 1F1B. It starts with
weight gradients i micro-batches late, so that every rank has p micro-batches in flight, as the first rank of 1F1B
has. The bubble is (p - 1) (F + I - W), a third of that of 1F1B where all three take the same time (table 2).
"""

from __future__ import annotations

from meshweave.algorithms.pipeline.actions import Schedule
from meshweave.algorithms.pipeline.phases import actions_of_phases
from meshweave.base.errors import LayoutError


def zb_h1(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Return the ZB-H1 schedule, stage i on rank i. Raises LayoutError if a number is less than 1."""
    if min(num_ranks, num_micro_batches) < 1:
        raise LayoutError("a pipeline has one rank and one micro-batch or more")
    actions = []
    for rank in range(num_ranks):
        warm_up = min(num_micro_batches, num_ranks - rank - 1)
        steady = num_micro_batches - warm_up
        without_weights = min(rank, steady)
        phases = (
            (warm_up, "F0"),
            (without_weights, "F0 I0"),
            (steady - without_weights, "F0 I0 W"),
            *((1, "I0") if late < rank else (1, "I0 W") for late in range(steady, steady + warm_up)),
            (num_micro_batches, "W"),
        )
        actions.append(actions_of_phases(phases, (rank,), num_micro_batches))
    return Schedule(tuple(range(num_ranks)), num_micro_batches, tuple(actions))
