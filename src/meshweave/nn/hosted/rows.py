"""Rows of tokens that go to other ranks, and their gradients back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshweave.nn.parallel.moves import PlacedMove


class MovedRows(torch.autograd.Function):  # type: ignore[misc]
    """A move of rows (batch, sequence, features) to other ranks, and another one of their gradients back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, there: PlacedMove, back: PlacedMove, batch: int, sequence: int
    ) -> Tensor:
        """Return this rank's shard of the rows after move `there`; x is its shard before. Collective.

        `batch` and `sequence` are global: the number of sequences, and the tokens of each.
        """
        ctx.back, ctx.sizes = back, (batch, sequence)
        return _run(x, there, batch, sequence)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the rows, moved by `back`, and None for the other arguments."""
        return _run(grads[0], ctx.back, *ctx.sizes), None, None, None, None


def _run(x: Tensor, move: PlacedMove, batch: int, sequence: int) -> Tensor:
    if not move.is_needed:
        return x.view_as(x)
    return move.sized(batch, sequence, x.dtype).run(x.contiguous())
