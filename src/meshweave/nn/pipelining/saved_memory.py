"""Counts the bytes that stages keep between their parts: what autograd saves, what arrived, what was made.

A storage counts once, however many tensors share it, and not at all where it belongs to the module's
parameters or buffers, or to the batch. Of a DTensor it is that of this rank's part. A saved tensor counts until
the autograd node that saved it is freed.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshweave.execute.torch import compat
from meshweave.execute.torch.compat_pipelining import storage_key


@dataclass(frozen=True)
class PipelineMemory:
    """Activation memory of this rank: the most bytes that its stages keep at once between their parts.

    Attributes:
        predicted_bytes: from lifetimes in the program and the profiles of stages; a stage whose `outputs` were
            given counts 0, since it is not profiled.
        counted_bytes: those of the last step; None unless `count_memory` was given.
    """

    predicted_bytes: int
    counted_bytes: int | None


class SavedMemory:
    """The bytes of storages that stages of this process keep between their parts (forward and backward passes).

    Attributes:
        bytes: those kept now.
        peak_bytes: the most that any `count` saw since the last `reset_peak`: stages count after each of their
            parts.
    """

    def __init__(self) -> None:
        self.bytes = self.peak_bytes = 0
        self._uses: Counter[int] = Counter()
        self._excluded: set[int] = set()
        self._of_batch: set[int] = set()

    def exclude(self, module: nn.Module) -> None:
        """Leave the parameters and buffers of a module out of the count from now on."""
        self._excluded.update(key for key, _ in _storages((*module.parameters(), *module.buffers())))

    def exclude_batch(self, tensors: Iterable[Tensor]) -> None:
        """Leave out of the count the caller's tensors for this step, and no longer those of earlier steps."""
        self._of_batch = {key for key, _ in _storages(tensors)}

    def reset_peak(self) -> None:
        """Set `peak_bytes` to the bytes kept now."""
        self.peak_bytes = self.bytes

    def count(self) -> None:
        """Set `peak_bytes` to `bytes` if that is more."""
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    def hooks(self) -> Any:
        """Return a context manager that counts what autograd saves in its block, for as long as it is saved."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def keep(self, tensors: Iterable[Tensor]) -> KeptTensors:
        """Count the bytes of tensors as kept until `release` of the result is called."""
        return KeptTensors(self, tensors)

    def _pack(self, tensor: Tensor) -> _SavedTensor:
        saved = _SavedTensor(tensor.detach())  # with its graph it would keep the node that keeps it
        ((key, size),) = _storages([tensor])
        if self.counts(key):
            self.add(key, size)
            weakref.finalize(saved, self.drop, key, size).atexit = False
        return saved

    def add(self, key: int, num_bytes: int) -> None:
        """Note one more use of the storage `key` (`storage_key`) of `num_bytes`; the first adds to `bytes`."""
        self._uses[key] += 1
        if self._uses[key] == 1:
            self.bytes += num_bytes

    def drop(self, key: int, num_bytes: int) -> None:
        """Note one use less of the storage `key` of `num_bytes`; the last one takes them off `bytes`."""
        self._uses[key] -= 1
        if not self._uses[key]:
            del self._uses[key]
            self.bytes -= num_bytes

    def counts(self, key: int) -> bool:
        """Return whether the storage `key` is counted: it belongs to no excluded module, and not to the batch."""
        return key not in self._excluded and key not in self._of_batch


class KeptTensors:
    """Tensors that count as kept until they are released."""

    def __init__(self, memory: SavedMemory, tensors: Iterable[Tensor]) -> None:
        self._memory = memory
        self._uses = [use for use in _storages(tensors) if memory.counts(use[0])]
        for use in self._uses:
            memory.add(*use)

    def release(self) -> None:
        """Stop counting these tensors as kept."""
        for use in self._uses:
            self._memory.drop(*use)
        self._uses = []


class _SavedTensor:
    """What autograd holds in place of a tensor that it saves."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _storages(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Return (`storage_key`, bytes) of the storage of each tensor, of a DTensor that of this rank's part."""
    return [(storage_key(one), one.untyped_storage().nbytes()) for one in compat.local_tensors(tensors)]


def _unpack(saved: _SavedTensor) -> Tensor:
    return saved.tensor
