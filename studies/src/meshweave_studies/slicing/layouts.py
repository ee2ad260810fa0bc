"""Search: the layouts of A, B and C in which a universal product takes the least time within a memory budget.

Slicing Is All You Need, section 5.2, tries row blocks, column blocks and 2D blocks with all valid replication
factors; so does this, with every process grid, for the matrices whose layouts are free.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshweave.algorithms.universal import Operand, UniversalProblem
from meshweave.algorithms.universal.problem import OPERANDS
from meshweave.base.errors import LayoutError, UnsupportedError
from meshweave.base.progress import Progress, no_progress
from meshweave.base.units import dtype_bytes
from meshweave.cost.rates import RankRates
from meshweave.describe.layout import Layout
from meshweave.describe.layout.grid import ProcessGrid
from meshweave.describe.layout.shapes import divisors_of
from meshweave.tune.universal import TunedUniversal, extra_bytes, tune_universal
from meshweave_studies.slicing.layout_bounds import LayoutBounds

Key = tuple[float, float, int, int]
"""What layouts are compared by, less is better: seconds, bytes that all ranks together receive, bytes of the
matrices on a rank, and the number of the combination."""


@dataclass(frozen=True)
class TunedLayouts:
    """Layouts, and the best config of a product in them.

    Attributes:
        problem: the product in these layouts.
        tuned: the config and its estimate.
        matrix_bytes: the most bytes of the three matrices on a rank.
        extra_bytes: the most bytes that a rank needs besides.
    """

    problem: UniversalProblem
    tuned: TunedUniversal
    matrix_bytes: int
    extra_bytes: int


def grid_layouts(ranks: Sequence[int]) -> tuple[Layout, ...]:
    """Return blocks on every process grid with every number of replicas; row and column blocks among them."""
    layouts = []
    for replicas in divisors_of(len(ranks)):
        each = len(ranks) // replicas
        for rows in divisors_of(each):
            layout = ProcessGrid(rows, each // rows, replicas).block_layout()
            mesh = layout.mesh
            placed = tuple(ranks[place] for place in mesh.ranks)
            layouts.append(Layout(type(mesh)(mesh.name, mesh.shape, mesh.axes, placed), layout.placements))
    return tuple(layouts)


def tune_layouts(
    sizes: tuple[int, int, int],
    num_ranks: int,
    rates: RankRates,
    *,
    given: Mapping[Operand, Layout] | None = None,
    dtype: str = "float32",
    memory_bytes: int | None = None,
    count: int = 1,
    progress: Progress = no_progress,
) -> tuple[TunedLayouts, ...]:
    """Return the `count` best combinations of layouts for C (m, n) = A (m, k) B (k, n), best first.

    They are compared by estimated time, then by bytes moved, then by bytes of the matrices on a rank. Every
    combination that a lower bound does not rule out is tuned.

    Raises LayoutError where given layouts do not fit the sizes or each other, UnsupportedError where nothing fits
    the memory.

    Args:
        sizes: m, n and k.
        num_ranks: the number of ranks; 0, 1, 2, ... unless a given layout is over others.
        rates: rates of the ranks; `RankRates.of(cluster)` for a described cluster.
        given: layouts of "a", "b" and "c" that are not chosen; others are chosen over the same ranks.
        memory_bytes: the most that a rank may hold of the matrices and besides; None for no limit.
        progress: called after each combination that is tuned; the search may end long before all are.
    """
    kept = given or {}
    ranks = _ranks(kept.values(), num_ranks)
    free = grid_layouts(ranks)
    options: dict[Operand, Sequence[Layout]] = {
        operand: (kept[operand],) if operand in kept else free for operand in OPERANDS
    }
    search = _LayoutSearch(sizes, options, rates, dtype, memory_bytes, count)
    best = search.run(progress)
    if not best:
        m, n, k = sizes
        raise UnsupportedError(
            f"no layouts of {m} x {k} by {k} x {n} on {len(ranks)} ranks need at most {memory_bytes} bytes a "
            f"rank; the matrices alone take {search.least_bytes}"
        )
    return best


def layout_words(layout: Layout) -> str:
    """Return "2 x (3 x 2)" for two replicas on a grid of 3 x 2, the layout's own text for other layouts."""
    if layout.mesh.axes != ("replica", "row", "col"):
        return str(layout)
    copies, rows, cols = layout.mesh.shape
    grid = f"{rows} x {cols}"
    return f"{copies} x ({grid})" if copies > 1 else grid


