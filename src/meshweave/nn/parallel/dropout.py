"""Dropout of what a rank has: other masks for other parts of a tensor, equal ones for copies of a part.

All ranks draw one number from torch's default generator, which `parallelize` seeds alike on them. The mask follows
from that number and from which part of the tensor the rank has. So ranks stay in step whatever their parts, and a
block that is computed again under activation checkpointing, which restores the generator, draws the same mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshweave.algorithms.block.roles import AxisDims
from meshweave.nn.parallel.strategy import LayerStrategy


@torch.library.custom_op(  # type: ignore[untyped-decorator]
    "meshweave::block_dropout", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def block_dropout(x: Tensor, p: float, part: int) -> list[Tensor]:
    """Return [x times the factors, the factors]: each factor is 0 with probability `p`, else 1 / (1 - p).

    `part` is the number of the shard that x is, as `ShardDropout.part`: ranks with the same one drop the same
    elements. Ranks must have torch's default generator in the same state.
    """
    seed = int(torch.randint(0, 1 << 40, ()).item())
    generator = torch.Generator(device=x.device).manual_seed(seed * 4096 + part)
    kept = torch.rand(x.shape, generator=generator, device=x.device) >= p
    factors = kept.to(x.dtype).div_(1 - p) if p < 1 else torch.zeros_like(x)
    return [x * factors, factors]


@block_dropout.register_fake  # type: ignore[untyped-decorator]
def _(x: Tensor, p: float, part: int) -> list[Tensor]:
    return [torch.empty_like(x), torch.empty_like(x)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.save_for_backward(output[1])


def _gradient(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    (factors,) = ctx.saved_tensors
    return grads[0] * factors, None, None


block_dropout.register_autograd(_gradient, setup_context=_keep)


class ShardDropout:
    """Dropout of this rank's shard of a tensor.

    Args:
        p: the probability with which elements are dropped.
        strategy: the ranks that share the tensor.
        dims: for each mesh axis the dim of the tensor that it splits, "" where ranks along it have copies.

    Attributes:
        part: the number of this rank's shard, equal on ranks with copies of it.
        is_shared: whether p is above 0 and some ranks have copies of a shard, so that they must draw the same
            mask.
    """

    def __init__(self, p: float, strategy: LayerStrategy, dims: AxisDims) -> None:
        self.p = float(p)
        self.part = 0
        for dim, size, at in zip(dims, strategy.mesh.shape, strategy.coordinates, strict=True):
            self.part = self.part * size + (at if dim else 0)
        has_copies = any(size > 1 and not dim for dim, size in zip(dims, strategy.mesh.shape, strict=True))
        self.is_shared = self.p > 0 and has_copies
        """Whether ranks must draw the same: some have copies of a part."""

    def __call__(self, x: Tensor, training: bool) -> Tensor:
        """Return the tensor with elements dropped, in training."""
        if not training or self.p == 0:
            return x
        dropped: Tensor = block_dropout(x, self.p, self.part)[0]
        return dropped
