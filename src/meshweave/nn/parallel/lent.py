"""Memory that is lent: who owns it learns whether any tensor on it is still alive."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor


class LentMemory:
    """The memory of a tensor on a CPU, lent as other tensors.

    What is lent is a storage of its own on the same memory. It lives for as long as any tensor on it: gradients,
    views of them, what a graph has saved.

    Args:
        own: (elements,), without gaps. From now on its storage cannot be resized.
    """

    def __init__(self, own: Tensor) -> None:
        self._dtype, self._bytes = own.dtype, own.view(torch.uint8).numpy()
        self._lent: weakref.ref[object] | None = None

    @property
    def is_free(self) -> bool:
        """Return whether the tensor that `lend` returned last is gone with all its views; true before any."""
        return self._lent is None or self._lent() is None

    def lend(self) -> Tensor:
        """Return a tensor (elements,) on the memory, which is not free while that or a view of it is alive.

        To be called only where `is_free`: tensors lent before are no longer watched.
        """
        view = self._bytes.view()
        self._lent = weakref.ref(view)
        return torch.from_numpy(view).view(self._dtype)
