"""How a logical tensor lies on a mesh: one placement per mesh axis, in the vocabulary of PyTorch DTensor.

Placements are applied from the first mesh axis to the last, each to what the axes before it left. `Shard`
cuts by DTensor's chunk rule: every part has ceil(size / parts) elements until they run out, so the last
parts may be shorter or empty. `Tile` deals blocks of a fixed size around the axis (block-cyclic, as in
ScaLAPACK), which with one block per rank and an offset gives any regular misalignment. `StridedShard` cuts
each of several equal chunks, as DTensor does where FSDP shards what tensor parallelism has sharded, or where
a sharded dim was flattened into another.

A layout may also say how the tensor is *seen*: with `folds`, consecutive dims count as one, as in the matrix
(B * S, K) that a matrix product sees in activations (B, S, K).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from meshweave.base.errors import LayoutError, printable, require_known, require_whole, require_wholes
from meshweave.base.limits import PIECES
from meshweave.describe.layout.intervals import (
    Interval,
    Intervals,
    blocked_intervals,
    chunk_bounds,
    flattened_box,
    indices_at,
    merge_adjacent,
    num_indices,
)
from meshweave.describe.layout.mesh import Mesh

REDUCTIONS = ("sum", "max", "min", "prod")
"""By which partial results make a tensor."""


@dataclass(frozen=True)
class Shard:
    """Tensor dim `dim` is cut into chunks along this mesh axis."""

    dim: int

    def __post_init__(self) -> None:
        require_wholes(self, ("dim",), LayoutError)

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True)
class Replicate:
    """Every rank along this mesh axis holds the same elements."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Partial:
    """Every rank along this mesh axis holds a partial result; the tensor is their reduction by `op`."""

    op: str = "sum"

    def __post_init__(self) -> None:
        require_known(self.op, REDUCTIONS, "there is no reduction", LayoutError, "give one of")

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

    def __post_init__(self) -> None:
        require_wholes(self, ("dim", "size", "offset"), LayoutError)

    def __str__(self) -> str:
        return f"T({self.dim}, {self.size}, {self.offset})"


@dataclass(frozen=True)
class StridedShard:
    """Tensor dim `dim` is cut into `split_factor` chunks, and each of them into chunks along this mesh axis.

    A rank holds its chunk of every one of them, in order. Both cuts follow the chunk rule: this is
    `_StridedShard(dim, split_factor=)` of PyTorch 2.13 (torch/distributed/tensor/placement_types.py).
    """

    dim: int
    split_factor: int

    def __post_init__(self) -> None:
        require_wholes(self, ("dim", "split_factor"), LayoutError)

    def __str__(self) -> str:
        return f"SS({self.dim}, {self.split_factor})"


Placement = Shard | Replicate | Partial | Tile | StridedShard
_KINDS = (Shard, Replicate, Partial, Tile, StridedShard)


def _placements(given: object) -> tuple[Placement, ...]:
    """Return placements, in a tuple or list, as a tuple. Raises LayoutError for what is none, such as torch's."""
    listed = tuple(given) if isinstance(given, tuple | list) else (given,)
    for placement in listed:
        if not isinstance(placement, _KINDS):
            what = f"{printable(repr(placement))} of {type(placement).__module__}"
            kinds = ", ".join(kind.__name__ for kind in _KINDS)
            raise LayoutError(f"{what} is no placement of meshweave; give one of {kinds} for each mesh axis")
    return listed


