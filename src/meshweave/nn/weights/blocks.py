"""Which part of a tensor a rank has, as boxes of the whole."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshweave.base.errors import LayoutError
from meshweave.describe.layout import Partial
from meshweave.nn.dtensor import layout_of

Runs = tuple[tuple[int, int], ...]
"""Ranges of positions along one dim, (start, stop), in the order in which a rank has them."""

Block = tuple[Runs, ...]
"""The part of a tensor that a rank has: per dim the ranges of positions."""


def block_of(name: str, tensor: Tensor) -> Block:
    """Return this rank's part of a tensor: for each dim (start, stop) ranges, in the order of its shard.

    (4, 6) with Shard(1) on 2 ranks -> (((0, 4),), ((0, 3),)) on the first. A plain tensor is whole. On a rank
    outside of a DTensor's mesh no dim has a range.

    Raises LayoutError, which begins with `name`, where it is a partial sum, or its placements have no layout.
    """
    if not isinstance(tensor, DTensor):
        return tuple(((0, size),) for size in tensor.shape)
    try:
        layout = layout_of(tensor, None)
    except LayoutError as error:
        raise LayoutError(f"{name}: {error}") from None
    if any(isinstance(placement, Partial) for placement in layout.placements):
        raise LayoutError(f"{name} is a partial sum, which no checkpoint has; redistribute it first")
    rank = dist.get_rank()
    if rank not in layout.mesh:
        return tuple(() for _ in tensor.shape)
    return tuple(map(_runs, layout.indices(tuple(tensor.shape), rank)))


def _runs(indices: Any) -> Runs:
    """Return the ranges of ascending positions; `indices` is a numpy array."""
    if not len(indices):
        return ()
    breaks = np.flatnonzero(np.diff(indices) != 1) + 1
    runs = zip((0, *breaks), (*breaks, len(indices)), strict=True)
    return tuple((int(indices[start]), int(indices[stop - 1]) + 1) for start, stop in runs)


def boxes_of(block: Block) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Yield, for each box of a block, (slices in this rank's shard, slices in the whole), a slice per dim.

    A box has one range of each dim; there is one for each combination of ranges.
    """
    per_dim = []
    for runs in block:
        ends = list(itertools.accumulate(stop - start for start, stop in runs))
        starts = [0, *ends[:-1]] if ends else []
        per_dim.append([(slice(a, b), slice(*run)) for a, b, run in zip(starts, ends, runs, strict=True)])
    for box in itertools.product(*per_dim):
        yield tuple(local for local, _ in box), tuple(whole for _, whole in box)


def sizes_of(block: Sequence[Sequence[tuple[int, int]]]) -> tuple[int, ...]:
    """Return the shape of the shard whose (start, stop) ranges for each dim are `block`: summed lengths."""
    return tuple(sum(stop - start for start, stop in runs) for runs in block)
