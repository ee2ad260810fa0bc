"""How a logical tensor lies on a mesh: one placement per mesh axis, in the vocabulary of PyTorch DTensor.

Placements are applied from the first mesh axis to the last, each to what the axes before it left. `Shard`
cuts by DTensor's chunk rule: every part has ceil(size / parts) elements until they run out, so the last
parts may be shorter or empty. `Tile` deals blocks of a fixed size around the axis (block-cyclic, as in
ScaLAPACK), which with one block per rank and an offset gives any regular misalignment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from meshweave.describe.mesh import Mesh
from meshweave.errors import LayoutError

Intervals = tuple[tuple[int, int], ...]
"""Half-open [start, stop) global index ranges along one dim, in local order."""


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """[start, stop) of part `index` when `size` elements are cut into `parts` by torch.chunk's rule."""
    each = -(-size // parts)
    return min(index * each, size), min((index + 1) * each, size)


@dataclass(frozen=True)
class Shard:
    """Tensor dim `dim` is cut into chunks along this mesh axis."""

    dim: int

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True)
class Replicate:
    """Every rank along this mesh axis holds the same elements."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Partial:
    """Every rank along this mesh axis holds a term; the tensor is their reduction by `op`."""

    op: str = "sum"

    def __str__(self) -> str:
        return "P" if self.op == "sum" else f'P("{self.op}")'


@dataclass(frozen=True)
class Tile:
    """Blocks of `size` elements of tensor dim `dim` are dealt around this mesh axis, block-cyclically.

    The first block is `offset` elements short (0 <= offset < size), which shifts all cuts.
    """

    dim: int
    size: int
    offset: int = 0

    def __str__(self) -> str:
        return f"T({self.dim}, {self.size}, {self.offset})"


Placement = Shard | Replicate | Partial | Tile


@dataclass(frozen=True)
class Layout:
    """One placement per axis of `mesh`. Raises LayoutError where their number does not fit."""

    mesh: Mesh
    placements: tuple[Placement, ...]

    def __post_init__(self) -> None:
        if len(self.placements) != len(self.mesh.shape):
            raise LayoutError(
                f"mesh {self.mesh.name} has {len(self.mesh.shape)} axes, "
                f"layout has {len(self.placements)} placements"
            )
        for placement in self.placements:
            if isinstance(placement, Tile) and not (
                placement.size >= 1 and 0 <= placement.offset < placement.size
            ):
                raise LayoutError(
                    f"{placement}: tile size must be positive and its offset smaller than the size"
                )

    def __str__(self) -> str:
        return f"{self.mesh.name}[{', '.join(map(str, self.placements))}]"

    def intervals(self, shape: Sequence[int], rank: int) -> tuple[Intervals, ...]:
        """Global index ranges that `rank` holds, per dim of a tensor of global `shape`, in local order."""
        return _intervals(self, tuple(shape), rank)

    def local_shape(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """Shape of the shard of `rank`. Raises LayoutError for a dim that the tensor does not have."""
        return tuple(sum(stop - start for start, stop in dim) for dim in self.intervals(shape, rank))

    def indices(self, shape: Sequence[int], rank: int) -> tuple[NDArray[np.int64], ...]:
        """Global indices of the local elements, one array per dim."""
        return tuple(
            np.concatenate([np.arange(start, stop) for start, stop in dim] or [np.arange(0)])
            for dim in self.intervals(shape, rank)
        )

    @property
    def partial_axes(self) -> tuple[str, ...]:
        """Mesh axes along which the local values are terms of a sum."""
        pairs = zip(self.mesh.axes, self.placements, strict=True)
        return tuple(axis for axis, placement in pairs if isinstance(placement, Partial))


@lru_cache(maxsize=65536)
def _intervals(layout: Layout, shape: tuple[int, ...], rank: int) -> tuple[Intervals, ...]:
    dims: list[Intervals] = [((0, size),) if size else () for size in shape]
    coords = layout.mesh.coords(rank)
    for placement, parts, index in zip(layout.placements, layout.mesh.shape, coords, strict=True):
        if isinstance(placement, (Shard, Tile)):
            if not 0 <= placement.dim < len(shape):
                raise LayoutError(
                    f"{layout}: {placement} names a dim that a tensor of shape {shape} does not have"
                )
            held = dims[placement.dim]
            length = sum(stop - start for start, stop in held)
            if isinstance(placement, Shard):
                wanted: list[tuple[int, int]] = [chunk(length, parts, index)]
            else:
                wanted = list(_tile_ranges(placement, length, parts, index))
            dims[placement.dim] = tuple(piece for lo, hi in wanted for piece in _cut(held, lo, hi))
    return tuple(dims)


def _tile_ranges(tile: Tile, length: int, parts: int, index: int) -> list[tuple[int, int]]:
    ranges = []
    block = index
    while (start := block * tile.size - tile.offset) < length:
        lo, hi = max(start, 0), min(start + tile.size, length)
        if lo < hi:
            ranges.append((lo, hi))
        block += parts
    return ranges


def _cut(held: Intervals, lo: int, hi: int) -> list[tuple[int, int]]:
    """The part [lo, hi), counted in local positions, of the concatenation of `held`."""
    out, position = [], 0
    for start, stop in held:
        a, b = max(lo, position), min(hi, position + stop - start)
        if a < b:
            out.append((start + a - position, start + b - position))
        position += stop - start
    return out
