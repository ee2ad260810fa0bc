"""A loss whose value is still being summed: gradients are computed without it, and reading it waits.

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
    """A scalar tensor, of shape (), whose value arrives later from a sum over ranks; until then it holds nan.

    The first torch function that needs the value waits for it, and turns the object into a plain tensor. Functions
    that need no value, such as `backward`, do not wait. Code that ignores tensor subclasses, such as
    `torch.tensor` or a C++ extension, reads nan until the ranks make their next call, which waits as well.
    """

    _arrive: Callable[[], None]

    @classmethod
    def __torch_function__(
        cls,
        function: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch, after waiting for the values that it needs."""
        named = dict(kwargs or {})
        if function in _WITHOUT_VALUES:
            with compat.plain_functions():
                return function(*args, **named)
        if function in _OF_A_ROOT:
            args = tuple(each if at else _unawaited(each) for at, each in enumerate(args))
            named |= {key: _unawaited(named[key]) for key in _ROOTS if key in named}
        _await([args, named])
        return function(*args, **named)


_OF_A_ROOT = {Tensor.backward, torch.autograd.backward, torch.autograd.grad}
"""What computes gradients of its first argument, which is named otherwise in each."""
_ROOTS = ("self", "tensors", "outputs")
_WITHOUT_VALUES = {
    Tensor.register_hook,
    Tensor.retain_grad,
    Tensor.requires_grad_,
    Tensor.is_floating_point,
    Tensor.is_complex,
    torch.ones_like,
    *(
        getattr(Tensor, name).__get__
        for name in (
            "dtype",
            "device",
            "layout",
            "grad",
            "requires_grad",
            "grad_fn",
            "is_leaf",
        )
    ),
}
"""What is asked of a tensor before a backward pass, or changes its place in the graph of autograd.

Its shape is not among them: of a gradient that torch is given it asks nothing else that it needs.
"""


def awaited_mean(
    term: Tensor,
    count: Tensor | float,
    begin: Callable[[Tensor, Callable[[float], object]], Callable[[], None] | None],
) -> Tensor | None:
    """Return the sum over ranks of `term`, divided by `count`; its gradient goes to this rank's term alone.

    The result is an `AwaitedTensor`; where the term needs no gradient it is a plain tensor, after waiting.

    Args:
        term: this rank's term, a tensor ().
        count: the divisor, a number or a tensor of one element.
        begin: called as `begin(term, take)`: begins the sum over ranks, and returns a function that waits until
            `take` has been called with the sum. If it returns None, nothing is summed and the result is None.
    """
    divisor = count.detach().reshape(()).clone() if isinstance(count, Tensor) else count  # read later
    mean: Tensor = _Mean.apply(term, divisor)
    memory = mean.data  # writing it later is no change that autograd knows of

    def take(total: float) -> None:
        memory.fill_(total).div_(divisor)

    wait = begin(term, take)
    if wait is None:
        return None
    if not mean.requires_grad:
        wait()
        return mean
    mean.__class__ = AwaitedTensor
    mean.__dict__["_arrive"] = wait
    return mean


def _await(value: Any) -> None:
    """Wait for the values of the tensors in an argument, which then are plain ones."""
    if isinstance(value, AwaitedTensor):
        if arrive := value.__dict__.get("_arrive"):  # else another thread has waited
            arrive()
        value.__class__ = Tensor
        value.__dict__.pop("_arrive", None)
    elif isinstance(value, dict):
        _await(list(value.values()))
    elif isinstance(value, tuple | list):
        for each in value:
            _await(each)


def _unawaited(value: Any) -> Any:
    """Return roots of a backward pass as plain tensors, without values yet: hooks in it may wait for these."""
    if isinstance(value, AwaitedTensor):
        with torch.enable_grad(), compat.plain_functions():
            return value.as_subclass(Tensor)
    return tuple(map(_unawaited, value)) if isinstance(value, tuple | list) else value


class _Mean(torch.autograd.Function):  # type: ignore[misc]
    """A sum of terms over ranks divided by a number: memory for it, and the gradient of this rank's term."""

    @staticmethod
    def forward(ctx: Any, term: Tensor, count: Tensor | float) -> Tensor:
        """Return memory for the value."""
        ctx.count = count
        return torch.full_like(term, torch.nan)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the term."""
        return grads[0] / ctx.count, None
