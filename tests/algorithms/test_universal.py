"""The universal product over random layouts: right, exact in its counts, and proven before it runs."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshweave.algorithms.table import algorithm
from meshweave.algorithms.universal import (
    Slicing,
    UniversalConfig,
    UniversalProblem,
    universal_configs,
    universal_program,
)
from meshweave.algorithms.universal.volume import volume
from meshweave.base.errors import LayoutError, UnsupportedError
from meshweave.cost.rates import RankRates
from meshweave.describe.layout import Layout, Partial, Placement, Replicate, Shard, Tile
from meshweave.describe.layout.mesh import Mesh
from meshweave.execute.numpy import run_numpy
from meshweave.ir.analysis.validate import validate
from meshweave.ir.program import Program
from meshweave.ir.program.ops import Accumulate, Add, Get, Put
from meshweave.ir.program.parse import parse
from meshweave.ir.program.text import to_text
from meshweave.lower import lower_one_sided
from meshweave.tune.universal import extra_bytes, tune_universal
from sampling import examples, scaled

KINDS: tuple[Placement, ...] = (Shard(0), Shard(1), Replicate(), Partial())
SQUARE = Mesh.of("tp", (2, 2), ("row", "col"))
RATES = RankRates(60e9, 2.4e9, 1e-5, 1e-5, 49e9)


def factorings(count: int) -> list[tuple[int, int, int]]:
    return [
        (a, b, count // a // b)
        for a in range(1, count + 1)
        for b in range(1, count + 1)
        if count % (a * b) == 0
    ]


@st.composite
def layouts(draw: st.DrawFn, name: str, num_ranks: int) -> Layout:
    """Any shape of mesh, any order of its ranks, any tiles, copies and terms: nothing aligned with anything."""
    ranks = tuple(range(num_ranks))
    if draw(st.booleans()):
        ranks = tuple(draw(st.permutations(ranks)))
    mesh = Mesh(name, draw(st.sampled_from(factorings(num_ranks))), ("x", "y", "z"), ranks)
    tiles = st.integers(1, 4).flatmap(
        lambda n: st.builds(Tile, st.integers(0, 1), st.just(n), st.integers(0, n - 1))
    )
    each = st.one_of(tiles, st.sampled_from(KINDS[:3]), st.sampled_from(KINDS))
    return Layout(mesh, (draw(each), draw(each), draw(each)))


@st.composite
def problems(draw: st.DrawFn) -> UniversalProblem:
    num_ranks = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12]))
    m, n, k = (draw(st.integers(1, 9)) for _ in range(3))
    a, b, c = (draw(layouts(name, num_ranks)) for name in "pqr")
    orders = tuple(draw(st.sampled_from([None, (1, 0)])) for _ in range(3))
    return UniversalProblem(m, n, k, a, b, c, "float64", orders)  # type: ignore[arg-type]


@st.composite
def cases(draw: st.DrawFn) -> tuple[UniversalProblem, UniversalConfig]:
    problem = draw(problems())
    found = draw(st.sampled_from(list(universal_configs(problem))))
    slices, prefetch = draw(st.integers(1, 4)), draw(st.integers(0, 2))
    return problem, UniversalConfig(
        found.stationary, found.redundant_axes, found.summed_a, found.summed_b, found.split, slices, prefetch
    )


def operands(problem: UniversalProblem) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name.upper(): rng.integers(-4, 5, problem.shape(name)).astype(float) for name in ("a", "b")}


def moved(program: Program) -> tuple[int, int]:
    """Bytes that cross between ranks, and their messages, counted op by op."""
    sizes = []
    for rank, ops in program.ops_by_rank.items():
        for bound in ops:
            if isinstance(bound.op, (Get, Put, Accumulate)):
                view = bound.op.src if isinstance(bound.op, Get) else bound.op.out
                sizes += [program.view_bytes(view)] if view.rank != rank else []
    return sum(sizes), len(sizes)


def added_bytes(program: Program) -> int:
    """Bytes of what ops add to, in memory of any rank; results that are stored are none."""
    ops = (bound.op for of_rank in program.ops_by_rank.values() for bound in of_rank)
    return sum(program.view_bytes(op.out) for op in ops if isinstance(op, (Add, Accumulate)))


@examples(50)
@given(cases())
def test_any_layouts_give_the_dense_product(case: tuple[UniversalProblem, UniversalConfig]) -> None:
    problem, choice = case
    inputs = operands(problem)
    expected = inputs["A"] @ inputs["B"]
    program = universal_program(problem, choice)
    assert validate(program).skipped == ()
    lowered = lower_one_sided(program)
    for seed in (None, 1):
        for one in (program, lowered):
            np.testing.assert_array_equal(run_numpy(one, inputs, seed=seed).outputs["C"], expected)


@examples(40)
@given(cases())
def test_counts_are_those_of_the_program(case: tuple[UniversalProblem, UniversalConfig]) -> None:
    program = universal_program(*case)
    found = volume(Slicing(*case))
    messages = sum(load.num_messages for phase in found.phases for load in phase.values())
    assert (found.total_received_bytes, messages) == moved(program)
    assert sum(load.local_bytes for phase in found.phases for load in phase.values()) == added_bytes(program)
    if len(program.ranks) <= 4:
        assert parse(to_text(program)) == program


@examples(25)
@given(cases())
def test_messages_are_proven_too(case: tuple[UniversalProblem, UniversalConfig]) -> None:
    assert validate(lower_one_sided(universal_program(*case))).skipped == ()


@pytest.mark.parametrize("number", range(16))
def test_placements_on_a_square_mesh(number: int) -> None:
    """Each result with some of the 256 pairs of operands; `test_matmul` has all of them on real processes.

    The tuner, which takes most of the time, chooses for every fourth pair; the others take the configurations that
    there are in turn, and so more of them than it would choose.
    """
    pairs = list(itertools.product(KINDS, KINDS))
    out = pairs[number]
    for index, (a, b) in enumerate(list(itertools.product(pairs, repeat=2))[number % 8 :: 256 // scaled(21)]):
        problem = UniversalProblem(
            5, 3, 7, Layout(SQUARE, a), Layout(SQUARE, b), Layout(SQUARE, out), "float64"
        )
        configs = (
            [tune_universal(problem, RATES).config] if index % 4 == 0 else list(universal_configs(problem))
        )
        program = universal_program(problem, configs[(number + index) % len(configs)])
        inputs = operands(problem)
        found = run_numpy(program, inputs).outputs["C"]
        np.testing.assert_array_equal(found, inputs["A"] @ inputs["B"])


def test_a_block_cyclic_matrix_takes_as_few_products_as_a_block_one() -> None:
    """Sorted by owner, k falls into one run per pair of owners where all are dealt alike."""

    def steps(size: int) -> int:
        layout = Layout(SQUARE, (Tile(0, size), Tile(1, size)))
        slicing = Slicing(
            UniversalProblem(64, 64, 64, layout, layout, layout), UniversalConfig("c", num_slices=1)
        )
        return len(slicing.steps(0))

    assert steps(4) == steps(32) == 2


def test_work_is_shared_by_copies_of_the_stationary_matrix() -> None:
    copied = Layout(SQUARE, (Shard(0), Replicate()))
    problem = UniversalProblem(8, 8, 8, copied, copied, Layout(SQUARE, (Shard(0), Shard(1))))
    found = volume(Slicing(problem, UniversalConfig("a")))
    assert {load.flops for load in found.during.values()} == {2 * 8 * 8 * 8 // 4}


def test_copies_of_c_are_reduced_or_computed_on_their_own() -> None:
    everywhere = Layout(SQUARE, (Replicate(), Replicate()))
    problem = UniversalProblem(8, 8, 8, everywhere, everywhere, everywhere, "float64")
    alone = volume(Slicing(problem, UniversalConfig("c", redundant_axes=(0, 1))))
    shared = volume(Slicing(problem, UniversalConfig("c")))
    assert (alone.total_received_bytes, alone.max_rank_flops) == (0, 2 * 8**3)
    assert (shared.total_received_bytes, shared.max_rank_flops) == (2 * 3 * 8 * 8 * 8, 2 * 8**3 // 4)


def test_a_memory_limit_is_kept_or_refused() -> None:
    tiles = Layout(SQUARE, (Shard(0), Shard(1)))
    problem = UniversalProblem(64, 64, 64, tiles, tiles, tiles)
    free = tune_universal(problem, RATES)
    tight = tune_universal(problem, RATES, memory_bytes=extra_bytes(problem, free.config) // 3)
    assert extra_bytes(problem, tight.config) <= extra_bytes(problem, free.config) // 3
    with pytest.raises(UnsupportedError, match="needs less than 7 bytes"):
        tune_universal(problem, RATES, memory_bytes=7)


def test_what_does_not_fit_is_refused() -> None:
    tiles, other = Layout(SQUARE, (Shard(0), Shard(1))), Mesh.of("far", (4,), ("x",), 4)
    with pytest.raises(LayoutError, match="B is on ranks"):
        UniversalProblem(4, 4, 4, tiles, Layout(other, (Shard(0),)), tiles)
    with pytest.raises(LayoutError, match="only sums"):
        UniversalProblem(4, 4, 4, Layout(SQUARE, (Partial("max"), Shard(0))), tiles, tiles)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"stationary": "z"}, "stationary is 'z'; it must be one of a, b, c"),
        ({"split": "odd"}, "split is 'odd'"),
        ({"schedule": "fast"}, "schedule is 'fast'"),
        ({"num_slices": 0}, "num_slices is 0; it must be at least 1"),
        ({"prefetch": -1}, "prefetch is -1"),
        ({"redundant_axes": (5,)}, "redundant axes are"),
        ({"summed_a": Layout(SQUARE, (Shard(0), Shard(1)))}, "A in .* cannot be summed to"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(settings: dict[str, object], told: str) -> None:
    own = Layout(SQUARE, (Shard(0), Shard(1)))
    problem = UniversalProblem(8, 8, 8, own, own, own)
    with pytest.raises(LayoutError, match=told):
        universal_program(problem, UniversalConfig(**settings))  # type: ignore[arg-type]


@pytest.mark.parametrize("sizes", [(0, 3, 3), (3, 0, 3), (3, 3, 0)])
def test_nothing_is_a_product_too(sizes: tuple[int, int, int]) -> None:
    tiles = Layout(SQUARE, (Shard(0), Shard(1)))
    problem = UniversalProblem(*sizes, tiles, tiles, tiles, "float64")
    program = universal_program(problem, UniversalConfig())
    validate(program, labels=False)  # a sum of nothing has no k to prove
    found = run_numpy(program, operands(problem)).outputs["C"]
    assert found.shape == sizes[:2] and math.prod(sizes[:2]) == found.size and not found.any()


def test_memory_orders_of_gradients_are_those_of_the_matrices_turned() -> None:
    """A row-major matrix is turned to a column-major one, whether its order is left out or said."""
    mesh = Mesh.of("tp", (2,), ("x",))
    rows = Layout(mesh, (Shard(0),))
    for order in (None, (0, 1)):
        problem = UniversalProblem(6, 4, 4, rows, rows, rows, orders=(order, order, None))
        of_a, of_b = algorithm("universal").gradients(problem)
        assert (of_a.problem.orders[1], of_b.problem.orders[0]) == ((1, 0), (1, 0))
