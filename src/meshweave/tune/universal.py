"""Which way to compute a universal product: stationary matrix, copies, partial operands, slices, prefetch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from meshweave.algorithms.matmul.universal import (
    Choice,
    Operand,
    Slicing,
    UniversalProblem,
    universal_program,
)
from meshweave.algorithms.matmul.universal.choice import sums, ways
from meshweave.algorithms.matmul.universal.volume import volume
from meshweave.errors import UnsupportedError
from meshweave.estimate.universal import Rates, UniversalEstimate, estimate_universal
from meshweave.ir.volume import Volume

SLICES = (1, 2, 4, 8, 16, 32)
PREFETCH = 2
_FINALISTS = 3
"""Ways whose slices are tried: how much they move says already which these are."""


@dataclass(frozen=True)
class TunedUniversal:
    """A choice, what it is expected to take, and how many bytes all ranks together receive."""

    choice: Choice
    estimate: UniversalEstimate
    moved_bytes: int


@lru_cache(maxsize=4096)
def tune_universal(
    problem: UniversalProblem,
    rates: Rates,
    *,
    stationary: Operand | None = None,
    slices: tuple[int, ...] = SLICES,
    memory_bytes: int | None = None,
) -> TunedUniversal:
    """The choice with the least estimated time, and of equal ones that which moves least.

    Stationary matrix and copies of C are all tried; where a partial operand is summed up is settled for A
    first, then for B; slices are tried for the best few.

    Args:
        stationary: the matrix that the caller wants to stay, or None.
        slices: slice counts to try.
        memory_bytes: the most that a rank may need beside the matrices (`extra_bytes`); None for no limit.

    Raises UnsupportedError where nothing fits the memory.
    """
    found = [_settled(problem, way, rates) for way in ways(problem, stationary=stationary)]
    found.sort(key=lambda tried: tried.key)
    best = _sliced(found[:_FINALISTS], rates, slices, memory_bytes)
    best = best or _sliced(found[_FINALISTS:], rates, slices, memory_bytes)
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
    def of(cls, problem: UniversalProblem, choice: Choice, rates: Rates) -> _Tried:
        slicing = Slicing(problem, choice)
        found = volume(slicing)
        return cls(slicing, found, estimate_universal(found, rates))

    @property
    def key(self) -> tuple[float, int]:
        return self.estimate.total_s, self.volume.moved_bytes


def _settled(problem: UniversalProblem, way: Choice, rates: Rates) -> _Tried:
    best = _Tried.of(problem, way, rates)
    for layout in sums(problem, way.stationary, "a")[1:]:
        other = replace(best.slicing.choice, a=layout)
        best = min(best, _Tried.of(problem, other, rates), key=lambda tried: tried.key)
    for layout in sums(problem, way.stationary, "b")[1:]:
        other = replace(best.slicing.choice, b=layout)
        best = min(best, _Tried.of(problem, other, rates), key=lambda tried: tried.key)
    if any(len(team) > 1 for team in best.slicing.teams.values()):
        local = Slicing(problem, replace(best.slicing.choice, split="local"))
        if local.work != best.slicing.work:
            best = min(best, _Tried.of(problem, local.choice, rates), key=lambda tried: tried.key)
    return best


def _sliced(
    tried: Iterable[_Tried], rates: Rates, slices: Sequence[int], memory_bytes: int | None
) -> TunedUniversal | None:
    best: tuple[tuple[float, int], TunedUniversal] | None = None
    for one in tried:
        for count in slices:
            found = volume(one.slicing, count)
            estimate = estimate_universal(found, rates)
            key = estimate.total_s, found.moved_bytes
            if best is not None and key >= best[0]:
                continue
            choice = _fitting(replace(one.slicing.choice, slices=count), one.slicing.problem, memory_bytes)
            if choice is not None:
                best = key, TunedUniversal(choice, estimate, found.moved_bytes)
    return None if best is None else best[1]


def _fitting(choice: Choice, problem: UniversalProblem, memory_bytes: int | None) -> Choice | None:
    """The choice with as much prefetch as memory allows, or None."""
    for prefetch in (PREFETCH, 1, 0):
        found = replace(choice, prefetch=prefetch)
        if memory_bytes is None or extra_bytes(problem, found) <= memory_bytes:
            return found
    return None


def extra_bytes(problem: UniversalProblem, choice: Choice) -> int:
    """The most that a rank allocates beside A, B and C: panels on their way, and sums of partial operands."""
    program = universal_program(problem, choice)
    return max(
        sum(
            buffer.slots * program.buffer_bytes(buffer.name, rank)
            for buffer in program.buffers
            if buffer.kind in ("temp", "scratch")
        )
        for rank in program.ranks
    )
