"""The rivals of the universal product: DTensor's resharded product and COSMA."""

from __future__ import annotations

import pytest

from meshweave.algorithms.universal.problem import UniversalProblem
from meshweave.base.errors import LayoutError
from meshweave.describe.layout import Layout, Replicate, Shard
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.layout.shapes import factorisations
from meshweave.ir.analysis.validate import validate
from meshweave.ir.work import traffic
from meshweave_studies.slicing.cosma import choose_grid, cosma_program, face_elements
from meshweave_studies.slicing.dtensor import (
    STRATEGIES,
    Collectives,
    Strategy,
    choose_strategy,
    resharded_program,
)


def problem(m: int, n: int, k: int, count: int, dims: tuple[int, int, int]) -> UniversalProblem:
    mesh = Mesh.of("tp", (count,), ("x",))
    a, b, c = (Layout(mesh, (Shard(dim),)) for dim in dims)
    return UniversalProblem(m, n, k, a, b, c)


@pytest.mark.parametrize("collectives", ["ring", "direct"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dims", [(0, 0), (1, 1), (0, 1)])
@pytest.mark.parametrize("sizes", [(8, 8, 8), (7, 10, 9), (2, 3, 5)])
def test_resharded_products_are_right(
    collectives: Collectives, strategy: Strategy, dims: tuple[int, int], sizes: tuple[int, int, int]
) -> None:
    ends = {"rows": (0,), "columns": (1,), "outer": (0, 1)}[strategy]
    for end in ends:
        validate(resharded_program(problem(*sizes, 4, (*dims, end)), strategy, collectives))


def test_dtensor_likes_outer_products() -> None:
    """By its count an exchange of B costs a shard of it, so that outer products win once A is larger than that."""
    assert choose_strategy(problem(1024, 49152, 12288, 12, (0, 0, 0))) == "outer"
    assert choose_strategy(problem(1024, 49152, 12288, 12, (1, 1, 1))) == "columns"
    assert choose_strategy(problem(16384, 49152, 12288, 12, (1, 1, 1))) == "outer"


def test_resharding_refuses_other_layouts() -> None:
    mesh = Mesh.of("tp", (2, 2), ("x", "y"))
    two = Layout(mesh, (Shard(0), Shard(1)))
    with pytest.raises(LayoutError, match="one axis"):
        resharded_program(UniversalProblem(4, 4, 4, two, two, two))
    line = Mesh.of("tp", (4,), ("x",))
    copied = Layout(line, (Replicate(),))
    with pytest.raises(LayoutError, match="sharded"):
        resharded_program(UniversalProblem(4, 4, 4, copied, copied, copied))
    with pytest.raises(LayoutError, match="by rows"):
        resharded_program(problem(4, 4, 4, 2, (0, 0, 1)), "rows")


@pytest.mark.parametrize("all_reduce", [False, True])
@pytest.mark.parametrize("grid", factorisations(8, 3))
def test_cosma_is_right_and_moves_its_faces(grid: tuple[int, int, int], all_reduce: bool) -> None:
    program = cosma_program(64, 64, 16, grid, all_reduce=all_reduce)
    validate(program)
    if not all_reduce:
        moved = 4 * face_elements(64, 64, 16, grid)
        assert all(sum(traffic(program, rank).values()) == moved for rank in program.ranks)


def test_cosma_takes_the_smallest_faces() -> None:
    assert choose_grid(64, 64, 64, 8) == (2, 2, 2)
    assert choose_grid(8192, 49152, 12288, 8) == (1, 4, 2)  # as many bytes as (1, 8, 1), and less to gather
    assert choose_grid(16384, 49152, 12288, 8) == (2, 4, 1)
    with pytest.raises(LayoutError, match="equal parts"):
        cosma_program(7, 8, 8, (2, 2, 2))
