"""Gradients that are put where the last nodes of autograd would put them.

`AccumulateGrad` detaches each gradient, or adds it to what is there. For a DTensor either goes through the
dispatch of DTensors, which takes ten times as long as for plain tensors. Where a node would do nothing else, its
gradient is put directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshweave.execute.torch import compat


def put_gradients(
    parameters: Sequence[DTensor], grads: Sequence[Tensor | None], nodes: Sequence[Any]
) -> list[Tensor | None]:
    """Give parameters their gradients in a backward pass; return those that are left to autograd, else None.

    They are left where somebody else is told, by hooks or `torch.autograd.grad`, and on CUDA, where autograd's
    nodes order streams.

    Args:
        grads: those of this rank's parts; None where there is none. They belong to nobody else.
        nodes: the last nodes of the parameters, which give them their gradients; None where one has none.
    """
    left: list[Tensor | None] = [None] * len(parameters)
    sums: list[Tensor] = []
    added: list[Tensor] = []
    is_plain = not torch.is_grad_enabled()
    for at, (parameter, grad, node) in enumerate(zip(parameters, grads, nodes, strict=True)):
        if grad is None:
            continue
        spec, before = compat.spec_of(parameter), parameter.grad
        puts = is_plain and grad.is_cpu and compat.is_only_accumulated(parameter, node)
        if puts and before is None:
            parameter.grad = compat.from_spec(grad, spec)
        elif puts and isinstance(before, DTensor) and compat.spec_of(before) == spec:
            sums.append(compat.local_tensor(before))
            added.append(grad)
        else:
            left[at] = compat.from_spec(grad, spec)
    compat.add_each(sums, added)
    return left