@dataclass(frozen=True)
class Layout:
    """How a tensor is placed on `mesh`: one placement per mesh axis.

    With `folds`, placements name the dims of the *original* tensor, and every caller sees one dim per fold:
    the row-major flattening of consecutive original dims, whose sizes the fold lists. An original of (4, 8,
    16) seen as (32, 16) has folds ((4, 8), (16,)); an empty fold is a dim of size 1. Every `shape` given to
    the methods is the one that is seen.

    Raises:
        LayoutError: the number of placements is not that of mesh axes, or a placement or fold is malformed.
    """

    mesh: Mesh
    placements: tuple[Placement, ...]
    folds: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        mesh: object = self.mesh
        if not isinstance(mesh, Mesh):
            raise LayoutError(f"a layout is on a Mesh, not {printable(repr(mesh))}")
        object.__setattr__(self, "placements", _placements(self.placements))
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
            if isinstance(placement, StridedShard) and placement.split_factor < 1:
                raise LayoutError(f"{placement}: the split factor must be at least 1")
        if self.folds is not None and any(type(size) is not int for fold in self.folds for size in fold):
            sizes = (
                tuple(require_whole(size, "a size of a fold", LayoutError) for size in fold)
                for fold in self.folds
            )
            object.__setattr__(self, "folds", tuple(sizes))
        if any(size < 0 for fold in self.folds or () for size in fold):
            raise LayoutError(f"{self}: the sizes that a fold lists must not be negative")

    def __str__(self) -> str:
        placed = f"{self.mesh.name}[{', '.join(map(str, self.placements))}]"
        if self.folds is None:
            return placed
        return f"fold({', '.join([placed, *map(str, self.folds)])})"

    def original_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the sizes of the dims that placements name: `shape` itself, or the sizes that all folds list.

        Raises:
            LayoutError: `shape` is not that of the folds.
        """
        if self.folds is None:
            return tuple(shape)
        seen = tuple(map(math.prod, self.folds))
        if tuple(shape) != seen:
            raise LayoutError(f"{self}: folds to a tensor of shape {seen}, not {tuple(shape)}")
        return tuple(size for fold in self.folds for size in fold)

    def intervals(self, shape: Sequence[int], rank: int) -> tuple[Intervals, ...]:
        """Return the global index ranges that `rank` holds, per dim of a tensor of global `shape`, in local order.

        Raises:
            LayoutError: a placement names a dim that the tensor does not have or cuts one into more ranges than
                `base.limits.PIECES` allows, or `shape` is not that of the folds.
            KeyError: the rank is not in the mesh.
        """
        return _intervals(self, tuple(shape), rank)

    @property
    def shard_keys(self) -> list[tuple[int, ...]]:
        """Return for each rank, in the order of the mesh, its coordinates along the axes that shard the tensor.

        Coordinates along the other axes are 0, so that ranks with equal keys hold the same indices: replicas, or
        terms of one reduction (`Partial`).
        """
        sizes = [
            range(size) if isinstance(placement, (Shard, Tile, StridedShard)) else (0,) * size
            for size, placement in zip(self.mesh.shape, self.placements, strict=True)
        ]
        return list(product(*sizes))

    def local_shape(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """Return the shape of what `rank` holds of a tensor of global `shape`.

        Raises:
            LayoutError: a placement or fold does not fit `shape`.
            KeyError: the rank is not in the mesh.
        """
        return tuple(map(num_indices, self.intervals(shape, rank)))

    def has_equal_shards(self, shape: Sequence[int]) -> bool:
        """Return whether each placement divides its dim evenly, so that all shards have one shape.

        False as well for placements for which that is not computed (`Tile`, `StridedShard`), and where `shape`
        lacks a dim that is sharded.

        Raises:
            LayoutError: `shape` is not that of the folds.
        """
        sizes = self.original_shape(shape)
        parts = [1] * len(sizes)
        for placement, count in zip(self.placements, self.mesh.shape, strict=True):
            if isinstance(placement, (Tile, StridedShard)):
                return False
            if isinstance(placement, Shard):
                if not 0 <= placement.dim < len(sizes):
                    return False
                parts[placement.dim] *= count
        return all(size % count == 0 for size, count in zip(sizes, parts, strict=True))

    def indices(self, shape: Sequence[int], rank: int) -> tuple[NDArray[np.int64], ...]:
        """Return the global indices of the elements that `rank` holds, one array per dim, in local order.

        `shape` is the global one.

        Raises:
            LayoutError: a placement or fold does not fit `shape`.
            KeyError: the rank is not in the mesh.
        """
        return tuple(
            np.concatenate([np.arange(start, stop) for start, stop in dim] or [np.arange(0)])
            for dim in self.intervals(shape, rank)
        )

    @property
    def partial_axes(self) -> tuple[str, ...]:
        """Return the names of the mesh axes along which ranks hold partial results."""
        pairs = zip(self.mesh.axes, self.placements, strict=True)
        return tuple(axis for axis, placement in pairs if isinstance(placement, Partial))


@lru_cache(maxsize=16384)
def _intervals(layout: Layout, shape: tuple[int, ...], rank: int) -> tuple[Intervals, ...]:
    sizes = layout.original_shape(shape)
    dims: list[Intervals] = [((0, size),) if size else () for size in sizes]
    coords = layout.mesh.coords(rank)
    for placement, parts, index in zip(layout.placements, layout.mesh.shape, coords, strict=True):
        if isinstance(placement, (Shard, Tile, StridedShard)):
            if not 0 <= placement.dim < len(sizes):
                raise LayoutError(
                    f"{layout}: {placement} names a dim that a tensor of shape {sizes} does not have"
                )
            _check_pieces(layout, placement, sizes[placement.dim], parts)
            intervals = dims[placement.dim]
            dims[placement.dim] = indices_at(
                intervals, _positions(placement, num_indices(intervals), parts, index)
            )
    if layout.folds is None:
        return tuple(dims)
    folded, at = [], 0
    for fold in layout.folds:
        folded.append(flattened_box(fold, dims[at : at + len(fold)]))
        at += len(fold)
    return tuple(folded)


def _check_pieces(layout: Layout, placement: Shard | Tile | StridedShard, size: int, parts: int) -> None:
    """Raise LayoutError where a placement cuts a dim of `size` into more ranges a rank than `PIECES` allows."""
    if isinstance(placement, Tile):
        pieces = size // (placement.size * parts)
    else:
        pieces = min(placement.split_factor, size) if isinstance(placement, StridedShard) else 1
    if pieces > PIECES.most:
        raise LayoutError(f"{layout}: {placement} of {size} {PIECES.refusal(pieces)}")


def _positions(
    placement: Shard | Tile | StridedShard, size: int, parts: int, index: int
) -> Sequence[Interval]:
    """Return the positions, out of `size` that `parts` ranks share, that rank number `index` holds."""
    if isinstance(placement, Shard):
        return (chunk_bounds(size, parts, index),)
    if isinstance(placement, Tile):
        tile = placement.size
        return blocked_intervals(index * tile - placement.offset, tile, parts * tile, 0, size)
    ranges = []
    for number in range(min(placement.split_factor, size)):  # chunks past the size are empty
        start, stop = chunk_bounds(size, placement.split_factor, number)
        lo, hi = chunk_bounds(stop - start, parts, index)
        ranges.append((start + lo, start + hi))
    return merge_adjacent(ranges)
