"""Process grids in ScaLAPACK's words, and the tile grids of any layout."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshweave.base.errors import LayoutError
from meshweave.describe.layout import Layout, Partial, Placement, Replicate, Shard, StridedShard, Tile
from meshweave.describe.layout.grid import (
    ProcessGrid,
    TileGrid,
    block_2d,
    block_cyclic,
    column_block,
    cyclic,
    row_block,
)
from meshweave.describe.layout.mesh import Mesh

shapes = st.tuples(st.integers(0, 13), st.integers(0, 13))


@st.composite
def grids(draw: st.DrawFn) -> ProcessGrid:
    rows, cols = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    source = draw(st.integers(0, rows - 1)), draw(st.integers(0, cols - 1))
    return ProcessGrid(
        rows, cols, draw(st.integers(1, 3)), draw(st.sampled_from(["row", "col"])), source,
        draw(st.integers(0, 4)),
    )  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(grids(), st.tuples(st.integers(1, 4), st.integers(1, 4)), shapes, st.data())
def test_an_element_is_where_scalapack_has_it(
    grid: ProcessGrid, tile: tuple[int, int], shape: tuple[int, int], data: st.DataObject
) -> None:
    """INDXG2P: the process of element i is (source + (i + offset) // block) modulo the grid."""
    offsets = data.draw(st.integers(0, tile[0] - 1)), data.draw(st.integers(0, tile[1] - 1))
    layout = grid.tiles(tile, offsets)
    tiles = TileGrid.of(layout, shape)
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
        holders = tiles.holders(((i + offsets[0]) // tile[0], (j + offsets[1]) // tile[1]))
        assert list(holders) == sorted(ranks)


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
    assert TileGrid.of(row_block(12), shape).grid_shape() == (12, 1)
    assert TileGrid.of(column_block(12, 2), shape).grid_shape() == (1, 6)
    assert TileGrid.of(block_2d(12, (2, 3), 2), shape).grid_shape() == (2, 3)
    assert TileGrid.of(row_block(12, 12), shape).grid_shape() == (1, 1)
    assert TileGrid.of(row_block(12, 12), shape).holders((0, 0)) == tuple(range(12))
    assert TileGrid.of(cyclic(4), shape).grid_shape() == shape
    assert TileGrid.of(block_cyclic((5, 5), 4), shape).tile_bounds((2, 4)) == ((10, 12), (20, 24))
    assert block_cyclic((4, 8), 6, (3, 2)) == ProcessGrid(3, 2).tiles((4, 8))


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
        (lambda: ProcessGrid(2, 2).tiles((4, 4), (4, 0)), "offset smaller than the size"),
    ],
)
def test_grids_that_do_not_fit_are_refused(make, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        make()


# --- tile grids of any layout ---------------------------------------------------------------------------

dims = st.integers(0, 1)
kinds: st.SearchStrategy[Placement] = (
    st.builds(Shard, dims)
    | st.builds(Tile, dims, st.integers(3, 5), st.integers(0, 2))
    | st.builds(StridedShard, dims, st.integers(1, 4))
    | st.sampled_from([Replicate(), Partial()])
)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple))
    ranks = draw(st.permutations(range(math.prod(shape))))
    mesh = Mesh("m", shape, ("a", "b", "c")[: len(shape)], tuple(ranks))
    return Layout(mesh, draw(st.tuples(*[kinds] * len(shape))))


@settings(max_examples=120, deadline=None)
@given(layouts(), shapes)
def test_tiles_part_the_matrix_and_their_holders_hold_them(layout: Layout, shape: tuple[int, int]) -> None:
    tiles = TileGrid.of(layout, shape)
    matrix = np.arange(math.prod(shape)).reshape(shape)
    covered = np.zeros(shape, int)
    copies = math.prod(
        size
        for size, placement in zip(layout.mesh.shape, layout.placements, strict=True)
        if isinstance(placement, (Replicate, Partial))
    )
    for tile in itertools.product(*map(range, tiles.grid_shape())):
        box = tuple(slice(*bounds) for bounds in tiles.tile_bounds(tile))
        covered[box] += 1
        holders = tiles.holders(tile)
        assert len(holders) == tiles.num_replicas == copies
        for replica, rank in enumerate(holders):
            assert tiles.owner(tile, replica) == rank and tile in tiles.tiles_of(rank)
            local = matrix[np.ix_(*layout.indices(shape, rank))]
            inside = tuple(slice(*bounds) for bounds in tiles.local_bounds(tile, rank))
            assert (local[inside] == matrix[box]).all()
    assert (covered == 1).all()
    for rank in layout.mesh.ranks:
        held = sum(
            math.prod(stop - start for start, stop in tiles.tile_bounds(tile))
            for tile in tiles.tiles_of(rank)
        )
        assert held == math.prod(layout.local_shape(shape, rank))
        assert all(rank in tiles.holders(tile) for tile in tiles.tiles_of(rank))


@settings(max_examples=120, deadline=None)
@given(layouts(), shapes, st.lists(st.none() | st.integers(-15, 15), min_size=4, max_size=4))
def test_overlapping_tiles_are_those_that_share_an_element(
    layout: Layout, shape: tuple[int, int], ends: list[int | None]
) -> None:
    tiles = TileGrid.of(layout, shape)
    box = slice(*ends[:2]), slice(*ends[2:])
    wanted = np.zeros(shape, bool)
    wanted[box] = True
    expected = [
        tile
        for tile in itertools.product(*map(range, tiles.grid_shape()))
        if wanted[tuple(slice(*bounds) for bounds in tiles.tile_bounds(tile))].any()
    ]
    assert tiles.overlapping_tiles(box) == expected


def test_a_folded_layout_has_tiles_of_the_folded_matrix() -> None:
    layout = Layout(Mesh.of("m", (2, 2), ("row", "col")), (Shard(1), Shard(2)), ((3, 4), (6,)))
    tiles = TileGrid.of(layout, (12, 6))
    assert tiles.grid_shape() == (6, 2)
    assert tiles.tiles_of(2) == [(1, 0), (3, 0), (5, 0)]
    assert tiles.tile_bounds((3, 1)) == ((6, 8), (3, 6))
    assert tiles.local_bounds((3, 0), 2) == ((2, 4), (0, 3))
    assert tiles.overlapping_tiles(tiles.tile_bounds((3, 1))) == [(3, 1)]


def test_tile_grids_are_cached_and_refuse_what_is_not_there() -> None:
    layout = block_2d(4)
    tiles = TileGrid.of(layout, [5, 5])
    assert TileGrid.of(block_2d(4), (5, 5)) is tiles and TileGrid(layout, (5, 5)) == tiles
    with pytest.raises(LayoutError, match=r"no tile \(2, 0\) in a tile grid of \(2, 2\)"):
        tiles.tile_bounds((2, 0))
    with pytest.raises(LayoutError, match="1 replicas, there is no replica 1"):
        tiles.owner((0, 0), 1)
    with pytest.raises(LayoutError, match=r"rank 1 does not hold tile \(0, 0\), ranks \(0,\) do"):
        tiles.local_bounds((0, 0), 1)
    with pytest.raises(LayoutError, match="rank 9 is not in mesh grid"):
        tiles.tiles_of(9)
    with pytest.raises(LayoutError, match="without a step"):
        tiles.overlapping_tiles((slice(0, 4, 2), slice(None)))
    with pytest.raises(LayoutError, match="1 slices for a tensor"):
        tiles.overlapping_tiles((slice(None),))
    with pytest.raises(LayoutError, match="names a dim"):
        TileGrid.of(layout, (5,))
