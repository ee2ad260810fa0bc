"""The rings of a product on a mesh of several axes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshweave.algorithms.fused import ring_problems
from meshweave.algorithms.fused.product import GATHERS, SUMS
from meshweave.algorithms.universal.problem import OPERANDS, Operand, UniversalProblem
from meshweave.describe.layout import Layout, Partial, Placement, Replicate, Shard
from meshweave.describe.layout.mesh import Mesh
from sampling import examples

MESH = Mesh("m", (2, 4), ("dp", "tp"), (7, 1, 5, 3, 0, 2, 4, 6))
S0, S1, R = Shard(0), Shard(1), Replicate()
Pair = tuple[Placement, Placement]


def problem(sizes: tuple[int, int, int], a: Pair, b: Pair, c: Pair) -> UniversalProblem:
    return UniversalProblem(*sizes, *(Layout(MESH, placements) for placements in (a, b, c)))


@pytest.mark.parametrize(
    ("a", "b", "c", "sizes", "ring"),
    [
        ((R, S1), (R, S0), (R, S0), (16, 8, 8), (16, 8, 8)),
        ((S0, S1), (R, S0), (S0, S0), (16, 8, 8), (8, 8, 8)),
        ((R, S1), (S1, S0), (S1, S0), (10, 8, 8), (10, 4, 8)),
        ((S0, S0), (R, S1), (S0, S1), (16, 8, 8), (8, 8, 8)),
        ((R, S0), (S1, S1), (S1, S1), (16, 16, 8), (16, 8, 8)),
        ((S0, S1), (R, S0), (S0, R), (16, 8, 8), (8, 8, 8)),
    ],
)
def test_rings_run_along_the_axis_that_communicates(
    a: Pair, b: Pair, c: Pair, sizes: tuple[int, int, int], ring: tuple[int, int, int]
) -> None:
    rings = ring_problems(problem(sizes, a, b, c))
    assert [one.a.mesh.ranks for one in rings] == [(7, 1, 5, 3), (0, 2, 4, 6)]
    assert {one.sizes for one in rings} == {ring}
    assert [one.a.placements + one.b.placements + one.c.placements for one in rings] == [
        (a[1], b[1], c[1])
    ] * 2


@pytest.mark.parametrize(
    ("a", "b", "c"),
    [
        ((R, R), (R, S1), (R, S1)),  # nothing moves
        ((S1, S1), (S0, S0), (R, S0)),  # terms of the sum on both axes
        ((R, S0), (R, S1), (S0, S1)),  # the other axis would drop rows
        ((Partial(), S1), (R, S0), (R, S0)),
        ((S1, S0), (S0, R), (S0, S0)),  # rows of C lie otherwise than those of A
    ],
)
def test_other_products_have_no_rings(a: Pair, b: Pair, c: Pair) -> None:
    assert ring_problems(problem((16, 16, 16), a, b, c)) == ()


def test_parts_that_batch_dims_make_uneven_are_no_rings() -> None:
    """Five sequences of two tokens over four ranks are 4, 4, 2 and 0 rows: fused entries cut 3, 3, 3 and 1."""
    mesh = Mesh.of("tp", (4,), ("x",))
    folds = (5, 2), (8,)
    a, c = Layout(mesh, (Shard(2),), folds), Layout(mesh, (S0,), folds)
    uneven = UniversalProblem(10, 8, 8, a, Layout(mesh, (S0,)), c)
    assert ring_problems(uneven) == ()
    folds = (4, 2), (8,)
    a, c = Layout(mesh, (Shard(2),), folds), Layout(mesh, (S0,), folds)
    (ring,) = ring_problems(UniversalProblem(8, 8, 8, a, Layout(mesh, (S0,)), c))
    assert ring.a.placements == (S1,) and ring.c.placements == (S0,)


@given(data=st.data())
@examples(20)
def test_rings_compute_the_product_between_them(data: st.DataObject) -> None:
    """From the ranks' parts of A and B, put where the ring's layouts say, follow their parts of C."""
    of_a, of_b, of_c = data.draw(st.sampled_from([*SUMS, *GATHERS]), label="placements")
    other = data.draw(st.sampled_from([(S0, R, S0), (R, S1, S1), (R, R, R)]), label="other axis")
    m, n, k = (data.draw(st.integers(1, 3), label=name) * 8 for name in "mnk")
    whole = problem((m, n, k), (other[0], of_a), (other[1], of_b), (other[2], of_c))
    dense = {
        "a": np.arange(m * k).reshape(m, k) % 7,
        "b": np.arange(k * n).reshape(k, n) % 5,
    }
    dense["c"] = dense["a"] @ dense["b"]
    rings = ring_problems(whole)
    assert sorted(rank for ring in rings for rank in ring.ranks) == sorted(MESH.ranks)
    for ring in rings:
        own = {name: np.full(ring.shape(name), -1) for name in OPERANDS}
        places = [
            (
                name,
                np.ix_(*ring.layout(name).indices(ring.shape(name), rank)),
                _held(whole, name, rank, dense),
            )
            for name in OPERANDS
            for rank in ring.ranks
        ]
        for name, place, part in places[: 2 * len(ring.ranks)]:
            own[name][place] = part
        result = own["a"] @ own["b"]
        for _, place, part in places[2 * len(ring.ranks) :]:
            np.testing.assert_array_equal(result[place], part)


def _held(whole: UniversalProblem, name: Operand, rank: int, dense: dict[str, Any]) -> Any:
    return dense[name][np.ix_(*whole.layout(name).indices(whole.shape(name), rank))]
