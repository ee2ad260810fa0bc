"""Where the buffers of a program lie in the memory of a GPU, and the tiles of their views as regions."""

from __future__ import annotations

from dataclasses import dataclass

from meshweave.base.errors import UnsupportedError
from meshweave.base.units import dtype_bytes
from meshweave.describe.machine.gpu import GpuFile
from meshweave.ir.program import Program
from meshweave.ir.program.expressions import number_of
from meshweave.ir.program.release import Release
from meshweave.ir.program.views import Range, View
from meshweave_studies.gpu.kernels import Kernels, Rectangle, Region, Source

_ALIGN = 1 << 21
ROWS_OF_TILES = 8
"""Rows of tiles that a product goes down before it goes to the next column: the cache holds what is used again."""


@dataclass(frozen=True)
class MatrixTiles:
    """A view in tiles of `size` elements, and the number of the region of each by (first row, first column)."""

    size: tuple[int, int]
    regions: dict[tuple[int, int], int]

    def row_range(self, i0: int, i1: int) -> tuple[int, int]:
        """Return the first region that has rows i0 to i1, and how many do; regions are numbered along the rows."""
        numbers = [n for (row, _), n in self.regions.items() if row < i1 and row + self.size[0] > i0]
        assert max(numbers) - min(numbers) + 1 == len(numbers), (
            "tiles of operands are numbered along the rows"
        )
        return min(numbers), len(numbers)


@dataclass(frozen=True)
class PlacedMatrix:
    """A view in memory: address of the first element, rows, columns, bytes of an element and of a buffer's row."""

    base: int
    rows: int
    columns: int
    item: int
    stride: int

    @property
    def key(self) -> tuple[int, ...]:
        """Return what identifies the view: address, rows, columns and stride."""
        return self.base, self.rows, self.columns, self.stride


class MemoryMap:
    """The memory of one rank: addresses of buffers, and regions of `kernels` for the tiles of views."""

    def __init__(self, program: Program, gpu: GpuFile, rank: int, kernels: Kernels) -> None:
        self.program, self.gpu, self.rank, self.kernels = program, gpu, rank, kernels
        self._bases: dict[str, int] = {}
        self._end = 0
        self._tiles: dict[tuple[int, ...], MatrixTiles] = {}

    def base(self, buffer: str) -> int:
        """Return the address of a buffer."""
        if buffer not in self._bases:
            self._bases[buffer] = self.take(self.program.buffer_bytes(buffer, self.rank))
        return self._bases[buffer]

    def take(self, num_bytes: int) -> int:
        """Reserve `num_bytes` of memory that nothing else uses, and return their address."""
        base, self._end = self._end, (self._end + num_bytes) // _ALIGN * _ALIGN + _ALIGN
        return base

    def matrix(self, view: View) -> PlacedMatrix:
        """Return the place in memory of a view of a buffer that is not stored transposed.

        Raises UnsupportedError for other views.
        """
        address, stride, item, is_transposed = self.operand(view)
        if is_transposed:
            raise UnsupportedError(
                f"a GPU in detail takes transposed buffers as operands of products only, not {view}"
            )
        return PlacedMatrix(address, view.shape[0], view.shape[1], item, stride)

    def operand(self, view: View) -> tuple[int, int, int, bool]:
        """Return (address of the first element, bytes from one line to the next, bytes of an element, whether
        lines are columns). Raises UnsupportedError for a view that is no contiguous part of a matrix.
        """
        if len(view.selectors) != 2 or not all(isinstance(selector, Range) for selector in view.selectors):
            raise UnsupportedError(f"a GPU in detail takes contiguous parts of matrices, not {view}")
        buffer, shape = self.program.buffer_of[view.buffer], self.program.local_shape(view.buffer, self.rank)
        item = dtype_bytes(buffer.dtype)
        is_transposed = buffer.order == (1, 0)
        line, place = (number_of(selector.start) for selector in view.selectors)
        stride = shape[1]
        if is_transposed:
            line, place, stride = place, line, shape[0]
        return self.base(view.buffer) + (line * stride + place) * item, stride * item, item, is_transposed

    def part(self, view: View) -> tuple[int, int]:
        """Return the address and bytes of a view that is contiguous. Raises UnsupportedError for others."""
        matrix = self.matrix(view)
        if matrix.rows > 1 and matrix.columns * matrix.item != matrix.stride:
            raise UnsupportedError(f"collectives of a GPU in detail take contiguous parts, not {view}")
        return matrix.base, matrix.rows * matrix.columns * matrix.item

    # --- tiles ------------------------------------------------------------------------------------------

    def known_tiles(self, view: View) -> MatrixTiles | None:
        """Return the tiles into which `tiles` has cut a view of this rank; None where it has not."""
        if view.rank is not None and view.rank != self.rank:
            return None
        is_matrix = len(view.selectors) == 2 and self.program.buffer_of[view.buffer].order != (1, 0)
        return self._tiles.get(self.matrix(view).key) if is_matrix else None

    def tiles(self, view: View, size: tuple[int, int], kernel: int, source: Source) -> MatrixTiles:
        """Return a view in tiles of `size`, each a region of kernel number `kernel`.

        Reads of it are counted for `source`, and writes for the source that follows.


        Raises UnsupportedError where another op releases the view in other tiles.
        """
        matrix = self.matrix(view)
        if matrix.key not in self._tiles:
            order = self.order(matrix.rows, matrix.columns, Release(size, "rows"))
            self._tiles[matrix.key] = MatrixTiles(
                size,
                {
                    (i0, j0): self.kernels.add_region(
                        Region(
                            Rectangle(
                                matrix.base + i0 * matrix.stride + j0 * matrix.item,
                                i1 - i0,
                                (j1 - j0) * matrix.item,
                                matrix.stride,
                            ),
                            kernel=kernel,
                            tracker_set=number,
                            read=source,
                            write=Source(source + 1),
                        )
                    )
                    for number, (i0, i1, j0, j1) in enumerate(order)
                },
            )
        known = self._tiles[matrix.key]
        if known.size != size:
            raise UnsupportedError(
                f"{view} is released in tiles of {by(known.size)} and of {by(size)}: all its releases need the "
                f"same"
            )
        return known

    def tile_of(self, release: Release | None, columns: int) -> tuple[int, int]:
        """Return the rows and columns of a tile: those of the release, or else the machine's."""
        if release is None or not release.tile:
            return self.gpu.tile[0], self.gpu.tile[1]
        sizes = (*map(number_of, release.tile), columns)
        return sizes[0], sizes[1]

    def order(self, rows: int, columns: int, release: Release | None) -> list[tuple[int, int, int, int]]:
        """Return (i0, i1, j0, j1) of the tiles of a matrix in the order in which they are computed.

        The machine goes down some rows of tiles and then to the next column.
        """
        tile_m, tile_n = self.tile_of(release, columns)
        order, first = (release.order, number_of(release.first)) if release is not None else ("", 0)
        down, across = -(-rows // tile_m), -(-columns // tile_n)
        band = {"": ROWS_OF_TILES, "rows": 1, "columns": max(down, 1)}[order]
        tiles = [
            (
                row * tile_m,
                min((row + 1) * tile_m, rows),
                column * tile_n,
                min((column + 1) * tile_n, columns),
            )
            for top in range(0, down, band)
            for column in range(across)
            for row in range(top, min(top + band, down))
        ]
        first = first % len(tiles) if tiles else 0
        return tiles[first:] + tiles[:first]


def by(sizes: tuple[int, ...]) -> str:
    """Return sizes in words: `2 x 3`."""
    return " x ".join(map(str, sizes))
