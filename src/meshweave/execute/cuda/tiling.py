"""The tiles that a tracked product computes: how large they are, and in which order.

A Program's release says how large the tiles of a region are, in which order they come and which one is first.
What it leaves open is chosen here. All ranks choose alike, so a rank that waits for a region of another one knows
how many tiles it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshweave.base.errors import UnsupportedError, listed
from meshweave.ir.program.expressions import number_of
from meshweave.ir.program.ops import Matmul
from meshweave.ir.program.release import Release
from meshweave.lower.tiles import Box, tiles

ADDING_PROGRAMS = 16
"""Blocks of threads of a kernel that adds, and multiprocessors that products leave for them."""
_GROUP = 8
"""Block rows that are walked together where the order is the machine's, so that operands stay in cache."""


@dataclass(frozen=True)
class Block:
    """The largest tile that one thread block of the matmul kernel computes at a time, and how Triton compiles it.

    Attributes:
        rows, columns: size of the tile of the result, in elements.
        depth: elements of K, the summed dim, that one step of the kernel's loop takes.
        num_warps, num_stages: Triton's options of the same names.
    """

    rows: int
    columns: int
    depth: int
    num_warps: int = 8
    num_stages: int = 3

    def fitted(self, rows: int, columns: int, depth: int) -> Block:
        """Return the block cut down to what a matmul of `rows` x `columns` with K = `depth` needs.

        A size that is cut down is the matmul's, rounded up to a power of two of at least 16: 100 -> 128.
        """

        def least(size: int, most: int) -> int:
            return min(most, max(16, 1 << (size - 1).bit_length()))

        return replace(
            self,
            rows=least(rows, self.rows),
            columns=least(columns, self.columns),
            depth=least(depth, self.depth),
        )


BLOCKS = {2: Block(128, 256, 64), 4: Block(128, 128, 32)}
"""By the bytes of an element: what Triton's own persistent products take on an H100."""


def tiles_of_region(rows: int, columns: int, release: Release, block: Block) -> list[Box]:
    """Return the tiles of a region of `rows` x `columns`, in the order in which the kernel computes them.

    Each is ((start, stop) of rows, (start, stop) of columns) in the region, no larger than `block`. A tile size
    in `release` that is larger than `block` is cut into several tiles.
    """
    if release.tile:
        return [
            ((top + down[0], top + down[1]), (left + across[0], left + across[1]))
            for (top, bottom), (left, right) in tiles(rows, columns, release)
            for down, across in _blocks(bottom - top, right - left, block)
        ]
    if release.order:
        return tiles(rows, columns, replace(release, tile=(block.rows, block.columns)))
    listed = _blocks(rows, columns, block)
    listed.sort(key=lambda box: (box[0][0] // (block.rows * _GROUP), box[1], box[0]))
    first = number_of(release.first) % max(len(listed), 1)
    return listed[first:] + listed[:first]


def _blocks(rows: int, columns: int, block: Block) -> list[Box]:
    return tiles(rows, columns, Release((block.rows, block.columns), "rows"))


def block_of(shapes: Sequence[tuple[int, int, Release]], depth: int, element_bytes: int) -> Block:
    """Return the block of the kernel of one matmul: that of `BLOCKS`, cut down to the matmul's largest tile.

    Args:
        shapes: (rows, columns, release) of each region of the matmul's output.
        depth: K of the matmul, in elements.
        element_bytes: the size of an operand's element, 2 or 4.

    Raises:
        UnsupportedError: the kernel has no blocks for elements of that size.
    """
    if element_bytes not in BLOCKS:
        raise UnsupportedError(
            f"tracked products have elements of {listed(sorted(BLOCKS))} bytes, not {element_bytes}"
        )
    most = [1, 1]
    for *sizes, release in shapes:
        for dim in (0, 1):
            tile = number_of(release.tile[dim]) if len(release.tile) > dim else sizes[dim]
            most[dim] = max(most[dim], min(sizes[dim], tile))
    return BLOCKS[element_bytes].fitted(most[0], most[1], depth)


def product_block(ops: Sequence[Matmul], element_bytes: int) -> Block:
    """Return the block of the kernel of one matmul: that of `BLOCKS`, cut down to the matmul's largest tile.

    Args:
        ops: the matmul, as one op for each region of its output.
        element_bytes: the size of an operand's element, 2 or 4.

    Raises UnsupportedError for another size.
    """
    depths = [op.a.shape[0 if op.transpose_a else 1] for op in ops]
    return block_of([(*_sizes(op), op.release or Release()) for op in ops], max(depths), element_bytes)


def num_tiles(op: Matmul, block: Block) -> int:
    """Return the number of tiles that the kernel computes for the region of `op`: what its counter grows by."""
    return len(tiles_of_region(*_sizes(op), op.release or Release(), block))


def _sizes(op: Matmul) -> tuple[int, int]:
    rows, columns = op.out.shape
    return rows, columns
