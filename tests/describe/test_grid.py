"""Process grids in ScaLAPACK's words."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshweave.base.errors import LayoutError
from meshweave.describe.layout.grid import (
    ProcessGrid,
    block_2d,
    block_cyclic,
    column_block,
    cyclic,
    row_block,
)
from meshweave.describe.layout.mesh import Mesh
from sampling import examples

shapes = st.tuples(st.integers(0, 13), st.integers(0, 13))


@st.composite
def grids(draw: st.DrawFn) -> ProcessGrid:
    rows, cols = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    source = draw(st.integers(0, rows - 1)), draw(st.integers(0, cols - 1))
    return ProcessGrid(
        rows, cols, draw(st.integers(1, 3)), draw(st.sampled_from(["row", "col"])), source,
        draw(st.integers(0, 4)),
    )  # fmt: skip


@examples(100)
@given(grids(), st.tuples(st.integers(1, 4), st.integers(1, 4)), shapes, st.data())
def test_an_element_is_where_scalapack_has_it(
    grid: ProcessGrid, tile: tuple[int, int], shape: tuple[int, int], data: st.DataObject
) -> None:
    """INDXG2P: the process of element i is (source + (i + offset) // block) modulo the grid."""
    offsets = data.draw(st.integers(0, tile[0] - 1)), data.draw(st.integers(0, tile[1] - 1))
    layout = grid.block_cyclic_layout(tile, offsets)
    where = {}
    for rank in layout.mesh.ranks:
        for at in itertools.product(*map(np.ndarray.tolist, layout.indices(shape, rank))):
            where.setdefault(at, []).append(rank)
    assert set(where) == set(itertools.product(*map(range, shape)))
    for (i, j), ranks in where.items():
        row = (grid.source[0] + (i + offsets[0]) // tile[0]) % grid.rows
        col = (grid.source[1] + (j + offsets[1]) // tile[1]) % grid.cols
        place = row * grid.cols + col if grid.major == "row" else col * grid.rows + row
        each = grid.rows * grid.cols
        assert sorted(ranks) == [grid.first_rank + r * each + place for r in range(grid.replicas)]


def test_a_grid_of_blacs() -> None:
    assert ProcessGrid(2, 3).mesh.ranks == (0, 1, 2, 3, 4, 5)
    assert ProcessGrid(2, 3, major="col").mesh.ranks == (0, 2, 4, 1, 3, 5)
    assert ProcessGrid(2, 3, source=(1, 1)).mesh.ranks == (4, 5, 3, 1, 2, 0)
    assert ProcessGrid(1, 2, 2, first_rank=4).mesh == Mesh(
        "grid", (2, 1, 2), ("replica", "row", "col"), (4, 5, 6, 7)
    )
    assert ProcessGrid.over(12).mesh.shape == (1, 3, 4)
    assert ProcessGrid.over(12, replicas=2).mesh.shape == (2, 2, 3)
    assert hash(ProcessGrid.over(12).mesh) == hash(ProcessGrid(3, 4).mesh)


def test_the_named_partitions() -> None:
    """Twelve processes as the paper has them: copies of the matrix, each over as many as the factor leaves."""
    shape = (12, 24)
    assert row_block(12).local_shape(shape, 5) == (1, 24)
    assert column_block(12, 2).local_shape(shape, 5) == (12, 4)
    assert block_2d(12, (2, 3), 2).local_shape(shape, 5) == (6, 8)
    assert all(row_block(12, 12).local_shape(shape, rank) == shape for rank in range(12))
    assert cyclic(4).intervals((4, 4), 1) == (((0, 1), (2, 3)), ((1, 2), (3, 4)))
    assert block_cyclic((5, 5), 4).intervals(shape, 0) == (((0, 5), (10, 12)), ((0, 5), (10, 15), (20, 24)))
    assert block_cyclic((4, 8), 6, (3, 2)) == ProcessGrid(3, 2).block_cyclic_layout((4, 8))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: row_block(12, 5), "12 ranks do not make 5 equal replicas"),
        (lambda: column_block(12, 0), "do not make 0 equal replicas"),
        (lambda: block_2d(12, (2, 3)), "2 x 3 does not use the 12 ranks"),
        (lambda: block_2d(6, (-2, -3)), "does not use the 6 ranks"),
        (lambda: ProcessGrid(0, 2), "each must be at least 1"),
        (
            lambda: ProcessGrid(2, 2, source=(2, 0)),
            r"source process \(2, 0\) is not in the process grid of 2 x 2",
        ),
        (lambda: ProcessGrid(2, 2, major="rows"), "'row' or 'col', not 'rows'"),
        (lambda: ProcessGrid(2, 2, first_rank=-1), "must not be negative"),
        (lambda: block_cyclic((0, 2), 4), "tile size must be positive"),
        (lambda: ProcessGrid(2, 2).block_cyclic_layout((4, 4), (4, 0)), "offset smaller than the size"),
    ],
)
def test_grids_that_do_not_fit_are_refused(make, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        make()
