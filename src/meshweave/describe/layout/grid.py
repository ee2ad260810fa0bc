"""Matrices in tiles: layouts in ScaLAPACK's words, and the tile grid that any layout implies.

A `Grid` arranges ranks as `replicas` copies of a process grid, as BLACS does, and deals tiles onto it. A
`TileGrid` answers, for any layout, the questions about tiles that "Slicing Is All You Need" (Table 1) asks of a
distributed matrix: its grid shape, the bounds of a tile, the tiles that overlap a slice, and who holds them.

All of this is index arithmetic. The primitives of that table that move data (get_tile, accumulate_tile,
reduce_replicas, broadcast_replica) are ops of a program, not methods here.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from meshweave.base.errors import LayoutError
from meshweave.describe.layout.layouts import Layout, Replicate, Shard, Tile
from meshweave.describe.layout.mesh import Mesh

AXES = ("replica", "row", "col")
"""Axes of the mesh of a `Grid`; its replicas differ along axis 0 only."""

TileIndex = tuple[int, ...]
"""Where a tile stands in the tile grid: one index per dim."""

Bounds = tuple[tuple[int, int], ...]
"""Half-open [start, stop) index ranges, one per dim."""


@dataclass(frozen=True)
class ProcessGrid:
    """`replicas` copies of a process grid of `rows` x `cols`, over consecutive ranks from `first_rank`.

    A replica takes consecutive ranks. Within one, `major` says which way they fill the process grid: "row" puts
    rank i * cols + j at (i, j), "col" rank j * rows + i, as in BLACS. `source` is the process that holds
    the first tile (ScaLAPACK's RSRC, CSRC). Raises LayoutError where one of these does not fit.
    """

    rows: int
    cols: int
    replicas: int = 1
    major: Literal["row", "col"] = "row"
    source: tuple[int, int] = (0, 0)
    first_rank: int = 0
    name: str = "grid"

    def __post_init__(self) -> None:
        if min(self.rows, self.cols, self.replicas) < 1:
            raise LayoutError(
                f"grid {self.name}: {self.replicas} replicas of {self.rows} x {self.cols} processes; "
                "each must be at least 1"
            )
        if self.major not in ("row", "col"):
            raise LayoutError(f"grid {self.name}: major is 'row' or 'col', not '{self.major}'")
        if not (0 <= self.source[0] < self.rows and 0 <= self.source[1] < self.cols):
            raise LayoutError(
                f"grid {self.name}: source process {self.source} is not in the process grid of "
                f"{self.rows} x {self.cols}"
            )
        if self.first_rank < 0:
            raise LayoutError(f"grid {self.name}: the first rank must not be negative, not {self.first_rank}")

    @classmethod
    def over(
        cls, num_ranks: int, shape: tuple[int, int] | None = None, replicas: int = 1, *, name: str = "grid"
    ) -> ProcessGrid:
        """The grid of all `num_ranks` ranks; by default a process grid as square as can be, with rows <= cols.

        Raises LayoutError where the replicas or `shape` (rows, cols) do not use up the ranks.
        """
        if num_ranks < 1 or replicas < 1 or num_ranks % replicas:
            raise LayoutError(
                f"grid {name}: {num_ranks} ranks do not make {replicas} equal replicas; "
                "the replication factor must divide the number of ranks"
            )
        each = num_ranks // replicas
        if shape is None:
            rows = max(r for r in range(1, math.isqrt(each) + 1) if each % r == 0)
            shape = rows, each // rows
        if min(shape) < 1 or math.prod(shape) != each:
            raise LayoutError(
                f"grid {name}: a process grid of {shape[0]} x {shape[1]} does not use the {each} ranks of each "
                f"of {replicas} replicas"
            )
        return cls(*shape, replicas, name=name)

    @property
    def num_ranks(self) -> int:
        return self.rows * self.cols * self.replicas

    @cached_property
    def mesh(self) -> Mesh:
        """Axes replica, row, col. Where tile (0, 0) is not on the first process, the ranks are rotated."""
        ranks = []
        for replica, i, j in itertools.product(*map(range, (self.replicas, self.rows, self.cols))):
            row, col = (i + self.source[0]) % self.rows, (j + self.source[1]) % self.cols
            place = row * self.cols + col if self.major == "row" else col * self.rows + row
            ranks.append(self.first_rank + replica * self.rows * self.cols + place)
        return Mesh(self.name, (self.replicas, self.rows, self.cols), AXES, tuple(ranks))

    def blocks(self) -> Layout:
        """One block per process, by the chunk rule: the last ones may be shorter or empty."""
        return Layout(self.mesh, (Replicate(), Shard(0), Shard(1)))

    def tiles(self, tile: tuple[int, int], offsets: tuple[int, int] = (0, 0)) -> Layout:
        """Tiles of `tile` (rows, cols) elements, dealt around the process grid in both dims.

        The first tile of a dim is short by its offset, which shifts all cuts. Raises LayoutError for tile sizes
        below 1 and for offsets that are not smaller than the tile.
        """
        (height, width), (down, right) = tile, offsets
        return Layout(self.mesh, (Replicate(), Tile(0, height, down), Tile(1, width, right)))


def row_block(num_ranks: int, replicas: int = 1) -> Layout:
    """Rows in one block per rank of each replica. Raises LayoutError, as do the functions below."""
    return ProcessGrid.over(num_ranks, (num_ranks // max(replicas, 1), 1), replicas).blocks()


def column_block(num_ranks: int, replicas: int = 1) -> Layout:
    """Columns in one block per rank of each replica."""
    return ProcessGrid.over(num_ranks, (1, num_ranks // max(replicas, 1)), replicas).blocks()


def block_2d(num_ranks: int, shape: tuple[int, int] | None = None, replicas: int = 1) -> Layout:
    """One block of rows and columns per process of the grid `shape` of each replica."""
    return ProcessGrid.over(num_ranks, shape, replicas).blocks()


def block_cyclic(
    tile: tuple[int, int], num_ranks: int, shape: tuple[int, int] | None = None, replicas: int = 1
) -> Layout:
    """Tiles of `tile` (rows, cols) dealt around the process grid `shape` of each replica."""
    return ProcessGrid.over(num_ranks, shape, replicas).tiles(tile)


def cyclic(num_ranks: int, shape: tuple[int, int] | None = None, replicas: int = 1) -> Layout:
    """Single elements dealt around the process grid `shape` of each replica."""
    return block_cyclic((1, 1), num_ranks, shape, replicas)


@dataclass(frozen=True)
class TileGrid:
    """The tiles of a tensor of global `shape` in `layout`: the rectangles that a rank holds in one piece.

    A tile is an interval of `Layout.intervals` in each dim. Along a dim, two ranks hold either the same
    intervals or disjoint ones, since every mesh axis cuts at most one dim. So the intervals of all ranks part
    the dim, and a tile's holders agree on its bounds. Those holders are its replicas, in order of their
    coordinates on the mesh; along an axis with partial sums each of them holds a term.

    Raises LayoutError for a layout that does not fit `shape`.
    """

    layout: Layout
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        self.layout.intervals(self.shape, self.layout.mesh.ranks[0])

    @classmethod
    def of(cls, layout: Layout, shape: Sequence[int]) -> TileGrid:
        """The tile grid, the same object for the same arguments."""
        return _tile_grid(layout, tuple(shape))

    @cached_property
    def _edges(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Bounds of the tiles of each dim, ascending."""
        held: list[set[tuple[int, int]]] = [set() for _ in self.shape]
        for rank in self.layout.mesh.ranks:
            for edges, dim in zip(held, self.layout.intervals(self.shape, rank), strict=True):
                edges.update(dim)
        return tuple(tuple(sorted(edges)) for edges in held)

    @cached_property
    def _indices(self) -> dict[int, tuple[tuple[int, ...], ...]]:
        """Which tiles of each dim a rank holds, in local order."""
        numbers = [{bounds: i for i, bounds in enumerate(dim)} for dim in self._edges]
        return {
            rank: tuple(
                tuple(number[piece] for piece in dim)
                for number, dim in zip(numbers, self.layout.intervals(self.shape, rank), strict=True)
            )
            for rank in self.layout.mesh.ranks
        }

    @cached_property
    def _holders(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        """The ranks that hold the same intervals in every dim, by the first tile that they hold."""
        out: dict[tuple[int, ...], list[int]] = {}
        for rank, dims in self._indices.items():
            if all(dims):
                out.setdefault(tuple(dim[0] for dim in dims), []).append(rank)
        return {first: tuple(ranks) for first, ranks in out.items()}

    @cached_property
    def _first_of(self) -> tuple[dict[int, int], ...]:
        """For each dim and tile: the first tile of those that are held with it."""
        out: tuple[dict[int, int], ...] = tuple({} for _ in self.shape)
        for dims in self._indices.values():
            for first, dim in zip(out, dims, strict=True):
                first.update((tile, dim[0]) for tile in dim)
        return out

    @property
    def num_replicas(self) -> int:
        """How many ranks hold each tile."""
        return next((len(ranks) for ranks in self._holders.values()), 0)

    def grid_shape(self) -> tuple[int, ...]:
        """Number of tiles along each dim; 0 along a dim of size 0."""
        return tuple(map(len, self._edges))

    def tile_bounds(self, tile: TileIndex) -> Bounds:
        """Global index ranges that `tile` covers. Raises LayoutError for a tile that is not there."""
        return tuple(edges[i] for edges, i in zip(self._edges, self._known(tile), strict=True))

    def overlapping_tiles(self, slices: Sequence[slice | tuple[int, int]]) -> list[TileIndex]:
        """The tiles that share an element with `slices`, in row-major order.

        One slice or (start, stop) per dim, clipped to the shape as Python does. Raises LayoutError for another
        number of them and for steps.
        """
        if len(slices) != len(self.shape):
            raise LayoutError(f"{self.layout}: {len(slices)} slices for a tensor of shape {self.shape}")
        chosen = []
        for one, size, edges in zip(slices, self.shape, self._edges, strict=True):
            start, stop, step = (one if isinstance(one, slice) else slice(*one)).indices(size)
            if step != 1:
                raise LayoutError(f"{self.layout}: overlapping_tiles takes slices without a step, not {one}")
            if start >= stop:
                return []
            first = bisect_right(edges, start, key=lambda edge: edge[1])
            chosen.append(range(first, bisect_left(edges, stop, key=lambda edge: edge[0])))
        return list(itertools.product(*chosen))

    def holders(self, tile: TileIndex) -> tuple[int, ...]:
        """The ranks that hold `tile`: its replicas. Raises LayoutError for a tile that is not there."""
        return self._holders[
            tuple(first[i] for first, i in zip(self._first_of, self._known(tile), strict=True))
        ]

    def owner(self, tile: TileIndex, replica: int = 0) -> int:
        """The rank that holds replica `replica` of `tile`. Raises LayoutError where there is no such one."""
        holders = self.holders(tile)
        if not 0 <= replica < len(holders):
            raise LayoutError(
                f"{self.layout}: tile {tile} has {len(holders)} replicas, there is no replica {replica}"
            )
        return holders[replica]

    def tiles_of(self, rank: int) -> list[TileIndex]:
        """The tiles that `rank` holds, in row-major order. Raises LayoutError for a rank not in the mesh."""
        return list(itertools.product(*self._indices[self._in_mesh(rank)]))

    def local_bounds(self, tile: TileIndex, rank: int) -> Bounds:
        """Where `tile` lies in the local shard of `rank`. Raises LayoutError where the rank does not hold it."""
        dims = self._indices[self._in_mesh(rank)]
        out = []
        for i, edges, dim in zip(self._known(tile), self._edges, dims, strict=True):
            if i not in dim:
                raise LayoutError(
                    f"{self.layout}: rank {rank} does not hold tile {tile}, ranks {self.holders(tile)} do"
                )
            before = sum(edges[j][1] - edges[j][0] for j in dim[: dim.index(i)])
            out.append((before, before + edges[i][1] - edges[i][0]))
        return tuple(out)

    def _known(self, tile: TileIndex) -> TileIndex:
        shape = self.grid_shape()
        if len(tile) != len(shape) or not all(0 <= i < count for i, count in zip(tile, shape, strict=True)):
            raise LayoutError(f"{self.layout}: no tile {tile} in a tile grid of {shape}")
        return tile

    def _in_mesh(self, rank: int) -> int:
        if rank not in self.layout.mesh:
            raise LayoutError(f"{self.layout}: rank {rank} is not in mesh {self.layout.mesh.name}")
        return rank


@lru_cache(maxsize=1024)
def _tile_grid(layout: Layout, shape: tuple[int, ...]) -> TileGrid:
    return TileGrid(layout, shape)
