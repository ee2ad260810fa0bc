"""A torch op that moves a tensor from one layout to another, and its gradient by another move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshweave.algorithms.block.roles import AxisDims, Sides
from meshweave.algorithms.block.sites import MoveSite
from meshweave.execute.torch import compat
from meshweave.nn.custom_ops import number_of, refuse_second_derivative, value_of
from meshweave.nn.parallel.programs import SizedMove, sized_move
from meshweave.nn.parallel.strategy import LayerStrategy

OF_SHARED_LAYERS = "a layer that ranks share"
"""What is differentiable once, in the words of a refusal."""


def keep_order(op: Any) -> None:
    """Make a compiler that traces `op` keep the order of its calls, which must be the same on all ranks.

    Fake kernels of the op call it.

    Args:
        op: of `torch.ops`, such as `torch.ops.meshweave.block_move`.
    """
    compat.keep_in_inductor(op.default)


@dataclass(frozen=True)
class PlacedMove:
    """A move of tensors between two layouts on the ranks of a strategy, for any number of tokens.

    Attributes:
        strategy: the strategy on its ranks.
        sides: the dims of the tensor, those after batch and sequence where it `has_tokens`.
        before, after: for each mesh axis the dim that it splits before and after the move, "" for none; `before`
            may be "partial" along some axes.
        has_tokens: whether its first two dims are batch and sequence, whose sizes `sized` gives.
        op: how partial values are combined: "sum" or "max".
    """

    strategy: LayerStrategy
    sides: Sides
    before: AxisDims
    after: AxisDims
    has_tokens: bool = True
    op: str = "sum"

    @property
    def is_needed(self) -> bool:
        """Return whether the layouts before and after differ."""
        return self.before != self.after

    def sized(self, batch: int, sequence: int, dtype: torch.dtype) -> SizedMove:
        """Return the program of this move for a tensor of the given sizes.

        `batch` sequences of `sequence` tokens are global numbers; without `has_tokens` both are ignored.
        """
        tokens = self.strategy.tokens(batch, sequence) if self.has_tokens else ()
        site = MoveSite((*tokens, *self.sides), self.before, self.after, self.op)
        return sized_move(site, self.strategy, dtype)


@torch.library.custom_op("meshweave::block_move", mutates_args=())  # type: ignore[untyped-decorator]
def block_move(x: Tensor, number: int, reverse: int, batch: int, sequence: int) -> Tensor:
    """Return this rank's shard of a tensor after a move. Collective.

    Args:
        x: this rank's shard of the tensor before the move.
        number: what `number_of` returns for the move, a `PlacedMove`; -1 where only the gradient is moved.
        reverse: what `number_of` returns for the move of the gradient; -1 where the gradient is not moved.
        batch, sequence: global sizes: the number of sequences, and the tokens of each.
    """
    return _run(x, number, batch, sequence) if number >= 0 else x.clone()


@block_move.register_fake  # type: ignore[untyped-decorator]
def _(x: Tensor, number: int, reverse: int, batch: int, sequence: int) -> Tensor:
    keep_order(torch.ops.meshweave.block_move)
    if number < 0:
        return x.clone()
    return x.new_empty(value_of(number, PlacedMove).sized(int(batch), int(sequence), x.dtype).shape)


def _keep_move(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, _, ctx.reverse, *ctx.sizes = inputs


def _move_gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    if ctx.reverse >= 0:
        grad = block_move(grad, ctx.reverse, -1, *ctx.sizes)
    return grad, None, None, None, None


block_move.register_autograd(_move_gradient, setup_context=_keep_move)
compat.keep_in_order(torch.ops.meshweave.block_move.default)


def _moved(x: Tensor, number: int, batch: int, sequence: int) -> Tensor:
    """Return this rank's part after a move, without a gradient."""
    if torch.compiler.is_compiling():
        out: Tensor = block_move(x, number, -1, batch, sequence)
        return out
    return _run(x, number, batch, sequence)


def _run(x: Tensor, number: int, batch: int, sequence: int) -> Tensor:
    return value_of(number, PlacedMove).sized(batch, sequence, x.dtype).run(x.contiguous())


class _EagerMove(torch.autograd.Function):  # type: ignore[misc]
    """`block_move` outside of a compiler."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, number: int, reverse: int, batch: int, sequence: int) -> Tensor:
        """Return the result, and keep what gradients need."""
        ctx.reverse, ctx.sizes = reverse, (batch, sequence)
        return _run(x, number, batch, sequence) if number >= 0 else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the arguments; None for what has none."""
        refuse_second_derivative(OF_SHARED_LAYERS)
        (grad,) = grads
        if ctx.reverse >= 0:
            grad = _moved(grad, ctx.reverse, *ctx.sizes)
        return grad, None, None, None, None


class _MovedGradients(torch.autograd.Function):  # type: ignore[misc]
    """Tensors as they are, whose gradients are moved together."""

    @staticmethod
    def forward(ctx: Any, number: int, shape: tuple[int, ...], *values: Tensor) -> tuple[Tensor, ...]:
        """Return the result, and keep what gradients need."""
        ctx.number, ctx.shape = number, shape
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the arguments; None for what has none."""
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        moved = _moved(flat.view(ctx.shape), ctx.number, 1, 1).view(-1)
        parts = moved.split([grad.numel() for grad in grads])
        return (None, None, *(part.view(grad.shape) for part, grad in zip(parts, grads, strict=True)))


class Mover:
    """A move of activations in the forward pass, and one of their gradients in the backward pass.

    Args:
        there: the move of the activations.
        back: the move of the gradient; None where the gradient stays as it arrives. Where neither moves anything,
            calls return their argument.
    """

    def __init__(self, there: PlacedMove, back: PlacedMove | None = None) -> None:
        self.number = number_of(there) if there.is_needed else -1
        self.reverse = number_of(back) if back is not None and back.is_needed else -1
        self.is_needed = self.number >= 0 or self.reverse >= 0

    def __call__(self, x: Tensor, batch: int, sequence: int) -> Tensor:
        """Return this rank's part of x after the move. Collective.

        `batch` and `sequence` are the global numbers of sequences and of tokens of each, ignored by a move without
        tokens.
        """
        if not self.is_needed:
            return x
        run = block_move if torch.compiler.is_compiling() else _EagerMove.apply
        moved: Tensor = run(x, self.number, self.reverse, batch, sequence)
        return moved


class GradientSum:
    """A sum over ranks, in the backward pass, of the gradients of parameters that they share, all in one message.

    Args:
        back: the move of the gradients, flattened one after the other in one tensor without tokens.
    """

    def __init__(self, back: PlacedMove) -> None:
        self.number = number_of(back) if back.is_needed else -1
        self.shape = back.strategy.local_shape(back.sides, back.before)

    def __call__(self, values: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return tensors equal to `values`, whose gradients are moved together; `values` if no move is needed."""
        if self.number < 0:
            return values
        moved: tuple[Tensor, ...] = _MovedGradients.apply(self.number, self.shape, *values)
        return moved


def terms(dims: AxisDims, over: tuple[str, ...]) -> AxisDims:
    """Return `dims` with "partial" for each dim in `over`: the layout of the terms of a sum over these.

    So for `over` ("batch",): ("batch", "hidden") -> ("partial", "hidden").

    Args:
        dims: the layout before the sum: for each mesh axis the dim that it divides.
        over: the dims that are summed over.
    """
    return tuple("partial" if dim in over else dim for dim in dims)
