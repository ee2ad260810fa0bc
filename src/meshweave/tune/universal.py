"""Choosing the configuration of a universal product: stationary matrix, copies, slices, prefetch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from meshweave.algorithms.universal import (
    Operand,
    Slicing,
    UniversalConfig,
    UniversalProblem,
    universal_program,
)
from meshweave.algorithms.universal.config import (
    STAGE_LIMITS,
    ScheduleKind,
    StageLimits,
    base_configs,
    summed_layouts,
)
from meshweave.algorithms.universal.problem import OPERANDS
from meshweave.algorithms.universal.reduction import replicas_have_same_bits
from meshweave.algorithms.universal.volume import volume
from meshweave.base.errors import UnsupportedError
from meshweave.cost.rates import RankRates
from meshweave.estimate.universal import UniversalEstimate, estimate_universal
from meshweave.ir.volume import Volume

Objective = Literal["time", "bytes"]

SLICES = (1, 2, 4, 8, 16, 32)
PREFETCH = 2
_FINALISTS = 3
"""Variants whose slices are tried. The bytes that a variant moves already say which these are."""


@dataclass(frozen=True)
class TunedUniversal:
    """The best configuration of a universal product.

    Attributes:
        estimate: the expected times.
        moved_bytes: what all ranks together receive.
    """

    config: UniversalConfig
    estimate: UniversalEstimate
    moved_bytes: int


@lru_cache(maxsize=512)
def tune_universal(
    problem: UniversalProblem,
    rates: RankRates,
    *,
    stationary: Operand | None = None,
    objective: Objective = "time",
    slices: tuple[int, ...] = SLICES,
    memory_bytes: int | None = None,
    schedule: ScheduleKind = "direct",
    limits: StageLimits = STAGE_LIMITS,
) -> TunedUniversal:
    """Return the configuration with the least estimated time; of equals, that which moves the fewest bytes.

    With objective "bytes", bytes come first and time decides between equals. All stationary matrices and numbers
    of copies of C are tried. Where A or B arrives as partial sums, the layout to which it is reduced is chosen
    for A and B in turn, until neither choice improves. Slice counts are tried for the best few of the results.

    Args:
        rates: of every rank, for estimates.
        objective: "time" at these rates, or "bytes": what all ranks together receive. With C stationary, whatever
            DTensor could do for the same placements is among the candidates, so the result never moves more bytes.
        stationary: the matrix ("a", "b" or "c") that must not be moved; None for any.
        slices: the numbers of slices into which the transferred panels may be cut.
        memory_bytes: the most that a rank may allocate beside the matrices (`extra_bytes`); None for no limit.
        schedule: in which order ranks issue their steps. Estimates do not depend on it; `meshweave tune schedule`
            compares schedules by simulation.
        limits: how many steps of each kind a rank may have at once. Estimates do not depend on them.

    Raises:
        UnsupportedError: nothing fits the memory.
    """
    of_order = None if schedule == "direct" else rates
    settled = [
        _settled(
            problem, replace(variant, schedule=schedule, limits=limits, rates=of_order), rates, objective
        )
        for variant in base_configs(problem, stationary=stationary)
    ]
    ranked = sorted(
        (candidate for candidate in settled if candidate.is_certain),
        key=lambda candidate: candidate.key(objective),
    )
    best = _sliced(ranked[:_FINALISTS], rates, objective, slices, memory_bytes)
    best = best or _sliced(ranked[_FINALISTS:], rates, objective, slices, memory_bytes)
    if best is None:
        raise UnsupportedError(
            f"no way to multiply {problem.m} x {problem.k} by {problem.k} x {problem.n} needs less than "
            f"{memory_bytes} bytes a rank beside the matrices; give more memory or other layouts"
        )
    return best


@dataclass(frozen=True)
class _EstimatedVariant:
    slicing: Slicing
    volume: Volume
    estimate: UniversalEstimate
    is_certain: bool
    """Whether copies of C surely have the same bits; other variants are not chosen."""

    def key(self, objective: Objective) -> tuple[float, float]:
        """Return the sort key: (bytes, seconds) for the objective "bytes", (seconds, bytes) for "time".

        Both are infinite where replicas of C may differ in bits.
        """
        if not self.is_certain:
            return math.inf, math.inf
        return _key(self.estimate, self.volume, objective)


@lru_cache(maxsize=1024)
def _estimated(problem: UniversalProblem, config: UniversalConfig, rates: RankRates) -> _EstimatedVariant:
    """Return a config of a problem with its bytes and its seconds at these rates.

    Kept, as a product is searched for the fewest bytes and for the least time, and once more when it is chosen.
    """
    slicing = Slicing(problem, config)
    moved = volume(slicing)
    return _EstimatedVariant(
        slicing, moved, estimate_universal(moved, rates), replicas_have_same_bits(slicing)
    )


def _key(estimate: UniversalEstimate, moved: Volume, objective: Objective) -> tuple[float, float]:
    if objective == "bytes":
        return moved.total_received_bytes, estimate.total_s
    return estimate.total_s, moved.total_received_bytes


def _settled(
    problem: UniversalProblem, variant: UniversalConfig, rates: RankRates, objective: Objective
) -> _EstimatedVariant:
    """Return the best of a variant: in which layouts partial operands are summed, and how a team shares its
    work.
    """

    def evaluate(config: UniversalConfig) -> _EstimatedVariant:
        return _estimated(problem, config, rates)

    def key(candidate: _EstimatedVariant) -> tuple[float, float]:
        return candidate.key(objective)

    options = {name: summed_layouts(problem, variant, name) for name in OPERANDS[:2]}
    ends = []
    for a, b in ((options["a"][0], options["b"][0]), (options["a"][-1], options["b"][-1])):
        best = evaluate(replace(variant, summed_a=a, summed_b=b))
        while True:
            configs = [replace(best.slicing.config, summed_a=layout) for layout in options["a"]]
            next_best = min(map(evaluate, configs), key=key)
            configs = [replace(next_best.slicing.config, summed_b=layout) for layout in options["b"]]
            next_best = min(map(evaluate, configs), key=key)
            if key(next_best) >= key(best):
                break
            best = next_best
        ends.append(best)
    best = min(ends, key=key)
    if any(len(team) > 1 for team in best.slicing.teams.values()):
        local = Slicing(problem, replace(best.slicing.config, split="local"))
        if local.work != best.slicing.work:
            best = min(best, evaluate(local.config), key=key)
    return best


def _sliced(
    candidates: Iterable[_EstimatedVariant],
    rates: RankRates,
    objective: Objective,
    slices: Sequence[int],
    memory_bytes: int | None,
) -> TunedUniversal | None:
    """Return the best of some variants; None where none fits the memory."""
    best: tuple[tuple[float, float], TunedUniversal] | None = None
    for candidate in candidates:
        slicing = candidate.slicing
        for count in slices if candidate.volume.total_received_bytes else (1,):
            moved = volume(slicing, count)
            estimate = estimate_universal(moved, rates)
            key = _key(estimate, moved, objective)
            if best is not None and key >= best[0]:
                continue
            sliced = replace(slicing.config, num_slices=count)
            config = _fitting(sliced, slicing.problem, memory_bytes)
            if config is not None and (
                config.schedule == "direct" or replicas_have_same_bits(Slicing(slicing.problem, config))
            ):  # another schedule may order the products of other slices otherwise
                best = key, TunedUniversal(config, estimate, moved.total_received_bytes)
    return None if best is None else best[1]


def _fitting(
    config: UniversalConfig, problem: UniversalProblem, memory_bytes: int | None
) -> UniversalConfig | None:
    """Return the configuration with as much prefetch as memory allows, or None."""
    for prefetch in (PREFETCH, 1, 0):
        prefetching = replace(config, prefetch=prefetch)
        if memory_bytes is None or extra_bytes(problem, prefetching) <= memory_bytes:
            return prefetching
    return None


def extra_bytes(problem: UniversalProblem, config: UniversalConfig) -> int:
    """Return the most bytes that a rank allocates besides A, B and C: fetched panels, sums of partial operands."""
    program = universal_program(problem, config)
    return max(
        sum(
            buffer.slots * program.buffer_bytes(buffer.name, rank)
            for buffer in program.buffers
            if buffer.kind in ("temp", "scratch")
        )
        for rank in program.ranks
    )
