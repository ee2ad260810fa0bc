"""Torch ops that run the programs of sites: opaque to `torch.compile`, differentiable, with fake kernels.

Arguments of ops are tensors and numbers, so what an op runs is given by its `number_of`. Weights come as torch has
them, (features out, features in); several that share an operand come as a list, and are one product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from meshweave.algorithms.block.sites import ProductSite
from meshweave.execute.torch import compat
from meshweave.execute.torch.bind import BoundProgram
from meshweave.nn.custom_ops import refuse_second_derivative, value_of
from meshweave.nn.parallel.moves import OF_SHARED_LAYERS, keep_order
from meshweave.nn.parallel.programs import ProductPrograms, sized_product
from meshweave.nn.parallel.strategy import LayerStrategy


@dataclass(frozen=True)
class SiteProduct:
    """One product of a layer on a strategy's ranks; weights that share an operand are multiplied at once.

    Attributes:
        site: which product of the layer it is, with its sizes.
        strategy: the strategy on its ranks.
        widths: for each weight the number of its inner features in one unit, such as a head.
    """

    site: ProductSite
    strategy: LayerStrategy
    widths: tuple[int, ...]

    @cached_property
    def is_interleaved(self) -> bool:
        """Return whether the weights' columns alternate unit by unit, as q0 k0 v0 q1 k1 v1 for heads 0 and 1.

        They do where a mesh axis splits inner features in the product and not after it, or the other way round, so
        that whole units move between ranks. Else all columns of a weight stand together within each rank's shard.
        False for one weight.
        """
        if len(self.widths) == 1:
            return False
        roles, own = self.strategy.roles, self.site
        before = roles.product(own.is_first)
        after = roles.core(own.is_attention)
        return any((x == "inner") != (y == "inner") for x, y in zip(before, after, strict=True))

    def pieces(self, fused: Tensor, dim: int) -> list[Tensor]:
        """Return, for each weight, the view of its part of `fused`.

        If interleaved, `dim` becomes two dims in the views: (..., units, width, ...).

        Args:
            fused: this rank's weights, results or gradients of all weights, one tensor.
            dim: the dim of `fused` along which the weights lie side by side.
        """
        if len(self.widths) == 1:
            return [fused]
        units = fused.shape[dim] // sum(self.widths)
        if self.is_interleaved:
            return list(fused.unflatten(dim, (units, sum(self.widths))).split(self.widths, dim + 1))
        return list(fused.split([units * width for width in self.widths], dim))


@lru_cache(4096)
def _sized(number: int, batch: int, sequence: int, dtype: torch.dtype) -> tuple[SiteProduct, ProductPrograms]:
    product = value_of(number, SiteProduct)
    return product, sized_product(product.site, product.strategy, batch, sequence, dtype)


def _fill(target: Tensor, sources: Sequence[Tensor], product: SiteProduct, dim: int) -> None:
    """Copy parts to where they lie fused along a dim of `target`."""
    for place, source in zip(product.pieces(target, dim), sources, strict=True):
        place.copy_(source.view(place.shape) if source.is_contiguous() else source.reshape(place.shape))


def _parts(fused: Tensor, product: SiteProduct, dim: int, like: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of what lies fused along a dim, in the shapes of `like`."""
    copies = [torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in like]
    for copy, piece in zip(copies, product.pieces(fused, dim), strict=True):
        copy.view(piece.shape).copy_(piece)
    return copies


def _load_weights(bound: BoundProgram, weights: Sequence[Tensor], product: SiteProduct) -> None:
    if "w" in bound.inputs:
        _fill(bound.inputs["w"].t(), weights, product, 0)


# --- products -----------------------------------------------------------------------------------------------


@torch.library.custom_op("meshweave::block_product", mutates_args=())  # type: ignore[untyped-decorator]
def block_product(x: Tensor, weights: list[Tensor], number: int, batch: int, sequence: int) -> list[Tensor]:
    """Return this rank's shards of the products of x with each weight, then what the gradient needs. Collective.

    First come the products (batch, sequence, features out), one for each weight; then copies of the buffers that
    the forward program saves, `kept` of its `ProductPrograms`.

    Args:
        x: this rank's shard (batch, sequence, features in) of the operand.
        weights: this rank's shard (features out, features in) of each weight.
        number: what `number_of` returns for the product, a `SiteProduct`.
        batch, sequence: global sizes: the number of sequences, and the tokens of each.
    """
    return _multiply(x, weights, number, batch, sequence)


def _multiply(x: Tensor, weights: Sequence[Tensor], number: int, batch: int, sequence: int) -> list[Tensor]:
    """Return what `block_product` does."""
    product, sized = _sized(number, batch, sequence, x.dtype)
    if not sized.communicates[0] and not sized.kept:
        return [torch.nn.functional.linear(x, weight) for weight in weights]
    bound = sized.bound(False, x.device)
    target = bound.inputs["x"]
    target.copy_(x.reshape(target.shape))
    _load_weights(bound, weights, product)
    bound.run(bound.inputs)
    fused = bound.outputs["y"].view(sized.result_shape)
    results = [
        torch.empty_like(piece, memory_format=torch.contiguous_format).copy_(piece).flatten(2)
        for piece in product.pieces(fused, 2)
    ]
    return results + [bound.outputs[name].clone() for name in sized.kept]


