"""Counts the bytes that stages keep between their parts: what autograd saves, what arrived, what was made.

A storage counts once, however many tensors share it, and not at all where it belongs to parameters or buffers of the
module. A saved tensor counts until the autograd node that saved it is freed.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from meshweave.execute.torch.compat_pipelining import storage_key


class SavedMemory:
    """The storages that stages of one process keep.

    Attributes:
        bytes: what is kept now.
        peak_bytes: the most that any `count` saw since the last `reset_peak`: stages count after each of their parts.
    """

    def __init__(self) -> None:
        self.bytes = self.peak_bytes = 0
        self._uses: Counter[int] = Counter()
        self._excluded: set[int] = set()

    def exclude(self, module: nn.Module) -> None:
        """Count no parameter and no buffer of a module."""
        for tensor in (*module.parameters(), *module.buffers()):
            self._excluded.add(storage_key(tensor))

    def reset_peak(self) -> None:
        """Count the most from now on."""
        self.peak_bytes = self.bytes

    def count(self) -> None:
        """Note what is kept now."""
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    def hooks(self) -> Any:
        """Return a context in which everything that autograd saves is counted for as long as it is saved."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def keep(self, tensors: Iterable[Tensor]) -> KeptTensors:
        """Count tensors until the result is released."""
        return KeptTensors(self, tensors)

    def _pack(self, tensor: Tensor) -> _SavedTensor:
        saved = _SavedTensor(tensor)
        key, size = storage_key(tensor), tensor.untyped_storage().nbytes()
        if key not in self._excluded:
            self.add(key, size)
            weakref.finalize(saved, self.drop, key, size).atexit = False
        return saved

    def add(self, key: int, num_bytes: int) -> None:
        """Count one use of a storage."""
        self._uses[key] += 1
        if self._uses[key] == 1:
            self.bytes += num_bytes

    def drop(self, key: int, num_bytes: int) -> None:
        """Count one use of a storage less."""
        self._uses[key] -= 1
        if not self._uses[key]:
            del self._uses[key]
            self.bytes -= num_bytes

    def counts(self, tensor: Tensor) -> bool:
        """Return whether the storage of a tensor belongs to no module."""
        return storage_key(tensor) not in self._excluded


class KeptTensors:
    """Tensors that count as kept until they are released."""

    def __init__(self, memory: SavedMemory, tensors: Iterable[Tensor]) -> None:
        self._memory = memory
        self._uses = [
            (storage_key(tensor), tensor.untyped_storage().nbytes())
            for tensor in tensors
            if memory.counts(tensor)
        ]
        for use in self._uses:
            memory.add(*use)

    def release(self) -> None:
        """Count them no more."""
        for use in self._uses:
            self._memory.drop(*use)
        self._uses = []


class _SavedTensor:
    """What autograd holds in place of a tensor that it saves."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _unpack(saved: _SavedTensor) -> Tensor:
    return saved.tensor
