"""Bytes that leave this process through torch.distributed, counted where they are handed to it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from meshweave.execute.torch.call_order import ENTRY_TAG, TAGS_PER_PROGRAM


class WireCount:
    """Counts the bytes of messages and collectives from when it is made; of these, the share of this rank."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._isend, self._all_reduce, self._all_to_all = dist.isend, dist.all_reduce, dist.all_to_all_single
        self._broadcast, self._reduce = dist.broadcast, dist.reduce
        dist.isend, dist.all_reduce, dist.all_to_all_single = self.isend, self.all_reduce, self.all_to_all
        dist.broadcast, dist.reduce = self.broadcast, self.reduce

    def isend(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Count a message; those by which ranks meet have no data."""
        if kwargs.get("tag", 0) % TAGS_PER_PROGRAM != ENTRY_TAG:
            self.num_bytes += tensor.nbytes
        return self._isend(tensor, *args, **kwargs)

    def all_reduce(self, tensor: Tensor, *args: Any, group: Any = None, **kwargs: Any) -> Any:
        """Count both halves of an all-reduce."""
        count = dist.get_world_size(group)
        self.num_bytes += 2 * (count - 1) * tensor.nbytes // count
        return self._all_reduce(tensor, *args, group=group, **kwargs)

    def all_to_all(
        self, out: Tensor, tensor: Tensor, counts: Any, splits: Any, group: Any = None, **kwargs: Any
    ) -> Any:
        """Count what is for other ranks."""
        own = splits[dist.get_rank(group)] * tensor.element_size()
        self.num_bytes += tensor.nbytes - own
        return self._all_to_all(out, tensor, counts, splits, group=group, **kwargs)

    def broadcast(self, tensor: Tensor, root: int, *args: Any, group: Any = None, **kwargs: Any) -> Any:
        """Count what arrives."""
        self.num_bytes += tensor.nbytes if dist.get_rank() != root else 0
        return self._broadcast(tensor, root, *args, group=group, **kwargs)

    def reduce(self, tensor: Tensor, root: int, *args: Any, group: Any = None, **kwargs: Any) -> Any:
        """Count what is sent."""
        self.num_bytes += tensor.nbytes if dist.get_rank() != root else 0
        return self._reduce(tensor, root, *args, group=group, **kwargs)
