"""Norms of rows whose features may lie on several ranks; gradients of gains are summed where tokens differ."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meshweave.algorithms.block.roles import TOKENS, Side
from meshweave.base.errors import UnsupportedError
from meshweave.nn.parallel.moves import GradientSum, Mover, PlacedMove, terms
from meshweave.nn.parallel.parameters import ParameterLayout, local_parts
from meshweave.nn.parallel.strategy import LayerStrategy


class ParallelNorm(nn.Module):  # type: ignore[misc]
    """A layer norm or root-mean-square norm over the features of the residual.

    Where the strategy splits features, ranks sum statistics of rows, forward and backward. Half-precision rows are
    computed in single precision.

    Args:
        norm: an `nn.LayerNorm`, an `nn.RMSNorm`, or a norm that computes what that does with a `weight` and an
            epsilon, which is tried where it has memory. It stays as it is.

    Raises:
        UnsupportedError: it is no such norm.
    """

    def __init__(self, norm: nn.Module, strategy: LayerStrategy, name: str) -> None:
        super().__init__()
        self.layer_strategy = strategy
        self.is_layer_norm, self.eps = _kind(norm, name)
        whole = norm.weight
        self.features = int(whole.shape[-1])
        roles, side = strategy.roles, Side("hidden", self.features)
        layout = ParameterLayout((side,), roles.gain)
        self.weight = layout.distribute(name, whole, strategy)
        self.layouts = {"weight": layout}
        bias = getattr(norm, "bias", None)
        self.bias: nn.Parameter | None = None
        if bias is not None:
            self.bias = layout.distribute(name, bias, strategy)
            self.layouts["bias"] = layout
        rows = 1 if bias is None else 2
        summed = terms(roles.residual, TOKENS)
        self.sum_gains = GradientSum(
            PlacedMove(strategy, (Side("", rows), side), summed, roles.gain, has_tokens=False)
        )
        statistics = Side("", 2 if self.is_layer_norm else 1)
        partial = terms(roles.residual, ("hidden",))
        self.has_whole_rows = partial == roles.statistics
        sums = PlacedMove(strategy, (statistics,), partial, roles.statistics)
        self.sum_rows = Mover(sums, sums)

    def forward(self, x: Tensor, batch: int, sequence: int) -> Tensor:
        """Return this rank's part of the normalised rows (batch, sequence, features)."""
        given = [self.weight] if self.bias is None else [self.weight, self.bias]
        gain, *rest = self.sum_gains(local_parts(given))
        bias = rest[0] if rest else None
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        if self.has_whole_rows:
            shape = (self.features,)
            if self.is_layer_norm:
                return nn.functional.layer_norm(
                    wide, shape, gain.to(wide.dtype), _as(bias, wide), self.eps
                ).to(x.dtype)
            return nn.functional.rms_norm(wide, shape, gain.to(wide.dtype), self.eps).to(x.dtype)
        return self._normalised(wide, gain, bias, batch, sequence).to(x.dtype)

    def _normalised(self, x: Tensor, gain: Tensor, bias: Tensor | None, batch: int, sequence: int) -> Tensor:
        squares = x.square().sum(-1, keepdim=True)
        if not self.is_layer_norm:
            mean_square = self.sum_rows(squares, batch, sequence) / self.features
            return x * torch.rsqrt(mean_square + self.eps) * gain
        sums = (
            self.sum_rows(torch.cat((x.sum(-1, keepdim=True), squares), -1), batch, sequence) / self.features
        )
        mean, mean_square = sums[..., :1], sums[..., 1:]
        centred = (x - mean) * torch.rsqrt(mean_square - mean * mean + self.eps) * gain
        return centred if bias is None else centred + bias

    def extra_repr(self) -> str:
        """Return the kind and sizes for printing."""
        return f"{'layer' if self.is_layer_norm else 'rms'}, {self.features}, eps={self.eps}"


def _as(bias: Tensor | None, like: Tensor) -> Tensor | None:
    return None if bias is None else bias.to(like.dtype)


def _kind(norm: nn.Module, name: str) -> tuple[bool, float]:
    """Return whether a module is a layer norm, else a root-mean-square norm, and its epsilon."""
    weight = getattr(norm, "weight", None)
    if weight is None or weight.ndim != 1:
        raise UnsupportedError(f"{name}: {type(norm).__name__} is no norm with a weight (features,)")
    eps: Any = getattr(norm, "eps", getattr(norm, "variance_epsilon", None))
    if eps is None and not isinstance(norm, nn.RMSNorm):
        raise UnsupportedError(
            f"{name}: {type(norm).__name__} has no eps; give an nn.LayerNorm or nn.RMSNorm"
        )
    is_layer_norm = isinstance(norm, nn.LayerNorm) or getattr(norm, "bias", None) is not None
    eps = float(eps) if eps is not None else float(torch.finfo(weight.dtype).eps)
    if weight.device.type != "meta":
        _try(norm, is_layer_norm, eps, name)
    return is_layer_norm, eps


def _try(norm: nn.Module, is_layer_norm: bool, eps: float, name: str) -> None:
    """Raise UnsupportedError where a norm does not compute what it is taken for."""
    weight = norm.weight.detach()
    rows = torch.linspace(-1, 1, 3 * weight.numel(), dtype=weight.dtype, device=weight.device).view(3, -1)
    rows = rows * rows + rows
    shape = (weight.numel(),)
    with torch.no_grad():
        if is_layer_norm:
            expected = nn.functional.layer_norm(rows, shape, weight, getattr(norm, "bias", None), eps)
        else:
            expected = nn.functional.rms_norm(rows, shape, weight, eps)
        is_same = torch.allclose(norm(rows).float(), expected.float(), rtol=3e-2, atol=1e-3)
    if not is_same:
        kind = "layer norm" if is_layer_norm else "root-mean-square norm"
        raise UnsupportedError(
            f"{name}: {type(norm).__name__} computes something else than a {kind} with its weight"
        )
