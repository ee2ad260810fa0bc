"""What a rank has of a tensor: the positions along each dim, whose product are its elements."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from meshweave.base.errors import LayoutError
from meshweave.execute.torch import compat
from meshweave.nn.dtensor import layout_of

Places = tuple[tuple[int, ...], ...] | None
"""Per dim the positions in the whole tensor; None for all of it."""


@dataclass(frozen=True)
class LocalTensor:
    """This rank's part of a tensor.

    Attributes:
        values: its elements.
        places: for each dim their positions in the whole tensor; None for the whole.
        part: the number, from 0, of the part of the batch that it is computed from; 0 where ranks share the batch.
    """

    values: Tensor
    places: Places = None
    part: int = 0

    def of(self, whole: Tensor) -> Tensor:
        """Return the part of `whole` at the positions `places`; `whole` has the global shape of this tensor.

        Raises LayoutError where `whole` is too small for that.
        """
        for dim, places in enumerate(self.places or ()):
            if places and places[-1] >= whole.shape[dim]:
                raise LayoutError(f"position {places[-1]} of {whole.shape[dim]} along dim {dim}")
            if len(places) != whole.shape[dim]:
                whole = whole.index_select(dim, torch.tensor(places, dtype=torch.int64, device=whole.device))
        return whole

    @property
    def key(self) -> int:
        """Return a checksum of `places` and `part`: copies of one shard have the same, other shards another."""
        return zlib.crc32(repr((self.part, self.places)).encode())

    def where(self, shape: Sequence[int]) -> str:
        """Return in words which part of the whole tensor this is: "the whole", or "shard [0:4, 8:12]".

        `shape` is that of the whole tensor.
        """
        if self.places is None or all(len(p) == n for p, n in zip(self.places, shape, strict=True)):
            return "the whole"
        return f"shard [{', '.join(map(_range, self.places))}]"


def _range(places: Sequence[int]) -> str:
    """Return positions as ranges: `0:4+8:12`."""
    ends = [i for i in range(1, len(places)) if places[i] != places[i - 1] + 1]
    starts = [0, *ends][: len(places)]
    said = [f"{places[a]}:{places[b - 1] + 1}" for a, b in zip(starts, [*ends, len(places)], strict=False)]
    return "+".join(said[:4]) + ("+..." if len(said) > 4 else "") or "none"


def local_of(tensor: Tensor, rank: int, ranges: Any = None) -> LocalTensor:
    """Return the shard of a tensor on this rank, whose global rank is `rank`; a plain tensor is whole.

    A DTensor without a layout, such as a partial sum, is gathered whole, which is collective.

    Args:
        ranges: for each dim the (start, stop) ranges of the shard, where placements do not say them; None where
            they do.
    """
    if not isinstance(tensor, DTensor):
        return LocalTensor(tensor.detach())
    values = compat.local_tensor(tensor)
    if ranges is not None:
        places = tuple(tuple(at for start, stop in own for at in range(start, stop)) for own in ranges)
        if tuple(map(len, places)) == tuple(values.shape):
            return LocalTensor(values, places)
    if all(isinstance(placement, Replicate) for placement in tensor.placements):
        return LocalTensor(values)
    try:
        indices = layout_of(tensor, side=None).indices(tuple(tensor.shape), rank)
    except LayoutError:  # terms of sums, and uneven strided shards: torch gathers what it can
        return LocalTensor(tensor.detach().full_tensor())
    return LocalTensor(values, tuple(tuple(map(int, own)) for own in indices))


def ranks_of(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the global ranks of the meshes of all DTensors among the tensors, ascending."""
    meshes = {tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)}
    return tuple(sorted({int(rank) for mesh in meshes for rank in mesh.mesh.flatten().tolist()}))


def rank_groups(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return the groups of global ranks along each axis of the meshes of DTensors, and of each whole mesh.

    Groups of one rank are left out. A mesh [[0, 1], [2, 3]] -> [[0, 1], [0, 2], [1, 3], [2, 3], [0, 1, 2, 3]].
    """
    lines: set[tuple[int, ...]] = set()
    for mesh in {tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)}:
        grid = mesh.mesh
        lines.add(tuple(grid.flatten().tolist()))
        for dim in range(grid.ndim):
            lines |= {tuple(line) for line in grid.movedim(dim, -1).reshape(-1, grid.shape[dim]).tolist()}
    return [list(line) for line in sorted(lines, key=lambda line: (len(line), line)) if len(line) > 1]
