"""Which part of a tensor a rank has, as boxes of the whole."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshweave.base.errors import LayoutError
from meshweave.describe.layout import Partial
from meshweave.execute.torch import compat
from meshweave.nn.dtensor import layout_of
from meshweave.nn.parallel.model_words import checksum_words

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


def sums_of_parts(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, dict[str, str]]:
    """Return {name: {part: checksum}}, one part each, of the parameters among named tensors that this rank has.

    Others, such as statistics of batches, may differ between copies. Raises LayoutError as `block_of`.
    """
    own = [(name, each) for name, each in tensors if isinstance(each, nn.Parameter) and _has_bits(each)]
    sums = checksum_words(own)
    return {name: {f"{each.dtype} {block_of(name, each)}": sums[name]} for name, each in own if name in sums}


def _has_bits(tensor: Tensor) -> bool:
    """Return whether this rank has a part of a tensor whose elements are its own memory."""
    if isinstance(tensor, DTensor):
        return tensor.device_mesh.get_coordinate() is not None
    return tensor.layout is torch.strided and not compat.wraps_tensors(tensor)


def other_copy(said: Sequence[Mapping[str, Mapping[str, str]]]) -> str:
    """Return in words which parameter two ranks have the same part of with other values; "" for none.

    `said` has the `sums_of_parts` of each rank. One of the two would be kept, and the other lost.
    """
    known: dict[tuple[str, str], tuple[int, str]] = {}
    for rank, sums in enumerate(said):
        for name, parts in sums.items():
            for part, bits in parts.items():
                first, kept = known.setdefault((name, part), (rank, bits))
                if kept != bits:
                    return (
                        f"'{name}' has other values on rank {rank} than on rank {first}: parameters of different "
                        "stages need names that differ, and copies of one the same values"
                    )
    return ""
