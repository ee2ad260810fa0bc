"""Tensors as the boxes that a rank has of them, and which rank writes which box.

A fused matrix, such as that of queries, keys and values side by side, is split part by part: a rank has its heads
of each of the three, which are several boxes. Any other DTensor is one box, or several by a strided shard.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshweave.base.errors import CheckpointError, LayoutError, did_you_mean, printable
from meshweave.execute.torch import compat
from meshweave.nn.training.manifest import ITEM_BYTES, SavedBox, WrittenTensor
from meshweave.nn.weights.blocks import block_of, boxes_of

Ranges = Sequence[Sequence[tuple[int, int]]]
"""Per dim the ranges (start, stop) of positions, whose parts lie one after another on the rank."""


@dataclass(frozen=True)
class ShardPieces:
    """The boxes that a rank has of a tensor. A box is a range of positions along each dim.

    Attributes:
        shape: of the whole tensor.
        offsets: for each box, its first position along each dim of the whole.
        tensors: for each box, its elements, as a view of the rank's shard.
        dtype: of the whole; by default that of the first box.
    """

    shape: tuple[int, ...]
    offsets: tuple[tuple[int, ...], ...]
    tensors: tuple[Tensor, ...]
    dtype: torch.dtype | None = None

    @classmethod
    def of(cls, tensor: DTensor, ranges: Ranges) -> ShardPieces:
        """Return the boxes of this rank's shard of a DTensor; none on a rank outside of its mesh.

        Args:
            ranges: for each dim of the whole the (start, stop) ranges that the shard has, in the order in which
                they lie in the shard. There is a box for each choice of a range per dim, but for empty ones.
        """
        local = compat.local_tensor(tensor).detach()
        if tensor.device_mesh.get_coordinate() is None:
            return cls(tuple(tensor.shape), (), (), tensor.dtype)
        offsets, tensors = [], []
        for own, whole in boxes_of(tuple(tuple(each) for each in ranges)):
            view = local[own]
            if view.numel():
                offsets.append(tuple(each.start for each in whole))
                tensors.append(view)
        return cls(tuple(tensor.shape), tuple(offsets), tuple(tensors), tensor.dtype)

    @property
    def saved_as(self) -> WrittenTensor:
        """Return the dtype, by name, and the shape of the whole tensor."""
        dtype = self.dtype or self.tensors[0].dtype
        return WrittenTensor(str(dtype).removeprefix("torch."), self.shape)

    def offer(self, name: str) -> list[Any]:
        """Return [name, dtype, shape, boxes], what this rank says of the tensor for `assigned_boxes`.

        `dtype` is its name, `shape` that of the whole tensor, and each box is [offsets, sizes].
        """
        boxes = [[list(at), list(each.shape)] for at, each in zip(self.offsets, self.tensors, strict=True)]
        return [name, self.saved_as.dtype, list(self.shape), boxes]

    def copied(self, box: SavedBox) -> Tensor:
        """Return a copy on the CPU of the box of this rank that has the offsets and sizes of `box`."""
        wanted = box.offsets, box.sizes
        boxes = ((at, tuple(each.shape)) for at, each in zip(self.offsets, self.tensors, strict=True))
        tensor = self.tensors[next(number for number, each in enumerate(boxes) if each == wanted)]
        return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


Saved: TypeAlias = Tensor | ShardPieces
"""What a checkpoint takes under a name."""


def pieces_of(name: str, value: Saved) -> ShardPieces:
    """Return this rank's boxes of a tensor; a plain tensor is one box, the whole, or none if it is empty.

    Args:
        name: of the tensor, for errors.
        value: the tensor, or the boxes, which are returned as they are.

    Raises CheckpointError where a checkpoint cannot hold it: it is no tensor, is on the meta device, is sparse or
    a subclass that wraps tensors, or has a dtype or placements that checkpoints do not have; or the name is no
    str.
    """
    if type(name) is not str:
        raise CheckpointError(f"{printable(repr(name))} is no name of a tensor, which is a str")
    if not isinstance(value, Tensor | ShardPieces):
        raise CheckpointError(f"'{name}' is a {type(value).__name__}, and a checkpoint takes tensors")
    if isinstance(value, DTensor):
        try:
            pieces = ShardPieces.of(value, block_of(name, value))
        except LayoutError as error:
            raise CheckpointError(str(error)) from None
    elif isinstance(value, Tensor):
        tensors = (value.detach(),) if value.numel() else ()
        pieces = ShardPieces(tuple(value.shape), ((0,) * value.dim(),) * len(tensors), tensors, value.dtype)
    else:
        pieces = value
    if (pieces.tensors or pieces.dtype) and pieces.saved_as.dtype not in ITEM_BYTES:
        raise CheckpointError(f"'{name}' is of {pieces.saved_as.dtype}, which checkpoints do not have")
    for tensor in pieces.tensors:
        if tensor.layout != torch.strided or compat.wraps_tensors(tensor):
            raise CheckpointError(
                f"'{name}' is a {type(tensor).__name__} of layout {tensor.layout}, not a dense one"
            )
        if tensor.is_meta:
            raise CheckpointError(f"'{name}' is on the meta device, where it has no values")
    return pieces


def assigned_boxes(offers: Sequence[Sequence[Any]]) -> tuple[dict[str, WrittenTensor], list[list[SavedBox]]]:
    """Return (tensors, boxes): dtype and shape of all tensors by name, and for each rank the boxes that it writes.

    A box that several ranks have is written by the one of them that has fewest bytes to write so far.

    Args:
        offers: for each rank, for each of its tensors (name, dtype, shape of the whole, boxes as (offsets,
            sizes)), as `ShardPieces.offer` returns it.

    Raises CheckpointError where ranks give a tensor different dtypes or shapes, or the boxes of one have more or
    fewer elements than the whole.
    """
    tensors: dict[str, WrittenTensor] = {}
    owners: dict[SavedBox, list[int]] = {}
    for rank, offer in enumerate(offers):
        for name, dtype, shape, boxes in offer:
            own = WrittenTensor(dtype, tuple(shape))
            if tensors.setdefault(name, own) != own:
                first = tensors[name]
                raise CheckpointError(
                    f"'{name}' is {first.dtype} of shape {first.shape} on one rank, {own.dtype} of shape "
                    f"{own.shape} on rank {rank}"
                )
            for offsets, sizes in boxes:
                owners.setdefault(SavedBox(name, tuple(offsets), tuple(sizes)), []).append(rank)
    shares: list[list[SavedBox]] = [[] for _ in offers]
    load = [0] * len(offers)
    for box, ranks in owners.items():
        chosen = min(ranks, key=load.__getitem__)
        shares[chosen].append(box)
        load[chosen] += math.prod(box.sizes) * ITEM_BYTES[tensors[box.name].dtype]
    counts = dict.fromkeys(tensors, 0)
    for box in owners:
        counts[box.name] += math.prod(box.sizes)
    for name, count in counts.items():
        if count != (whole := math.prod(tensors[name].shape)):
            raise CheckpointError(f"'{name}' has {whole} elements, and the ranks have parts with {count}")
    return tensors, shares


def why_not_loadable(name: str, pieces: ShardPieces, saved: Mapping[str, WrittenTensor], casts: bool) -> str:
    """Return why a checkpoint's tensor cannot be loaded into `pieces`; "" if it can.

    The text continues a sentence whose subject is the checkpoint, such as "has no tensor 'w'". Pieces without
    boxes and dtype are checked for the name alone.

    Args:
        name: of the tensor.
        pieces: the boxes that this rank has of it.
        saved: dtype and whole shape of each tensor in the checkpoint, by name.
        casts: whether one floating-point dtype may be loaded into another.
    """
    if name not in saved:
        return f"has no tensor '{name}'{did_you_mean(name, saved)}"
    if not (pieces.tensors or pieces.dtype):
        return ""
    own, there = pieces.saved_as, saved[name]
    if own.shape != there.shape:
        return f"has '{name}' of shape {there.shape}, and here it is {own.shape}"
    if own.dtype == there.dtype:
        return ""
    is_float = own.dtype.startswith(("float", "bfloat")) and there.dtype.startswith(("float", "bfloat"))
    if is_float and casts:
        return ""
    how = "; casts=True loads it" if is_float else ""
    return f"has '{printable(name)}' of {there.dtype}, and here it is {own.dtype}{how}"
