"""Memory that is lent: who owns it learns whether any tensor on it is still alive."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor


class LentMemory:
    """The memory of a tensor on a CPU, lent to other tensors, which tells whether any of them is still alive.

    A loan is a storage of its own on the same memory. It lasts as long as any tensor on that storage: gradients,
    views of them, what a graph has saved.

    Args:
        own: (elements,), without gaps. From now on its storage cannot be resized.
    """

    def __init__(self, own: Tensor) -> None:
        self._dtype, self._bytes = own.dtype, own.view(torch.uint8).numpy()
        self._lent: weakref.ref[object] | None = None

    @property
    def is_free(self) -> bool:
        """Return whether the tensor `lend` returned last and its views are gone; True before any loan."""
        return self._lent is None or self._lent() is None

    def lend(self) -> Tensor:
        """Return a tensor (elements,) on the memory. `is_free` is False until it and all its views are gone.

        Call it only where `is_free`: of several loans only the last is watched.
        """
        view = self._bytes.view()
        self._lent = weakref.ref(view)
        return torch.from_numpy(view).view(self._dtype)
