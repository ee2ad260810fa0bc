"""Process grids: layouts of matrices in ScaLAPACK's words.

A `ProcessGrid` arranges ranks as `replicas` copies of a process grid, as BLACS does, and deals blocks or tiles of
a matrix onto it. The named layouts below are those of "Slicing Is All You Need" (section 4).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from meshweave.base.errors import LayoutError
from meshweave.describe.layout.layouts import Layout, Replicate, Shard, Tile
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.layout.shapes import near_square

AXES = ("replica", "row", "col")
"""Axes of the mesh of a `ProcessGrid`; its replicas differ along axis 0 only."""


@dataclass(frozen=True)
class ProcessGrid:
    """`replicas` copies of a process grid of `rows` x `cols`, over consecutive ranks from `first_rank`.

    A replica takes consecutive ranks, which fill its process grid by rows or columns (`major`): "row" puts rank
    i * cols + j at (i, j), "col" rank j * rows + i, as in BLACS. `source` is the process that holds the first
    tile (ScaLAPACK's RSRC, CSRC). `name` is that of its mesh.

    Raises:
        LayoutError: a size is below 1, `major` is unknown, or `source` or `first_rank` is out of range.
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
        """Return the row-major grid of ranks 0 to `num_ranks` - 1 in replicas, each of `shape` (rows, cols).

        Without `shape` it is as square as possible, with rows <= cols.

        Raises:
            LayoutError: a number is below 1, or the replicas and `shape` do not use every rank.
        """
        if num_ranks < 1 or replicas < 1 or num_ranks % replicas:
            raise LayoutError(
                f"grid {name}: {num_ranks} ranks do not make {replicas} equal replicas; "
                "the replication factor must divide the number of ranks"
            )
        each = num_ranks // replicas
        if shape is None:
            shape = near_square(each)
        if min(shape) < 1 or math.prod(shape) != each:
            raise LayoutError(
                f"grid {name}: a process grid of {shape[0]} x {shape[1]} does not use the {each} ranks of each "
                f"of {replicas} replicas"
            )
        return cls(*shape, replicas, name=name)

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks, over all replicas."""
        return self.rows * self.cols * self.replicas

    @cached_property
    def mesh(self) -> Mesh:
        """Return the mesh of axes (replica, row, col).

        Within each replica, mesh coordinates (0, 0) are process `source`, which holds the first tile.
        """
        ranks = []
        for replica, i, j in itertools.product(*map(range, (self.replicas, self.rows, self.cols))):
            row, col = (i + self.source[0]) % self.rows, (j + self.source[1]) % self.cols
            place = row * self.cols + col if self.major == "row" else col * self.rows + row
            ranks.append(self.first_rank + replica * self.rows * self.cols + place)
        return Mesh(self.name, (self.replicas, self.rows, self.cols), AXES, tuple(ranks))

    def block_layout(self) -> Layout:
        """Return the layout of a matrix in one block per process, on `mesh`; each replica has all of it.

        Dim 0 is cut over the grid's rows, dim 1 over its columns, by the chunk rule: each part has
        ceil(size / parts) elements until they run out, so the last may be shorter or empty. Block (0, 0)
        lies on process `source`.
        """
        return Layout(self.mesh, (Replicate(), Shard(0), Shard(1)))

    def block_cyclic_layout(self, tile: tuple[int, int], offsets: tuple[int, int] = (0, 0)) -> Layout:
        """Return the block-cyclic layout of tiles of `tile` (rows, cols) elements.

        Args:
            offsets: (rows, cols) elements by which the first tile of each dim is shorter, which shifts all cuts.

        Raises:
            LayoutError: a tile size is below 1, or an offset is negative or not smaller than its tile.
        """
        (height, width), (down, right) = tile, offsets
        return Layout(self.mesh, (Replicate(), Tile(0, height, down), Tile(1, width, right)))


def row_block(num_ranks: int, replicas: int = 1) -> Layout:
    """Return the layout of one block of rows per rank; `num_ranks` counts those of all `replicas` replicas.

    Raises:
        LayoutError: a number is below 1, or `replicas` does not divide `num_ranks`.
    """
    return ProcessGrid.over(num_ranks, (num_ranks // max(replicas, 1), 1), replicas).block_layout()


def column_block(num_ranks: int, replicas: int = 1) -> Layout:
    """Return the layout of one block of columns per rank; `num_ranks` counts those of all `replicas` replicas.

    Raises:
        LayoutError: a number is below 1, or `replicas` does not divide `num_ranks`.
    """
    return ProcessGrid.over(num_ranks, (1, num_ranks // max(replicas, 1)), replicas).block_layout()


def block_2d(num_ranks: int, shape: tuple[int, int] | None = None, replicas: int = 1) -> Layout:
    """Return the layout of one block per process of a grid `shape` (rows, cols), in each replica.

    `num_ranks` counts the ranks of all replicas. Without `shape` the grid is as square as possible, with rows <=
    cols.

    Raises:
        LayoutError: a number is below 1, or the replicas and `shape` do not use every rank.
    """
    return ProcessGrid.over(num_ranks, shape, replicas).block_layout()


def block_cyclic(
    tile: tuple[int, int], num_ranks: int, shape: tuple[int, int] | None = None, replicas: int = 1
) -> Layout:
    """Return the layout that deals tiles of `tile` (rows, cols) elements around a grid `shape`, in each replica.

    `num_ranks` counts the ranks of all replicas. Without `shape` (rows, cols) the grid is as square as possible,
    with rows <= cols.

    Raises:
        LayoutError: a number is below 1, or the replicas and `shape` do not use every rank.
    """
    return ProcessGrid.over(num_ranks, shape, replicas).block_cyclic_layout(tile)


def cyclic(num_ranks: int, shape: tuple[int, int] | None = None, replicas: int = 1) -> Layout:
    """Return the layout that deals single elements around a grid `shape` (rows, cols), in each replica.

    `num_ranks` counts the ranks of all replicas. Without `shape` the grid is as square as possible, with rows <=
    cols.

    Raises:
        LayoutError: a number is below 1, or the replicas and `shape` do not use every rank.
    """
    return block_cyclic((1, 1), num_ranks, shape, replicas)
