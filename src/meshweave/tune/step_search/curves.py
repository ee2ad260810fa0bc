"""Curves of a plan: the first configurations of a ranking with other chips, another batch and faster links.

A curve keeps what a configuration is, tensor, context and pipeline degrees, strategy, schedule, micro-batch, ZeRO,
recomputation and order, and changes the number of replicas, their micro-batches, or the rate of the outer links.
Nothing is searched again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from meshweave.algorithms.step import Parallelism, StepProblem, step_of
from meshweave.base.errors import MeshweaveError
from meshweave.base.progress import Progress, no_progress
from meshweave.describe.layout.shapes import divisors_of
from meshweave.describe.machine.levels import link_levels

FACTORS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""What the number of chips and the batch are multiplied by; nearest to it where that does not divide."""
LINK_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)


@dataclass(frozen=True)
class CurvePoint:
    """A training step at one point of a curve.

    Attributes:
        x: the number of chips, the sequences of a step, or the factor of the links' rate.
        memory_bytes: bytes on the fullest chip.
        fits: whether that many fit the memory of a chip.
    """

    x: float
    step_s: float
    tokens_per_s_per_chip: float
    mfu: float
    memory_bytes: int
    fits: bool


@dataclass(frozen=True)
class StepCurve:
    """Steps of several configurations while one quantity, x, varies.

    Attributes:
        name: "chips", "batch" or "links".
        x_text: what x is, in words.
        here: the x of the plan.
        lines: for each configuration its points, in ascending order of x.
    """

    name: str
    x_text: str
    here: float
    lines: tuple[tuple[CurvePoint, ...], ...]


_Place = tuple[float, StepProblem, Parallelism]


def step_curves(
    problem: StepProblem,
    choices: Sequence[Parallelism],
    memory_bytes: int,
    progress: Progress = no_progress,
) -> tuple[StepCurve, ...]:
    """Return three curves: over chips, over the batch, and over the rate of the outermost links.

    Each curve has a line for each of `choices`, in order. "chips" varies the data-parallel degree at one batch,
    "batch" the number of micro-batches of each replica, "links" the rate of the outermost links; nothing else
    changes. Points at which a step cannot be laid out are left out.

    Args:
        memory_bytes: the most bytes that a chip may hold, for `CurvePoint.fits`.
        progress: called with the numbers of points priced so far, and of all.
    """
    kinds: tuple[tuple[str, str, float, Callable[[StepProblem, Parallelism], Iterator[_Place]]], ...] = (
        ("chips", f"chips, batch {problem.batch}", problem.cluster.num_chips, _over_chips),
        ("batch", f"sequences of a step, {problem.cluster.num_chips} chips", problem.batch, _over_batch),
        ("links", f"rate of {link_levels(problem.cluster)[0][0]} over today's", 1.0, _over_links),
    )
    places = [[list(over(problem, choice)) for choice in choices] for *_, over in kinds]
    total, done = sum(len(line) for lines in places for line in lines), 0
    curves = []
    for (name, x_text, here, _), lines in zip(kinds, places, strict=True):
        drawn = []
        for line in lines:
            points = []
            for place in line:
                point = _point(place, memory_bytes)
                points += [point] if point is not None else []
                done += 1
                progress(done, total)
            drawn.append(tuple(points))
        curves.append(StepCurve(name, x_text, here, tuple(drawn)))
    return tuple(curves)


def _point(place: _Place, memory_bytes: int) -> CurvePoint | None:
    x, problem, choice = place
    try:
        step = step_of(problem, choice)
    except MeshweaveError:
        return None
    size = step.memory.total
    return CurvePoint(x, step.time_s, step.tokens_per_second_per_chip, step.mfu, size, size <= memory_bytes)


def _over_chips(problem: StepProblem, choice: Parallelism) -> Iterator[_Place]:
    """Yield a configuration with more and fewer replicas that divide the batch."""
    each = choice.num_ranks // choice.data
    allowed = divisors_of(problem.batch // choice.micro_batch)
    for data in _nearest(allowed, choice.data):
        try:
            cluster = problem.cluster.with_chips(each * data)
        except MeshweaveError:
            continue
        yield float(each * data), replace(problem, cluster=cluster), replace(choice, data=data)


def _over_batch(problem: StepProblem, choice: Parallelism) -> Iterator[_Place]:
    """Yield a configuration with more and fewer micro-batches on each replica."""
    each = choice.data * choice.micro_batch
    count = problem.batch // each
    for number in sorted({max(1, round(count * factor)) for factor in FACTORS}):
        yield float(each * number), replace(problem, batch=each * number), choice


def _over_links(problem: StepProblem, choice: Parallelism) -> Iterator[_Place]:
    _, with_rate = link_levels(problem.cluster)[0]
    for factor in LINK_FACTORS:
        yield factor, replace(problem, cluster=with_rate(factor)), choice


def _nearest(allowed: Sequence[int], here: int) -> list[int]:
    """Return of the allowed numbers those nearest to some multiples of `here`, with `here`, ascending."""
    chosen = {min(allowed, key=lambda number: abs(math.log(number / (here * f)))) for f in FACTORS}
    return sorted({*chosen, here})
