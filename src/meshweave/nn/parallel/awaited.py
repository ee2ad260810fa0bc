"""A loss whose value is on its way: gradients are computed without it, and whoever looks at it waits.

The mean loss of ranks that have tokens of their own is a sum over ranks. Its gradient on a rank is known without
the sum, so that a wait between the forward and the backward pass would only let ranks idle for the slowest one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from meshweave.execute.torch import compat


class AwaitedTensor(Tensor):  # type: ignore[misc]
    """A tensor () whose value arrives later.

    It is a tensor like others: every function of torch waits for the value first, and returns plain tensors. Those
    that need no value, as `backward` does, do not wait.
    """

    _arrive: Callable[[], None] | None

    @classmethod
    def __torch_function__(
        cls,
        function: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return what a function of torch returns, once the values are there that it needs."""
        named = kwargs or {}
        if function not in _WITHOUT_VALUES:
            args, named = _arrived(args), _arrived(named)
        with compat.plain_functions():
            return function(*args, **named)


_WITHOUT_VALUES = {
    Tensor.backward,
    torch.autograd.backward,
    torch.autograd.grad,
    Tensor.register_hook,
    Tensor.retain_grad,
    Tensor.requires_grad_,
    Tensor.numel,
    Tensor.dim,
    Tensor.size,
    Tensor.is_floating_point,
    Tensor.is_complex,
    torch.ones_like,
    *(
        getattr(Tensor, name).__get__
        for name in (
            "dtype",
            "device",
            "layout",
            "shape",
            "ndim",
            "grad",
            "requires_grad",
            "grad_fn",
            "is_leaf",
        )
    ),
}
"""What is asked of a tensor before a backward pass, or changes its place in the graph of autograd."""


def awaited_mean(term: Tensor, count: Tensor | float, total: Callable[[], float]) -> Tensor:
    """Return the sum of the terms () of all ranks divided by a number, differentiable in this rank's term.

    Args:
        total: waits for the sum, and returns it.
    """
    mean: Tensor = _Mean.apply(term, count)
    memory, dtype = mean.data, term.dtype  # writing it later is no change that autograd knows of

    def arrive() -> None:
        memory.copy_(torch.tensor(total(), dtype=dtype, device=memory.device) / count)

    if not mean.requires_grad:
        arrive()
        return mean
    awaited = mean.as_subclass(AwaitedTensor)
    awaited._arrive = arrive
    return awaited


def _arrived(value: Any) -> Any:
    """Return arguments of a function with plain tensors for those that were on their way."""
    if isinstance(value, AwaitedTensor):
        arrive = value.__dict__.get("_arrive")
        if arrive is not None:
            arrive()
            value._arrive = None
        with compat.plain_functions():
            return value.as_subclass(Tensor)
    if type(value) in (tuple, list):
        return type(value)(map(_arrived, value))
    return {name: _arrived(each) for name, each in value.items()} if type(value) is dict else value


class _Mean(torch.autograd.Function):  # type: ignore[misc]
    """A sum of terms over ranks divided by a number: memory for it, and the gradient of this rank's term."""

    @staticmethod
    def forward(ctx: Any, term: Tensor, count: Tensor | float) -> Tensor:
        """Return memory for the value."""
        ctx.count = count
        return torch.empty_like(term)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the term."""
        return grads[0] / ctx.count, None
