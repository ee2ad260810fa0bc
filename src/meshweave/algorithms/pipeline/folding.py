"""Folds the steps of a rank into loops: runs of equal actions whose micro-batches advance by one number.

At each place the period is taken whose repetitions cover the most steps. What repeats is folded again, so
that a period that is itself made of runs becomes loops in a loop.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LONGEST_PERIOD = 1024
"""Steps of the longest period that is looked for."""
MOST_NESTED = 2
"""The depth to which loops are nested."""

Pairs = NDArray[np.int64]
"""(steps, 2): template and micro-batch, the latter -1 for a step that belongs to none."""


@dataclass(frozen=True)
class StepLoop:
    """A loop of `count` turns over `body`; from turn to turn all micro-batches grow by `increment`.

    An entry of the body is a loop, or a single step as (number of its template, micro-batch in the first turn). A
    template is an action without its micro-batch (`communication.Steps`).
    """

    count: int
    increment: int
    body: tuple[tuple[int, int] | StepLoop, ...]


Folded = tuple[tuple[int, int] | StepLoop, ...]
"""(template, micro-batch of the first repetition of all loops around it), and loops."""


def fold(steps: Pairs) -> Folded:
    """Return the steps of one rank, an entry of `Steps.of_rank`, as loops and single steps, in order.

    A single step is (number of its template, micro-batch), with micro-batch -1 where it belongs to none. The steps
    ((0, 0), (1, 0), (0, 1), (1, 1)) give one loop of 2 turns over ((0, 0), (1, 0)).
    """
    return _fold(steps, MOST_NESTED)


def _fold(steps: Pairs, depth: int) -> Folded:
    count = len(steps)
    if depth == 0 or count < 2:
        return tuple((int(template), int(micro_batch)) for template, micro_batch in steps)
    out: list[tuple[int, int] | StepLoop] = []
    at = 0
    while at < count:
        period, turns = _best(steps, at)
        if turns < 2:
            out.append((int(steps[at, 0]), int(steps[at, 1])))
            at += 1
            continue
        increment = int(steps[at + period, 1] - steps[at, 1])
        out.append(StepLoop(turns, increment, _fold(steps[at : at + period], depth - 1)))
        at += period * turns
    return tuple(out)


def _best(steps: Pairs, at: int) -> tuple[int, int]:
    """Return the period and the number of repetitions that cover the most steps from a place on."""
    longest = min(LONGEST_PERIOD, (len(steps) - at) // 2)
    if steps[at, 1] < 0:
        return 1, 1
    periods = np.flatnonzero(steps[at + 1 : at + 1 + longest, 0] == steps[at, 0]) + 1
    advances = steps[at + periods, 1] - steps[at, 1]
    for ahead in _LOOK_AHEAD:
        if ahead >= longest:
            break
        later = steps[np.minimum(at + ahead + periods, len(steps) - 1)]
        same = (later[:, 0] == steps[at + ahead, 0]) & (later[:, 1] - steps[at + ahead, 1] == advances)
        keep = same | (periods <= ahead)
        periods, advances = periods[keep], advances[keep]
    best, covered = (1, 1), 1
    for period, advance in zip(periods.tolist(), advances.tolist(), strict=True):
        end = at + covered
        if end == len(steps):
            break
        same = steps[end, 0] == steps[end - period, 0]
        if end - period >= at and not (same and steps[end, 1] - steps[end - period, 1] == advance):
            continue  # it ends where the best one so far does, or before
        turns = _repetitions(steps, at, period, advance)
        if turns > 1 and turns * period > covered:
            best, covered = (period, turns), turns * period
    return best


_LOOK_AHEAD = (1, 2, 3, 5, 8, 16, 32, 64, 128, 256)
"""Steps ahead of a place at which a period is tried before it is followed to its end."""


def _repetitions(steps: Pairs, at: int, period: int, advance: int) -> int:
    """Return how often the steps from a place on repeat, the first time included."""
    begin, size = at, 4 * period
    while begin + period < len(steps):
        end = min(begin + size, len(steps) - period)
        now, later = steps[begin:end], steps[begin + period : end + period]
        same = (now[:, 0] == later[:, 0]) & (later[:, 1] - now[:, 1] == advance) & (now[:, 1] >= 0)
        if not same.all():
            begin += int(np.argmin(same))
            break
        begin, size = end, 2 * size
    return (begin - at) // period + 1
