"""Norms of rows whose features may lie on several ranks; gradients of gains are summed where tokens differ."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshweave.algorithms.block.roles import TOKENS, AxisDims, Side
from meshweave.base.errors import UnsupportedError
from meshweave.nn.parallel.buckets import KeptParameter
from meshweave.nn.parallel.moves import Mover, PlacedMove, terms
from meshweave.nn.parallel.parameters import ParameterLayout
from meshweave.nn.parallel.strategy import LayerStrategy
from meshweave.nn.parallel.uses import ParameterUse, entries_of


class NormKind(NamedTuple):
    """What a norm computes.

    Attributes:
        is_layer_norm: whether it subtracts the mean of each row; else it is a root-mean-square norm.
        eps: what is added to the variance or mean square.
        offset: what is added to the weight before rows are multiplied by it.
    """

    is_layer_norm: bool
    eps: float
    offset: float = 0.0


EPSILON = ("eps", "variance_epsilon", "epsilon", "norm_eps")
"""What norms call their epsilon."""


def be_instance_of(made: nn.Module, replaced: nn.Module) -> None:
    """Make `made` an instance also of the class of `replaced`, which it replaces; its own methods come first.

    Code that groups parameters, such as those without weight decay, asks modules for their class.
    """
    made.__class__ = type(type(made).__name__, (type(made), type(replaced)), {})


class ParallelNorm(nn.Module):  # type: ignore[misc]
    """A layer norm or root-mean-square norm over the features of the residual, or of others that ranks share.

    Where the strategy splits features, ranks sum statistics of rows, forward and backward. Half-precision rows are
    computed in single precision. Those of a layer norm are summed in double precision: a variance is off by some
    2**-53 of the squared mean at most, and never negative.

    Args:
        norm: an `nn.LayerNorm`, an `nn.RMSNorm`, or a norm that computes what that does with an epsilon and its
            `weight`, which is tried where it has memory. It stays as it is.
        name: that of the norm, for errors.
        dims: for each mesh axis the dim that it splits of what the norm is given; None for that of the residual.
        side: the dim of the features; None for that of the residual.
        kind: what it computes, where that was tried before; None to try it.

    Raises:
        UnsupportedError: it is no such norm.
        LayoutError: ranks cannot share its weight evenly.
    """

    def __init__(
        self,
        norm: nn.Module,
        strategy: LayerStrategy,
        name: str,
        dims: AxisDims | None = None,
        side: Side | None = None,
        kind: NormKind | None = None,
    ) -> None:
        super().__init__()
        self._class, self._code = type(norm), type(norm).forward
        self.layer_strategy, self.dims = strategy, strategy.roles.residual if dims is None else dims
        self.is_layer_norm, self.eps, self.offset = kind or _kind(norm, name)
        side = side or Side("hidden", int(norm.weight.shape[-1]))
        self.features = side.size
        gain: AxisDims = tuple(dim if dim == side.dim else "" for dim in self.dims)
        layout = ParameterLayout((side,), gain)
        self.layouts = {}
        for key in ("weight", "bias"):
            whole = getattr(norm, key, None)
            setattr(self, key, None if whole is None else layout.distribute(name, whole, strategy))
            if whole is not None:
                self.layouts[key] = layout
        kept = KeptParameter(strategy, layout, gain, terms(self.dims, TOKENS))
        self.kept: dict[str, KeptParameter] = dict.fromkeys(self.layouts, kept)
        self.opened: dict[str, Tensor] = {}
        self._use = ParameterUse([entries_of([self])])
        statistics = Side("", 2 if self.is_layer_norm else 1)
        partial = terms(self.dims, (side.dim,))
        apart: AxisDims = tuple(dim if dim in TOKENS else "" for dim in self.dims)
        self.has_whole_rows = partial == apart
        sums = PlacedMove(strategy, (statistics,), partial, apart)
        self.sum_rows = Mover(sums, sums)
        be_instance_of(self, norm)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; `eps` is set by each of the names that norms have for it."""
        super().__setattr__("eps" if name in EPSILON else name, value)

    def _gains(self) -> tuple[Tensor | None, Tensor | None]:
        """Return what rows are multiplied by, and what is added."""
        values = dict(zip(self.layouts, self._use(), strict=True))
        gain = values.get("weight")
        return gain + self.offset if gain is not None and self.offset else gain, values.get("bias")

    def forward(self, x: Tensor, batch: int, sequence: int) -> Tensor:
        """Return this rank's part of the rows, normalised, in the shape and dtype of `x`.

        Collective if ranks split features.

        Args:
            x: this rank's part of (batch, sequence, features), each dim split as `dims` says.
            batch, sequence: global sizes: the number of sequences, and the tokens of each.

        Raises:
            UnsupportedError: the forward of the class that it stands for was replaced.
        """
        if self._class.forward is not self._code:
            raise UnsupportedError(
                f"{self._class.__name__}.forward was replaced after parallelize, and is not computed: do it before"
            )
        gain, bias = self._gains()
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        if self.has_whole_rows:
            shape = (self.features,)
            if self.is_layer_norm:
                return nn.functional.layer_norm(wide, shape, _as(gain, wide), _as(bias, wide), self.eps).to(
                    x.dtype
                )
            return nn.functional.rms_norm(wide, shape, _as(gain, wide), self.eps).to(x.dtype)
        return self._normalised(wide, gain, bias, batch, sequence).to(x.dtype)

    def _normalised(
        self, x: Tensor, gain: Tensor | None, bias: Tensor | None, batch: int, sequence: int
    ) -> Tensor:
        factor = 1.0 if gain is None else gain
        if not self.is_layer_norm:
            squares = x.square().sum(-1, keepdim=True)
            mean_square = self.sum_rows(squares, batch, sequence) / self.features
            return x * torch.rsqrt(mean_square + self.eps) * factor
        if x.shape[-1]:
            variance, mean = (each.double() for each in torch.var_mean(x, -1, correction=0, keepdim=True))
            own = torch.cat((mean, variance + mean * mean), -1) * x.shape[-1]
        else:  # a rank without features has 0 to add, and gradients to move as others do
            own = x.double().sum(-1, keepdim=True).expand(*x.shape[:-1], 2)
        sums = self.sum_rows(own, batch, sequence) / self.features
        mean, mean_square = sums[..., :1], sums[..., 1:]
        scale = torch.rsqrt((mean_square - mean * mean).clamp_min(0.0) + self.eps)
        centred = (x - mean.to(x.dtype)) * scale.to(x.dtype) * factor
        return centred if bias is None else centred + bias

    def extra_repr(self) -> str:
        """Return the kind of norm, the global number of features and epsilon, as text for printing."""
        return f"{'layer' if self.is_layer_norm else 'rms'}, {self.features}, eps={self.eps}"


def _as(gain: Tensor | None, like: Tensor) -> Tensor | None:
    return None if gain is None else gain.to(like.dtype)


def _kind(norm: nn.Module, name: str) -> NormKind:
    """Return what a norm with a weight computes, tried where it has memory."""
    weight = getattr(norm, "weight", None)
    if weight is None or weight.ndim != 1:
        raise UnsupportedError(f"{name}: {type(norm).__name__} is no norm with a weight (features,)")
    eps: Any = next((own for each in EPSILON if (own := getattr(norm, each, None)) is not None), None)
    if eps is None and not isinstance(norm, nn.RMSNorm):
        raise UnsupportedError(
            f"{name}: {type(norm).__name__} has no eps; give an nn.LayerNorm or nn.RMSNorm"
        )
    is_layer_norm = isinstance(norm, nn.LayerNorm) or getattr(norm, "bias", None) is not None
    # torch computes in single precision or wider, and takes the epsilon of that.
    wide = torch.promote_types(weight.dtype, torch.float32)
    eps = float(eps) if eps is not None else float(torch.finfo(wide).eps)
    if weight.device.type != "meta":
        _try(norm, is_layer_norm, eps, name)
    return NormKind(is_layer_norm, eps)


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
