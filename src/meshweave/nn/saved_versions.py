"""Changes in place of DTensors that a graph has saved, seen as autograd sees those of plain tensors.

Autograd counts changes of the tensor that it has saved. An op on a DTensor counts on the DTensor alone, one on its
`to_local()` on this rank's part alone, and a product reads the part.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch.distributed.tensor import DTensor

from meshweave.execute.torch import compat


class SavedVersions:
    """How often DTensors had been changed in place when a graph saved them, or parts of them.

    It keeps none of them: who has none left changes none. Of a view it is the base that counts.

    Args:
        operands: what is saved; None for what no gradient needs. Nothing is noted of what is only traced.
    """

    def __init__(self, operands: Sequence[DTensor | None]) -> None:
        bases = [one._base if isinstance(one._base, DTensor) else one for one in operands if one is not None]
        if any(compat.is_traced(compat.local_tensor(one)) for one in bases):
            bases = []
        self._saved = [(weakref.ref(one), _version(one)) for one in bases]

    def check(self) -> None:
        """Raise RuntimeError, as autograd does, where one of the DTensors was changed in place since then."""
        for reference, version in self._saved:
            operand = reference()
            if operand is not None and _version(operand) != version:
                raise RuntimeError(
                    f"a DTensor {tuple(operand.shape)} that is needed for gradients was modified by an inplace "
                    "operation: run the backward pass before it changes, or compute with a copy"
                )


def _version(tensor: DTensor) -> tuple[int, int] | None:
    local = compat.local_tensor(tensor)
    if tensor.is_inference() or local.is_inference():  # which autograd refuses to save
        return None
    return tensor._version, local._version
