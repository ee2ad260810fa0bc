"""Products with batch dims as bound actions: one matrix product where shapes allow, else a batch of them.

Where the right operand has no batch dims, the left one's rows of all batches form one matrix. A sum over the
batch is one product whose k runs over the batch, too. Everything else is `torch.bmm`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from meshweave.execute.torch.views import Action, Staging, StridedView, chain_actions
from meshweave.ir.program.ops import Matmul
from meshweave.ir.program.product_shapes import ProductShape, product_shape
from meshweave.ir.program.views import View


class BoundViews(Protocol):
    """A rank's memory: its views as tensors, and its staging."""

    @property
    def staging(self) -> Staging:
        """Return the memory for copies of views that are not one tensor of the strides or dtype needed."""

    def view(self, view: View) -> StridedView:
        """Return a resolved view (integers, no expressions) as tensors that alias its buffer slot."""

    def overlap(self, out: View, src: View) -> bool:
        """Return whether the two views may share elements, also where their buffers were given one memory."""


def product_dtype(out: StridedView, a: StridedView, b: StridedView) -> torch.dtype:
    """Return the dtype in which a matmul is computed: what torch promotes the dtypes of `a`, `b` and `out` to."""
    return torch.promote_types(torch.promote_types(a.dtype, b.dtype), out.dtype)


def bind_batched(binder: BoundViews, op: Matmul) -> Action:
    """Return the action of a matmul of which one operand or both have batch dims."""
    dims = len(op.out.selectors)
    shape = product_shape(op.a.shape, op.b.shape, op.transpose_a, op.transpose_b, dims)
    assert isinstance(shape, ProductShape), shape
    out = binder.view(op.out)
    actions: list[Action] = []
    dtype = product_dtype(out, binder.view(op.a), binder.view(op.b))
    a = _dense(binder, op, "a", op.a, dtype, actions)
    b = _dense(binder, op, "b", op.b, dtype, actions)
    a = a.transpose(-1, -2) if op.transpose_a else a
    b = b.transpose(-1, -2) if op.transpose_b else b
    num_products = math.prod(shape.batch)
    if shape.sums_batch:
        order = (len(shape.batch), *range(len(shape.batch)), len(shape.batch) + 1)
        a = _shaped(binder, op, "a rows", a.permute(order), (shape.m, num_products * shape.k), actions)
        b = _shaped(binder, op, "b rows", b, (num_products * shape.k, shape.n), actions)
        target_shape: tuple[int, ...] = (shape.m, shape.n)
    elif not shape.batch_b:
        a = _shaped(binder, op, "a rows", a, (num_products * shape.m, shape.k), actions)
        target_shape = (num_products * shape.m, shape.n)
    else:
        a = a.expand(num_products, *a.shape) if not shape.batch_a else a
        a = _shaped(binder, op, "a rows", a, (num_products, shape.m, shape.k), actions)
        b = _shaped(binder, op, "b rows", b, (num_products, shape.k, shape.n), actions)
        target_shape = (num_products, shape.m, shape.n)
    add = bool(op.accumulate) or (op.release is not None and op.release.update)
    is_read = binder.overlap(op.out, op.a) or binder.overlap(op.out, op.b)
    is_apart = out.direct is None or is_read or dtype != out.dtype
    target = None if out.direct is None or is_apart else _view(out.direct, target_shape)
    if target is not None:
        return chain_actions([*actions, _multiply(target, a, b, add)])
    product = binder.staging.get(op.lane, "product", out.shape, dtype)
    after = binder.staging.transfer(op.lane, out, StridedView.of(product), add=add)
    return chain_actions([*actions, _multiply(product.view(target_shape), a, b, False), *after])


def _multiply(target: Tensor, a: Tensor, b: Tensor, add: bool) -> Action:
    if target.dim() == 3:
        return (
            partial(torch.baddbmm, target, a, b, out=target) if add else partial(torch.bmm, a, b, out=target)
        )
    return partial(torch.addmm, target, a, b, out=target) if add else partial(torch.mm, a, b, out=target)


def _dense(
    binder: BoundViews, op: Matmul, use: str, view: View, dtype: torch.dtype, actions: list[Action]
) -> Tensor:
    """Return an operand as one tensor; adds to `actions` what fills it where it is no alias."""
    bound = binder.view(view)
    if bound.direct is not None and bound.dtype == dtype:
        return bound.direct
    packed = binder.staging.get(op.lane, use, bound.shape, dtype)
    actions += binder.staging.transfer(op.lane, StridedView.of(packed), bound)
    return packed


def _shaped(
    binder: BoundViews, op: Matmul, use: str, tensor: Tensor, shape: Sequence[int], actions: list[Action]
) -> Tensor:
    """Return a tensor seen in another shape, or a copy of it where its strides do not allow that."""
    seen = _view(tensor, shape)
    if seen is not None:
        return seen
    packed = binder.staging.get(op.lane, use, tuple(tensor.shape), tensor.dtype)
    actions.append(partial(packed.copy_, tensor))
    return packed.view(tuple(shape))


def _view(tensor: Tensor, shape: Sequence[int]) -> Tensor | None:
    """Return the same memory in another shape; None where strides cannot express it."""
    try:
        return tensor.view(tuple(shape))
    except RuntimeError:
        return None
