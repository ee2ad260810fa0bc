"""Changes in place of tensors that a graph needs, seen of DTensors as autograd sees those of plain ones.

Autograd counts changes of the tensor that it has saved. An op on a DTensor counts on the DTensor alone, one on its
`to_local()` on this rank's part alone, and a product reads the part. Optimizers that step on many DTensors by one
kernel, `foreach` or `fused`, count on neither: a hook on the steps of all optimizers counts for them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from meshweave.execute.torch import compat

_hooks: list[Any] = []
"""Torch's handles of what runs with each step, once in a process."""


def _count_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Count the step of an optimizer as a change of its DTensors that have gradients."""
    if not torch.compiler.is_compiling():
        held = [each for group in optimizer.param_groups for each in group["params"]]
        stepped = [each for each in held if isinstance(each, DTensor) and each.grad is not None]
        torch.autograd.graph.increment_version(stepped)


def versions(tensors: Sequence[Tensor]) -> list[int]:
    """Return torch's counts of in-place changes (`_version`): of each tensor, then of each local part.

    The local part of a plain tensor is the tensor itself. A tensor of inference mode, which has no count, gives 0.
    """
    if not _hooks:
        # Both, for the hooks of `parallel.optimizers` take parameters away between the one and the other.
        _hooks.append(register_optimizer_step_pre_hook(_count_step))
        _hooks.append(register_optimizer_step_post_hook(_count_step))
    both = (*tensors, *compat.local_tensors(tensors))
    return [0 if each.is_inference() else each._version for each in both]


def check_versions(
    tensors: Sequence[Tensor], before: Sequence[int], what: str = "a parameter that is needed for gradients"
) -> None:
    """Raise RuntimeError where the tensors were changed in place since `versions(tensors)` returned `before`.

    `what` names the tensors in the error. Changes of the local part of a DTensor, which autograd does not see,
    count.
    """
    if versions(tensors) != before:
        raise RuntimeError(
            f"{what} was modified by an inplace operation: run the backward pass before it changes, as by an "
            "optimizer, or compute with a copy"
        )


class SavedVersions:
    """The counts of in-place changes of DTensors at the time when an autograd graph saved them.

    DTensors are held by weak references: one that nothing else holds can no longer be changed. For a view, its
    base is counted. Nothing is noted for DTensors of a trace.

    Args:
        operands: the DTensors that the graph saves; None stands for an operand that no gradient needs.
    """

    def __init__(self, operands: Sequence[DTensor | None]) -> None:
        bases = [one._base if isinstance(one._base, DTensor) else one for one in operands if one is not None]
        if any(compat.is_traced(compat.local_tensor(one)) for one in bases):
            bases = []
        self._saved = [(weakref.ref(one), versions([one])) for one in bases]

    def check(self) -> None:
        """Raise RuntimeError, as autograd does, where a DTensor was changed in place since this was made."""
        for reference, version in self._saved:
            operand = reference()
            if operand is not None:
                check_versions(
                    [operand], version, f"a DTensor {tuple(operand.shape)} that is needed for gradients"
                )
