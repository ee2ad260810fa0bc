"""Which way to compute a universal product: stationary matrix, copies, partial operands, slices, prefetch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from meshweave.algorithms.universal import (
    UniversalConfig,
    Operand,
    Slicing,
    UniversalProblem,
    universal_program,
)
from meshweave.algorithms.universal.config import summed_layouts, variants
from meshweave.algorithms.universal.problem import OPERANDS
from meshweave.algorithms.universal.volume import volume
from meshweave.base.errors import UnsupportedError
from meshweave.cost.rates import RankRates
from meshweave.estimate.universal import UniversalEstimate, estimate_universal
from meshweave.ir.volume import Volume

Objective = Literal["time", "bytes"]

SLICES = (1, 2, 4, 8, 16, 32)
PREFETCH = 2
_FINALISTS = 3
"""Ways whose slices are tried: how much they move says already which these are."""


@dataclass(frozen=True)
class TunedUniversal:
    """A choice, what it is expected to take, and how many bytes all ranks together receive."""

    config: UniversalConfig
    estimate: UniversalEstimate
    moved_bytes: int


@lru_cache(maxsize=4096)
def tune_universal(
    problem: UniversalProblem,
    rates: RankRates,
    *,
    stationary: Operand | None = None,
    objective: Objective = "time",
    slices: tuple[int, ...] = SLICES,
    memory_bytes: int | None = None,
) -> TunedUniversal:
    """The choice with the least estimated time, and of equal ones that which moves least; or the other way round.

    Stationary matrix and copies of C are all tried; where partial operands are summed up is settled in turns for A
    and B, until neither can do better; slices are tried for the best few.

    Args:
        objective: "time" at these rates, or "bytes": what all ranks together receive. With C stationary everything
            that DTensor could do for the same placements is among what is tried, so the least is never more.
        stationary: the matrix that the caller wants to stay, or None.
        slices: slice counts to try.
        memory_bytes: the most that a rank may need beside the matrices (`extra_bytes`); None for no limit.

    Raises UnsupportedError where nothing fits the memory.
    """
    found = [_settled(problem, way, rates, objective) for way in variants(problem, stationary=stationary)]
    found = [tried for tried in found if tried.slicing.replicas_agree]
    found.sort(key=lambda tried: tried.key(objective))
    best = _sliced(found[:_FINALISTS], rates, objective, slices, memory_bytes)
    best = best or _sliced(found[_FINALISTS:], rates, objective, slices, memory_bytes)
    if best is None:
        raise UnsupportedError(
            f"no way to multiply {problem.m} x {problem.k} by {problem.k} x {problem.n} needs less than "
            f"{memory_bytes} bytes a rank beside the matrices; give more memory or other layouts"
        )
    return best


@dataclass(frozen=True)
class _Tried:
    slicing: Slicing
    volume: Volume
    estimate: UniversalEstimate

    @classmethod
    def of(cls, problem: UniversalProblem, choice: UniversalConfig, rates: RankRates) -> _Tried:
        slicing = Slicing(problem, choice)
        found = volume(slicing)
        return cls(slicing, found, estimate_universal(found, rates))

    def key(self, objective: Objective) -> tuple[float, float]:
        if not self.slicing.replicas_agree:
            return math.inf, math.inf
        return _key(self.estimate, self.volume, objective)


def _key(estimate: UniversalEstimate, found: Volume, objective: Objective) -> tuple[float, float]:
    if objective == "bytes":
        return found.moved_bytes, estimate.total_s
    return estimate.total_s, found.moved_bytes


def _settled(problem: UniversalProblem, way: UniversalConfig, rates: RankRates, objective: Objective) -> _Tried:
    """The best that can be made of a way: where partial operands are summed up, and who does what of a team."""
    known: dict[UniversalConfig, _Tried] = {}

    def tried(choice: UniversalConfig) -> _Tried:
        if choice not in known:
            known[choice] = _Tried.of(problem, choice, rates)
        return known[choice]

    options = {name: summed_layouts(problem, way, name) for name in OPERANDS[:2]}
    ends = []
    for a, b in ((options["a"][0], options["b"][0]), (options["a"][-1], options["b"][-1])):
        best = tried(replace(way, summed_a=a, summed_b=b))
        while True:
            choice = best.slicing.config
            others = [replace(choice, summed_a=layout) for layout in options["a"]]
            better = min((tried(other) for other in others), key=lambda one: one.key(objective))
            others = [replace(better.slicing.config, summed_b=layout) for layout in options["b"]]
            better = min((tried(other) for other in others), key=lambda one: one.key(objective))
            if better.key(objective) >= best.key(objective):
                break
            best = better
        ends.append(best)
    best = min(ends, key=lambda one: one.key(objective))
    if any(len(team) > 1 for team in best.slicing.teams.values()):
        local = Slicing(problem, replace(best.slicing.config, split="local"))
        if local.work != best.slicing.work:
            best = min(best, tried(local.config), key=lambda one: one.key(objective))
    return best


def _sliced(
    tried: Iterable[_Tried],
    rates: RankRates,
    objective: Objective,
    slices: Sequence[int],
    memory_bytes: int | None,
) -> TunedUniversal | None:
    best: tuple[tuple[float, float], TunedUniversal] | None = None
    for one in tried:
        for count in slices if one.volume.moved_bytes else (1,):
            found = volume(one.slicing, count)
            estimate = estimate_universal(found, rates)
            key = _key(estimate, found, objective)
            if best is not None and key >= best[0]:
                continue
            choice = _fitting(replace(one.slicing.config, num_slices=count), one.slicing.problem, memory_bytes)
            if choice is not None:
                best = key, TunedUniversal(choice, estimate, found.moved_bytes)
    return None if best is None else best[1]


def _fitting(config: UniversalConfig, problem: UniversalProblem, memory_bytes: int | None) -> UniversalConfig | None:
    """The choice with as much prefetch as memory allows, or None."""
    for prefetch in (PREFETCH, 1, 0):
        found = replace(config, prefetch=prefetch)
        if memory_bytes is None or extra_bytes(problem, found) <= memory_bytes:
            return found
    return None


def extra_bytes(problem: UniversalProblem, config: UniversalConfig) -> int:
    """The most that a rank allocates beside A, B and C: panels on their way, and sums of partial operands."""
    program = universal_program(problem, config)
    return max(
        sum(
            buffer.slots * program.buffer_bytes(buffer.name, rank)
            for buffer in program.buffers
            if buffer.kind in ("temp", "scratch")
        )
        for rank in program.ranks
    )