@dataclass
class _LayoutSearch:
    sizes: tuple[int, int, int]
    options: dict[Operand, Sequence[Layout]]
    rates: RankRates
    dtype: str
    memory_bytes: int | None
    count: int
    num_tried: int = 0

    def __post_init__(self) -> None:
        assert self.count >= 1
        first = self._problem((0, 0, 0))
        ranks, element = first.ranks, dtype_bytes(self.dtype)
        a_bytes, b_bytes, c_bytes = (
            np.array(
                [
                    [element * math.prod(layout.local_shape(first.shape(operand), rank)) for rank in ranks]
                    for layout in self.options[operand]
                ]
            )
            for operand in OPERANDS
        )
        all_bytes = a_bytes[:, None, None] + b_bytes[None, :, None] + c_bytes[None, None, :]
        self.matrix_bytes = all_bytes.max(-1)
        self.least_bytes = int(self.matrix_bytes.min())

    def run(self, progress: Progress = no_progress) -> tuple[TunedLayouts, ...]:
        """Tune the combination of the best bound, until no bound is better than the worst result to return."""
        seconds, moved = LayoutBounds(self.sizes, self.options, self.rates, self.dtype).least()
        keys: list[Key] = [
            (_rounded(time_s), _rounded(moved_bytes), int(matrix_bytes), number)
            for number, (time_s, moved_bytes, matrix_bytes) in enumerate(
                zip(seconds.flat, moved.flat, self.matrix_bytes.flat, strict=True)
            )
            if self.memory_bytes is None or matrix_bytes <= self.memory_bytes
        ]
        heapq.heapify(keys)
        total = len(keys)
        best: list[tuple[Key, TunedLayouts]] = []
        while keys and (len(best) < self.count or keys[0] < best[-1][0]):
            tuned = self._tune(heapq.heappop(keys), best)
            if tuned is not None:
                best = sorted([*best, tuned], key=lambda entry: entry[0])[: self.count]
            progress(total - len(keys), total)
        return tuple(tuned for _, tuned in best)

    def _tune(self, bound: Key, best: Sequence[tuple[Key, TunedLayouts]]) -> tuple[Key, TunedLayouts] | None:
        """Return the result for one combination, or None where it is none of the best or fits no memory."""
        _, _, matrix_bytes, number = bound
        problem = self._problem([int(index) for index in np.unravel_index(number, self.matrix_bytes.shape)])
        self.num_tried += 1
        tuned = tune_universal(problem, self.rates)
        # A memory limit only rules configs out. It is checked last, since that takes the program.
        if len(best) == self.count and _key(tuned, matrix_bytes, number) >= best[-1][0]:
            return None
        extra = extra_bytes(problem, tuned.config)
        if self.memory_bytes is not None and matrix_bytes + extra > self.memory_bytes:
            try:
                tuned = tune_universal(problem, self.rates, memory_bytes=self.memory_bytes - matrix_bytes)
            except UnsupportedError:
                return None
            extra = extra_bytes(problem, tuned.config)
        return _key(tuned, matrix_bytes, number), TunedLayouts(problem, tuned, matrix_bytes, extra)

    def _problem(self, indices: Sequence[int]) -> UniversalProblem:
        a, b, c = (self.options[operand][index] for operand, index in zip(OPERANDS, indices, strict=True))
        return UniversalProblem(*self.sizes, a, b, c, self.dtype)


def _key(tuned: TunedUniversal, matrix_bytes: int, number: int) -> Key:
    return _rounded(tuned.estimate.total_s), _rounded(tuned.moved_bytes), matrix_bytes, number


def _rounded(value: float) -> float:
    """Return a value to nine digits, so that a bound equals what reaches it in whatever order both were summed."""
    return float(f"{value:.9g}")


def _ranks(given: Iterable[Layout], num_ranks: int) -> tuple[int, ...]:
    for layout in given:
        if layout.mesh.num_ranks != num_ranks:
            raise LayoutError(f"{layout} is on {layout.mesh.num_ranks} ranks, not {num_ranks}")
        return tuple(sorted(layout.mesh.ranks))
    if num_ranks < 1:
        raise LayoutError(f"{num_ranks} ranks; give at least 1")
    return tuple(range(num_ranks))
