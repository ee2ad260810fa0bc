"""When the ranks of 1F1B are done, slot by slot and without a graph: for pipelines of many ranks.

If all actions took one slot, rank i of P would run the forward of micro-batch m in slot i + m as long as that is
before P, else in slot i + 2 m, and the backward in slot 2 P - 1 - i + 2 m. Whatever actions take, each waits for
the one before it on its rank, and for what the rank before (forward) or after (backward) did last.
"""

from __future__ import annotations

import numpy as np

from meshweave.algorithms.pipeline.action_table import IntArray
from meshweave.algorithms.pipeline.action_times import ActionTimes


def ends_in_slots(micro_batches: int, times: ActionTimes) -> tuple[int, ...]:
    """Return for each rank the tick at which it ends a step of 1F1B with one stage per rank.

    A whole backward takes both gradients in full: `times.saved` is not subtracted.
    """
    size, most = len(times.forward), 2 * (micro_batches - 1)
    forward, input_grad, weight_grad = (
        np.array(each, np.int64) for each in (times.forward, times.input_grad, times.weight_grad)
    )
    backward, delay = input_grad + weight_grad, np.array((*times.transfer, 0), np.int64)
    ends = np.zeros(size + 2, np.int64)  # of each rank, between two that are always done
    sends = np.zeros(size + 1, np.int64)  # what each rank waits for a value from the one before
    sends[1:-1] = delay[:-1]
    for slot in range(most + 2 * size):
        before = ends.copy()
        if slot < size:
            ranks = slice(max(0, slot - micro_batches + 1), slot + 1)
        else:
            least = max(2 * size - slot, slot - most, 0)
            ranks = slice(least + (least - slot) % 2, size, 2)
        _advance(ends, before, ranks, -1, sends[:-1], forward)
        least, limit = 2 * size - 1 - slot, most + 2 * size - slot
        least = max(least, (slot + 1) % 2)
        _advance(ends, before, slice(least, min(limit, size), 2), 1, sends[1:], backward)
    return tuple(ends[1:-1].tolist())


def _advance(
    ends: IntArray, before: IntArray, ranks: slice, towards: int, delays: IntArray, ticks: IntArray
) -> None:
    """Advance ranks by one action each, which waits for their neighbour on one side."""
    if ranks.start >= ranks.stop:
        return
    own = slice(ranks.start + 1, ranks.stop + 1, ranks.step)
    other = slice(own.start + towards, own.stop + towards, ranks.step)
    ends[own] = np.maximum(before[own], before[other] + delays[ranks]) + ticks[ranks]
