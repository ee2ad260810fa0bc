"""Which layouts of A, B and C, beside which way to compute: the least time of a product within a memory budget.

Slicing Is All You Need, section 5.2, tries row blocks, column blocks and 2D blocks with all valid replication
factors; so does this, with every process grid, for the matrices whose layouts are free.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from meshweave.algorithms.universal import Operand, UniversalProblem
from meshweave.algorithms.universal.problem import OPERANDS
from meshweave.base.errors import LayoutError, UnsupportedError
from meshweave.base.units import dtype_bytes
from meshweave.cost.rates import RankRates
from meshweave.describe.layout import Layout
from meshweave.describe.layout.grid import ProcessGrid
from meshweave.tune.layout_bounds import LayoutBounds
from meshweave.tune.universal import TunedUniversal, extra_bytes, tune_universal

Key = tuple[float, float, int, int]
"""Seconds, bytes that all ranks together receive, bytes of the matrices on a rank, number: the less the better."""


@dataclass(frozen=True)
class TunedLayouts:
    """Layouts with the best way to multiply in them: a problem, and the most bytes that a rank needs for its parts
    of the matrices and beside them."""

    problem: UniversalProblem
    tuned: TunedUniversal
    matrix_bytes: int
    extra_bytes: int


def grid_layouts(ranks: Sequence[int]) -> tuple[Layout, ...]:
    """Blocks on every process grid with every number of copies; row and column blocks among them."""
    found = []
    for replicas in _divisors(len(ranks)):
        each = len(ranks) // replicas
        for rows in _divisors(each):
            layout = ProcessGrid(rows, each // rows, replicas).blocks()
            mesh = layout.mesh
            placed = tuple(ranks[place] for place in mesh.ranks)
            found.append(Layout(type(mesh)(mesh.name, mesh.shape, mesh.axes, placed), layout.placements))
    return tuple(found)


def tune_layouts(
    m: int,
    n: int,
    k: int,
    num_ranks: int,
    rates: RankRates,
    *,
    a: Layout | None = None,
    b: Layout | None = None,
    c: Layout | None = None,
    dtype: str = "float32",
    memory_bytes: int | None = None,
    count: int = 1,
) -> tuple[TunedLayouts, ...]:
    """The `count` best combinations of layouts and ways for C (m, n) = A (m, k) B (k, n), best first.

    By estimated time, of equal ones by bytes moved, then by bytes held. Layouts that are given are kept; the
    others lie on the same ranks.

    Args:
        memory_bytes: the most that a rank may hold of the matrices and beside them; None for no limit.

    Raises LayoutError where given layouts do not fit the sizes or each other, UnsupportedError where nothing fits
    the memory.
    """
    given: dict[Operand, Layout | None] = {"a": a, "b": b, "c": c}
    ranks = _ranks(given.values(), num_ranks)
    free = grid_layouts(ranks)
    options: dict[Operand, Sequence[Layout]] = {
        operand: free if (layout := given[operand]) is None else (layout,) for operand in OPERANDS
    }
    search = _Search((m, n, k), options, rates, dtype, memory_bytes, count)
    found = search.run()
    if not found:
        raise UnsupportedError(
            f"no layouts of {m} x {k} by {k} x {n} on {len(ranks)} ranks need at most {memory_bytes} bytes a "
            f"rank; the matrices alone take {search.least_bytes}"
        )
    return found


def table(found: Iterable[TunedLayouts]) -> list[dict[str, str | float]]:
    """One row each, in plain words and numbers."""
    return [
        {
            **{operand: layout_words(one.problem.layout(operand)) for operand in OPERANDS},
            "way": str(one.tuned.config),
            "seconds": one.tuned.estimate.total_s,
            "moved_bytes": one.tuned.moved_bytes,
            "rank_bytes": one.matrix_bytes + one.extra_bytes,
        }
        for one in found
    ]


def layout_words(layout: Layout) -> str:
    """ "2 x (3 x 2)" for two copies on a grid of 3 x 2; of other layouts what they say themselves."""
    if layout.mesh.axes != ("replica", "row", "col"):
        return str(layout)
    copies, rows, cols = layout.mesh.shape
    grid = f"{rows} x {cols}"
    return f"{copies} x ({grid})" if copies > 1 else grid


@dataclass
class _Search:
    sizes: tuple[int, int, int]
    options: dict[Operand, Sequence[Layout]]
    rates: RankRates
    dtype: str
    memory_bytes: int | None
    count: int
    tried: int = 0

    def __post_init__(self) -> None:
        assert self.count >= 1
        first = self._problem((0, 0, 0))
        ranks, element = first.ranks, dtype_bytes(self.dtype)
        self.held_bytes = {
            operand: np.array(
                [
                    [element * int(np.prod(one.local_shape(first.shape(operand), rank))) for rank in ranks]
                    for one in self.options[operand]
                ]
            )
            for operand in OPERANDS
        }
        each = [self.held_bytes[operand] for operand in OPERANDS]
        together = each[0][:, None, None] + each[1][None, :, None] + each[2][None, None, :]
        self.matrix_bytes = together.max(-1)
        self.least_bytes = int(self.matrix_bytes.min())

    def run(self) -> tuple[TunedLayouts, ...]:
        """Best bound first, until no bound is better than the worst of those to be returned."""
        seconds, moved = LayoutBounds(self.sizes, self.options, self.rates, self.dtype).least()
        keys: list[Key] = [
            (_rounded(time), _rounded(size), int(held), number)
            for number, (time, size, held) in enumerate(
                zip(seconds.flat, moved.flat, self.matrix_bytes.flat, strict=True)
            )
            if self.memory_bytes is None or held <= self.memory_bytes
        ]
        heapq.heapify(keys)
        best: list[tuple[Key, TunedLayouts]] = []
        while keys and (len(best) < self.count or keys[0] < best[-1][0]):
            found = self._tried(heapq.heappop(keys), best)
            if found is not None:
                best = sorted([*best, found], key=lambda one: one[0])[: self.count]
        return tuple(one for _, one in best)

    def _tried(self, bound: Key, best: Sequence[tuple[Key, TunedLayouts]]) -> tuple[Key, TunedLayouts] | None:
        number, held = bound[3], bound[2]
        problem = self._problem([int(at) for at in np.unravel_index(number, self.matrix_bytes.shape)])
        self.tried += 1
        tuned = tune_universal(problem, self.rates)
        # A limit only takes choices away; it is costly to keep, for it asks for programs.
        if len(best) == self.count and _key(tuned, held, number) >= best[-1][0]:
            return None
        extra = extra_bytes(problem, tuned.config)
        if self.memory_bytes is not None and held + extra > self.memory_bytes:
            try:
                tuned = tune_universal(problem, self.rates, memory_bytes=self.memory_bytes - held)
            except UnsupportedError:
                return None
            extra = extra_bytes(problem, tuned.config)
        return _key(tuned, held, number), TunedLayouts(problem, tuned, held, extra)

    def _problem(self, places: Sequence[int]) -> UniversalProblem:
        a, b, c = (self.options[operand][at] for operand, at in zip(OPERANDS, places, strict=True))
        return UniversalProblem(*self.sizes, a, b, c, self.dtype)


def _key(tuned: TunedUniversal, held_bytes: int, number: int) -> Key:
    return _rounded(tuned.estimate.total_s), _rounded(tuned.moved_bytes), held_bytes, number


def _rounded(value: float) -> float:
    """To nine digits, so that a bound and what reaches it are equal however they were summed up."""
    return float(f"{value:.9g}")


def _ranks(given: Iterable[Layout | None], num_ranks: int) -> tuple[int, ...]:
    for layout in given:
        if layout is not None:
            if layout.mesh.num_ranks != num_ranks:
                raise LayoutError(f"{layout} is on {layout.mesh.num_ranks} ranks, not {num_ranks}")
            return tuple(sorted(layout.mesh.ranks))
    if num_ranks < 1:
        raise LayoutError(f"{num_ranks} ranks; give at least 1")
    return tuple(range(num_ranks))


def _divisors(count: int) -> list[int]:
    return [size for size in range(1, count + 1) if count % size == 0]