@block_product.register_fake  # type: ignore[untyped-decorator]
def _(x: Tensor, weights: list[Tensor], number: int, batch: int, sequence: int) -> list[Tensor]:
    keep_order(torch.ops.meshweave.block_product)
    product, sized = _sized(number, int(batch), int(sequence), x.dtype)
    *tokens, features = sized.result_shape
    units = features // sum(product.widths)
    results = [x.new_empty((*tokens, units * width)) for width in product.widths]
    return results + [x.new_empty(shape) for shape in sized.kept_shapes]


@torch.library.custom_op("meshweave::block_product_back", mutates_args=())  # type: ignore[untyped-decorator]
def block_product_back(
    arriving: list[Tensor],
    x: Tensor,
    weights: list[Tensor],
    kept: list[Tensor],
    number: int,
    batch: int,
    sequence: int,
) -> list[Tensor]:
    """Return this rank's shards of the gradients of the operand and of each weight, in this order. Collective.

    Args:
        arriving: the gradients of the products, one for each weight.
        kept: what `block_product` returned after the products.
        x, weights, number, batch, sequence: the arguments of `block_product`.
    """
    return _multiply_back(arriving, x, weights, kept, number, batch, sequence)


def _multiply_back(
    arriving: Sequence[Tensor],
    x: Tensor,
    weights: Sequence[Tensor],
    kept: Sequence[Tensor],
    number: int,
    batch: int,
    sequence: int,
) -> list[Tensor]:
    """Return what `block_product_back` does."""
    product, sized = _sized(number, batch, sequence, x.dtype)
    if not sized.communicates[1] and not kept:
        return _local_gradients(arriving, x, weights)
    bound = sized.bound(True, x.device)
    _fill(bound.inputs["dy"].view(sized.result_shape), arriving, product, 2)
    if "x" in bound.inputs:
        bound.inputs["x"].copy_(x.reshape(bound.inputs["x"].shape))
    _load_weights(bound, weights, product)
    for name, value in zip(sized.kept, kept, strict=True):
        bound.inputs[name].copy_(value)
    bound.run(bound.inputs)
    of_operand = bound.outputs["dx"].reshape(x.shape).clone()
    return [of_operand, *_parts(bound.outputs["dw"].t(), product, 0, weights)]


def _local_gradients(arriving: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of `block_product_back` where no other rank is needed for them."""
    rows = x.flatten(0, 1)
    flat = [grad.flatten(0, 1) for grad in arriving]
    of_operand = torch.mm(flat[0], weights[0])
    for grad, weight in zip(flat[1:], weights[1:], strict=True):
        of_operand.addmm_(grad, weight)
    return [of_operand.view(x.shape), *(grad.t().mm(rows) for grad in flat)]


@block_product_back.register_fake  # type: ignore[untyped-decorator]
def _(arriving: list[Tensor], x: Tensor, weights: list[Tensor], *_: Any) -> list[Tensor]:
    keep_order(torch.ops.meshweave.block_product_back)
    return [x.new_empty(x.shape), *(weight.new_empty(weight.shape) for weight in weights)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weights, *ctx.sizes = inputs
    kept = output[len(weights) :]
    ctx.num_weights = len(weights)
    ctx.save_for_backward(x, *weights, *kept)


def _gradients(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    x, *rest = ctx.saved_tensors
    count = ctx.num_weights
    weights, kept = rest[:count], rest[count:]
    of_x, *of_weights = block_product_back(list(grads[:count]), x, weights, kept, *ctx.sizes)
    return of_x, of_weights, None, None, None


block_product.register_autograd(_gradients, setup_context=_keep)


for _op in (torch.ops.meshweave.block_product, torch.ops.meshweave.block_product_back):
    compat.keep_in_order(_op.default)


class _EagerProduct(torch.autograd.Function):  # type: ignore[misc]
    """`block_product` outside of a compiler: an op of torch.library takes some 100 us more of Python."""

    @staticmethod
    def forward(
        ctx: Any, number: int, batch: int, sequence: int, x: Tensor, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the result, and keep what gradients need."""
        output = tuple(_multiply(x, weights, number, batch, sequence))
        ctx.sizes, ctx.num_weights = (number, batch, sequence), len(weights)
        kept = output[len(weights) :]
        ctx.mark_non_differentiable(*kept)
        ctx.save_for_backward(x, *weights, *kept)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the arguments; None for what has none."""
        refuse_second_derivative(OF_SHARED_LAYERS)
        x, *rest = ctx.saved_tensors
        count = ctx.num_weights
        return (None, None, None, *_multiply_back(grads[:count], x, rest[:count], rest[count:], *ctx.sizes))


def multiply(x: Tensor, weights: Sequence[Tensor], number: int, batch: int, sequence: int) -> list[Tensor]:
    """Return this rank's shards of the products of x with each weight. Collective.

    They are (batch, sequence, features out), differentiable in x and the weights.

    Args:
        x: this rank's shard (batch, sequence, features in) of the operand.
        weights: this rank's shard (features out, features in) of each.
        number: what `number_of` returns for the product, a `SiteProduct`.
        batch, sequence: global sizes: the number of sequences, and the tokens of each.
    """
    if torch.compiler.is_compiling():
        return list(block_product(x, list(weights), number, batch, sequence)[: len(weights)])
    _, sized = _sized(number, batch, sequence, x.dtype)
    if not sized.kept and sized.communicates == (False, False):
        return [torch.nn.functional.linear(x, weight) for weight in weights]
    return list(_EagerProduct.apply(number, batch, sequence, x, *weights)[: len(weights)])
