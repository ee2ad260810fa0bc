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

from meshweave.execute.torch import compat, compat_gradients


def put_gradients(
    parameters: Sequence[DTensor], grads: Sequence[Tensor | None], edges: Sequence[tuple[Any, int]]
) -> list[Tensor | None]:
    """Set or add to `.grad` of parameters in a backward pass, where autograd would do nothing else.

    Return for each parameter the gradient (a DTensor) that is left to autograd, None where it was put into `.grad`
    or where there is none. Left to autograd are gradients that a hook, a node or `torch.autograd.grad` may read,
    and all on CUDA, where autograd's nodes order streams.

    Args:
        parameters: the DTensors.
        grads: for each the gradient of this rank's shard, which no other code has; None where there is none.
        edges: `next_functions` of the node whose backward part this is: for each parameter (its node, number).
    """
    left: list[Tensor | None] = [None] * len(parameters)
    new: list[tuple[DTensor, DTensor]] = []
    sums: list[DTensor] = []
    added: list[Tensor] = []
    may_put = not torch.is_grad_enabled() and not compat_gradients.is_autograd_compiled()
    only_accumulated = (
        compat_gradients.only_accumulated(parameters, edges) if may_put else [False] * len(parameters)
    )
    for at, (parameter, grad) in enumerate(zip(parameters, grads, strict=True)):
        if grad is None:
            continue
        spec, before = compat.spec_of(parameter), parameter.grad
        puts = (
            only_accumulated[at] and grad.is_cpu and grad.dtype == compat_gradients.gradient_dtype(parameter)
        )
        if puts and before is None:
            new.append((parameter, compat.from_spec(with_strides_of(parameter, grad), spec)))
        elif puts and isinstance(before, DTensor) and compat.spec_of(before) == spec:
            sums.append(before)
            added.append(grad)
        else:
            left[at] = compat.from_spec(with_strides_of(parameter, grad), spec)
    for parameter, gradient in new:
        parameter.grad = gradient
    if sums:
        compat.add_each(compat.local_tensors(sums), added)
        torch.autograd.graph.increment_version(sums)
    return left


def with_strides_of(parameter: DTensor, grad: Tensor) -> Tensor:
    """Return `grad`, that of this rank's shard, with the strides of the shard, copied if it has others.

    Autograd does so for plain parameters. Fused optimizers assume equal strides, and do not check them.
    """
    strides = compat.local_tensor(parameter).stride()
    if grad.stride() == strides or not grad.numel():
        return grad
    return torch.empty_strided(grad.shape, strides, dtype=grad.dtype, device=grad.device).copy_(grad)
