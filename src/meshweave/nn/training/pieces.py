"""Tensors of which a rank has several boxes, in checkpoints of torch.

A fused matrix, such as that of queries, keys and values side by side, is split part by part: a rank has its heads
of each of the three. As a DTensor it lies by a strided shard, whose boxes torch's checkpoints do not write. These
planners do, with the boxes' own places, so that any other layout reads them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

Ranges = Sequence[Sequence[tuple[int, int]]]
"""Per dim the ranges (start, stop) of positions, whose parts lie one after another on the rank."""


@dataclass(frozen=True)
class ShardPieces:
    """The boxes that a rank has of a tensor.

    Attributes:
        shape: of the whole tensor.
        offsets: where each box begins in the whole.
        tensors: each box, as a view of what the rank has.
    """

    shape: tuple[int, ...]
    offsets: tuple[tuple[int, ...], ...]
    tensors: tuple[Tensor, ...]

    @classmethod
    def of(cls, tensor: DTensor, ranges: Ranges) -> ShardPieces:
        """Return the boxes of this rank's part of a tensor, which has the given ranges of it."""
        local = tensor.to_local().detach()
        begins = [list(itertools.accumulate((b - a for a, b in own), initial=0)) for own in ranges]
        offsets, tensors = [], []
        for box in itertools.product(*(range(len(own)) for own in ranges)):
            view = local
            for dim, number in enumerate(box):
                start, stop = ranges[dim][number]
                view = view.narrow(dim, begins[dim][number], stop - start)
            if view.numel():
                offsets.append(tuple(ranges[dim][number][0] for dim, number in enumerate(box)))
                tensors.append(view)
        return cls(tuple(tensor.shape), tuple(offsets), tuple(tensors))

    def copied(self) -> ShardPieces:
        """Return the same with memory of its own."""
        return replace(self, tensors=tuple(tensor.cpu().clone() for tensor in self.tensors))

    @property
    def chunks(self) -> list[ChunkStorageMetadata]:
        """Return places and sizes of the boxes."""
        boxes = zip(self.offsets, self.tensors, strict=True)
        return [ChunkStorageMetadata(torch.Size(offset), tensor.shape) for offset, tensor in boxes]

    def at(self, index: MetadataIndex) -> Tensor:
        """Return the box that begins where an index says."""
        return self.tensors[self.offsets.index(tuple(index.offset))]


class PiecesSavePlanner(DefaultSavePlanner):  # type: ignore[misc]
    """Saves boxes besides what the state dict has."""

    def __init__(self, pieces: Mapping[str, ShardPieces]) -> None:
        super().__init__()
        self._pieces = pieces

    def create_local_plan(self) -> SavePlan:
        """Return what this rank writes."""
        plan = super().create_local_plan()
        items = [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk, TensorProperties.create_from_tensor(tensor), torch.Size(pieces.shape)
                ),
            )
            for name, pieces in self._pieces.items()
            for chunk, tensor in zip(pieces.chunks, pieces.tensors, strict=True)
        ]
        self.plan = replace(plan, items=[*plan.items, *items])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return what is written under an index."""
        own = self._pieces.get(index.fqn)
        return super().lookup_object(index) if own is None else own.at(index)


class PiecesLoadPlanner(DefaultLoadPlanner):  # type: ignore[misc]
    """Loads boxes besides what the state dict has."""

    def __init__(self, pieces: Mapping[str, ShardPieces]) -> None:
        super().__init__()
        self._pieces = pieces

    def create_local_plan(self) -> LoadPlan:
        """Return what this rank reads."""
        plan = super().create_local_plan()
        assert self.metadata is not None
        items = [
            item
            for name, pieces in self._pieces.items()
            for item in create_read_items_for_chunk_list(
                name, self.metadata.state_dict_metadata[name], pieces.chunks
            )
        ]
        return replace(plan, items=[*plan.items, *items])

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return what is read into under an index."""
        own = self._pieces.get(index.fqn)
        tensor: Tensor = super().lookup_tensor(index) if own is None else own.at(index)
        return tensor
