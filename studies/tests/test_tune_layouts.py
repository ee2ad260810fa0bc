"""The layouts of a product: the same as trying all of them, within the memory, and what is given is kept."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from meshweave.algorithms.universal import UniversalProblem
from meshweave.base.errors import LayoutError, UnsupportedError
from meshweave.base.units import dtype_bytes
from meshweave.cost.rates import RankRates
from meshweave.describe.layout import Layout, Partial, Replicate, Shard
from meshweave.describe.layout.grid import block_2d, block_cyclic, row_block
from meshweave.describe.layout.mesh import Mesh
from meshweave.tune.universal import extra_bytes, tune_universal
from meshweave_studies.slicing.layout_bounds import LayoutBounds
from meshweave_studies.slicing.layouts import grid_layouts, layout_words, tune_layouts
from sampling import mostly_slow, scaled

SLOW = RankRates(1e9, 2e8, 1e-6, 1e-6, 5e9)
FREE = RankRates(1e9, 1e9)
CYCLIC = block_cyclic((4, 3), 4)
PARTIAL = Layout(Mesh.of("tp", (2, 2), ("x", "y")), (Partial(), Shard(0)))
COPIED = Layout(Mesh.of("tp", (4, 1), ("x", "y")), (Replicate(), Shard(0)))


def matrix_bytes(problem: UniversalProblem) -> int:
    return max(
        dtype_bytes(problem.dtype)
        * sum(int(np.prod(problem.layout(x).local_shape(problem.shape(x), rank))) for x in ("a", "b", "c"))
        for rank in problem.ranks
    )


def brute_force(
    sizes: tuple[int, int, int],
    options: list[tuple[Layout, ...]],
    rates: RankRates,
    memory_bytes: int | None,
) -> list[float]:
    """Seconds of all combinations that fit, ascending."""
    found = []
    for a, b, c in itertools.product(*options):
        problem = UniversalProblem(*sizes, a, b, c)
        held = matrix_bytes(problem)
        left = None if memory_bytes is None else memory_bytes - held
        if left is None or left >= 0:
            try:
                found.append(tune_universal(problem, rates, memory_bytes=left).estimate.total_s)
            except UnsupportedError:
                continue
    return sorted(found)


@pytest.mark.parametrize(
    ("num_ranks", "memory_bytes"),
    [
        pytest.param(4, None, marks=pytest.mark.slow),
        pytest.param(2, 9000, marks=pytest.mark.slow),
        pytest.param(2, 7500, marks=pytest.mark.slow),
        (2, 6500),
    ],
)
@pytest.mark.parametrize("rates", [SLOW, FREE])
@pytest.mark.parametrize("sizes", [(24, 60, 12), (20, 20, 50)])
def test_it_finds_what_trying_everything_finds(
    sizes: tuple[int, int, int], rates: RankRates, num_ranks: int, memory_bytes: int | None
) -> None:
    options = [grid_layouts(range(num_ranks))] * 3
    found = tune_layouts(sizes, num_ranks, rates, memory_bytes=memory_bytes, count=3)
    expected = brute_force(sizes, options, rates, memory_bytes)[:3]
    assert [one.tuned.estimate.total_s for one in found] == pytest.approx(expected, rel=1e-8)
    for one in found:
        assert one.matrix_bytes == matrix_bytes(one.problem)
        assert one.extra_bytes == extra_bytes(one.problem, one.tuned.config)
        assert memory_bytes is None or one.matrix_bytes + one.extra_bytes <= memory_bytes


@pytest.mark.parametrize(
    "case",
    mostly_slow(
        itertools.product(
            [{"a": CYCLIC}, {"a": PARTIAL}, {"b": COPIED, "c": row_block(4, 2)}, {"c": PARTIAL}], [SLOW, FREE]
        ),
        3,
    ),
)
def test_given_layouts_are_kept(case: tuple[dict[str, Layout], RankRates]) -> None:
    given, rates = case
    free = grid_layouts(range(4))
    (found,) = tune_layouts((14, 11, 9), 4, rates, given=given)  # type: ignore[arg-type]
    for operand, layout in given.items():
        assert found.problem.layout(operand) == layout  # type: ignore[arg-type]
    options = [(given[x],) if x in given else free for x in ("a", "b", "c")]
    assert found.tuned.estimate.total_s == pytest.approx(brute_force((14, 11, 9), options, rates, None)[0])


@pytest.mark.parametrize(
    "case",
    mostly_slow(itertools.product([(3, 2, 4), (7, 40, 9), (64, 64, 64)], [4, 6], [SLOW, FREE]), 5),
)
def test_no_estimate_is_below_its_bound(case: tuple[tuple[int, int, int], int, RankRates]) -> None:
    sizes, count, rates = case
    free = (*grid_layouts(range(count)), block_cyclic((3, 2), count))
    seconds, moved = LayoutBounds(sizes, {"a": free, "b": free, "c": free}, rates).least()
    places = list(itertools.product(range(len(free)), repeat=3))
    for place in places[:: max(len(places) // scaled(20), 1)]:
        found = tune_universal(UniversalProblem(*sizes, *(free[at] for at in place)), rates)
        assert seconds[place] <= found.estimate.total_s * (1 + 1e-9)
        assert moved[place] <= found.moved_bytes * (1 + 1e-9)


def test_without_a_limit_nothing_moves_and_with_one_it_does() -> None:
    free = tune_layouts((64, 64, 64), 4, SLOW)[0]
    assert free.tuned.moved_bytes == 0
    least = 3 * 64 * 64 * 4 // 4
    tight = tune_layouts((64, 64, 64), 4, SLOW, memory_bytes=least + 6000)[0]
    assert tight.tuned.moved_bytes > 0 and tight.matrix_bytes + tight.extra_bytes <= least + 6000


def test_nothing_that_fits_is_one_line() -> None:
    with pytest.raises(UnsupportedError, match="no layouts of 64 x 64 by 64 x 64 on 4 ranks") as error:
        tune_layouts((64, 64, 64), 4, SLOW, memory_bytes=3 * 64 * 64 - 1)
    with pytest.raises(UnsupportedError, match="the matrices alone take 384"):
        tune_layouts((8, 8, 8), 2, SLOW, memory_bytes=400)
    assert "\n" not in str(error.value)
    with pytest.raises(LayoutError, match="is on 4 ranks, not 6"):
        tune_layouts((8, 8, 8), 6, SLOW, given={"a": block_2d(4)})
    with pytest.raises(LayoutError, match="0 ranks"):
        tune_layouts((8, 8, 8), 0, SLOW)


def test_layouts_lie_on_the_ranks_that_are_given() -> None:
    mesh = Mesh("far", (4,), ("x",), (7, 5, 4, 6))
    found = tune_layouts((8, 8, 8), 4, FREE, given={"b": Layout(mesh, (Shard(1),))})[0]
    assert found.problem.ranks == (4, 5, 6, 7)


def test_every_grid_and_replication_factor_is_there() -> None:
    words = [layout_words(layout) for layout in grid_layouts(range(4))]
    assert words == ["1 x 4", "2 x 2", "4 x 1", "2 x (1 x 2)", "2 x (2 x 1)", "4 x (1 x 1)"]
    assert len(grid_layouts(range(12))) == 18


@pytest.mark.slow
def test_twelve_ranks() -> None:
    rates = RankRates(22.7e12, 26.5e9, 5e-6, 5e-6, 1.6e12)
    found = tune_layouts((6144, 49152, 12288), 12, rates, memory_bytes=450_000_000)
    assert found[0].tuned.moved_bytes > 0
