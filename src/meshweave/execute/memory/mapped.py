"""Windows of memory that a process maps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from meshweave.base.errors import UnsupportedError, require_known
from meshweave.execute.memory.base import RemoteSlot, Window
from meshweave.execute.torch.views import Action

_COMBINE: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.Tensor.add_,
    "prod": torch.Tensor.mul_,
    "max": lambda into, value: torch.maximum(into, value, out=into),
    "min": lambda into, value: torch.minimum(into, value, out=into),
}


class MappedWindow(Window):
    """A window of memory that this process maps: a piece is a tensor like any other."""

    def get(self, into: Tensor, remote: RemoteSlot, piece: Tensor) -> Action:
        """Return an action that copies `piece` of the slot `remote` into `into`, of equal shape."""
        return partial(into.copy_, piece)

    def put(self, remote: RemoteSlot, piece: Tensor, value: Tensor) -> Action:
        """Return an action that copies `value`, of equal shape, into `piece` of the slot `remote`."""
        return partial(piece.copy_, value)

    def combiner(self, op: str) -> Callable[[Tensor, Tensor], Tensor]:
        """Return a function of (piece, value) that combines `value` into `piece` in place, without a lock.

        Raises UnsupportedError where `op` is not "sum", "prod", "max" or "min".
        """
        require_known(op, _COMBINE, "there is no reduction", UnsupportedError)
        return _COMBINE[op]
