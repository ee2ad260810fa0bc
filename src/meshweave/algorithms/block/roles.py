"""What the axes of a mesh do in a layer: where tensors lie, from which the writer derives what moves.

A role says, for one mesh axis, along which dim each kind of tensor is sharded: "batch", "sequence", "hidden" (the
features of the residual), "inner" (groups of heads, or FFN features), or "" for not at all. A strategy is a role
for each axis. How a product lies follows from its operands: sharded along k it is "partial", else as they are.
Where that is not how its result is to lie, it is moved: reduced, reduced and scattered, or gathered.

The gradient of what is not sharded is partial, and the reverse, so the backward part needs no role of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from meshweave.base.errors import LayoutError

Dim = Literal["", "batch", "sequence", "hidden", "inner", "partial"]
Dims = tuple[Dim, ...]
"""Per mesh axis how a tensor lies along it."""


@dataclass(frozen=True)
class Side:
    """One dim of a tensor: its name, and `count` units of `unit` elements that are never divided."""

    dim: Dim
    count: int
    unit: int = 1

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return self.count * self.unit


Sides = tuple[Side, ...]

TOKENS: tuple[Dim, ...] = ("batch", "sequence")


@dataclass(frozen=True)
class AxisRole:
    """How the tensors of a layer lie along one mesh axis; the module docstring names the dims.

    Attributes:
        name: what the axis is called in messages and programs of one strategy.
        residual: the residual, norms and what is added to it.
        entry: the operand of the first product, W_qkv or W_1.
        attention, feed_forward: what attention and the activation read and make.
        exit: the operand of the second product, W_o or W_2.
        w_in, w_out: the weights where they are multiplied.
        shards_weights: whether weights are given in parts along this axis, and gathered for each use.
        keeps_weights: whether gathered weights are kept for the backward part. Else they are gathered again.
        scatters_gradients: whether gradients of weights end in parts along this axis.
        reduces_last: whether gradients of weights are reduced after all backward parts. Else each is as soon as
            it is complete.
        keeps_gathered: whether operands that were gathered forward are kept for the gradients of weights. Else
            they are gathered again.
    """

    name: str
    residual: Dim = ""
    entry: Dim = ""
    attention: Dim = ""
    feed_forward: Dim = ""
    exit: Dim = ""
    w_in: Dim = ""
    w_out: Dim = ""
    shards_weights: bool = False
    keeps_weights: bool = False
    scatters_gradients: bool = False
    reduces_last: bool = False
    keeps_gathered: bool = False


IDLE = AxisRole("idle")
"""An axis along which everything is replicated: one of a single rank."""

INNER = AxisRole("inner", "", "", "inner", "inner", "inner", "inner", "inner")
"""Megatron's tensor parallelism: columns of the first weight and rows of the second; a sum at the end."""

SEQUENCE_INNER = AxisRole("sequence and inner", "sequence", "", "inner", "inner", "inner", "inner", "inner")
"""The same with sequence parallelism: the residual is sharded by tokens, gathered before and scattered after."""

HIDDEN = AxisRole("hidden", "hidden", "hidden", "inner", "", "", "hidden", "hidden", keeps_gathered=True)
"""The other axis of ATP: features of the residual are sharded, attention is scattered over its groups of heads."""

COLUMNS = AxisRole("columns", "hidden", "", "inner", "inner", "", "inner", "hidden")
"""The column axis of 2D products: every matrix is sharded by columns, and operands are gathered."""

BATCH = AxisRole("batch", "batch", "batch", "batch", "batch", "batch")
"""Data parallelism: gradients of weights are summed."""

FULLY_SHARDED = replace(BATCH, name="fully sharded", shards_weights=True, scatters_gradients=True)
"""Data parallelism with weights in parts, which are gathered for each use (ZeRO-3)."""

GATHERED_ONCE = replace(FULLY_SHARDED, name="gathered once", keeps_weights=True)
"""The same with weights that are gathered once a step (ZeRO-2)."""

REDUCED_LAST = replace(GATHERED_ONCE, name="reduced last", reduces_last=True)
"""The same with whole gradients until all of them are complete (ZeRO-1)."""

RING = AxisRole("ring", "sequence", "sequence", "sequence", "sequence", "sequence")
"""Context parallelism by ring attention: sequences are sharded, and keys and values go round."""

HEADS_FOR_SEQUENCE = AxisRole(
    "heads for sequence", "sequence", "sequence", "inner", "sequence", "sequence", keeps_gathered=True
)
"""Context parallelism by all-to-all: sequences are sharded but in attention, where groups of heads are."""

BLOCK_ROLES = {
    role.name: role
    for role in (
        IDLE,
        INNER,
        SEQUENCE_INNER,
        HIDDEN,
        COLUMNS,
        BATCH,
        RING,
        HEADS_FOR_SEQUENCE,
        FULLY_SHARDED,
        GATHERED_ONCE,
        REDUCED_LAST,
    )
}
"""The roles above by name, to combine to strategies."""


def product(a: Dims, b: Dims, contracted: Iterable[Dim]) -> Dims:
    """Return how a product lies whose operands lie as given, and whose k are the `contracted` dims.

    Raises:
        LayoutError: one operand alone is sharded along k, or both along other dims of the result.
    """
    k = tuple(contracted)
    return tuple(_along(left, right, k) for left, right in zip(a, b, strict=True))


def _along(left: Dim, right: Dim, contracted: tuple[Dim, ...]) -> Dim:
    if left in contracted or right in contracted:
        if left != right:
            raise LayoutError(f"a product has one operand sharded along '{left}' and one along '{right}'")
        return "partial"
    if left and right and left != right:
        raise LayoutError(f"a product would be sharded along '{left}' and '{right}' by one mesh axis")
    return left or right


def dual(dims: Dims) -> Dims:
    """Return how the gradient of a product lies where it arrives: of terms of a sum, each rank needs all."""
    return tuple("" if dim == "partial" else dim for dim in dims)


@dataclass(frozen=True)
class Roles:
    """The roles of all mesh axes together, as the layouts that a layer has.

    Attributes:
        product_2d: name of the algorithm of `matmul2d` that products are included from; "" for none.
    """

    axes: tuple[AxisRole, ...]
    product_2d: str = ""

    @property
    def is_flat(self) -> bool:
        """Return whether tokens are one dim, as 2D products have them, and not batch and sequence."""
        return bool(self.product_2d)

    @property
    def nowhere(self) -> Dims:
        """Return the layout of what every rank has whole."""
        return tuple("" for _ in self.axes)

    @property
    def residual(self) -> Dims:
        """Return how the residual lies."""
        return tuple(role.residual for role in self.axes)

    @property
    def ring_axis(self) -> int | None:
        """Return the mesh axis along which the keys of attention go round; None where they do not."""
        axes = [number for number, role in enumerate(self.axes) if role.attention == "sequence"]
        return axes[0] if axes else None

    def core(self, is_attention: bool) -> Dims:
        """Return how the inner tensors of a half lie."""
        return tuple(role.attention if is_attention else role.feed_forward for role in self.axes)

    def operand(self, is_first: bool) -> Dims:
        """Return how the operand of the first or second product of a half lies."""
        return tuple(role.entry if is_first else role.exit for role in self.axes)

    def weight(self, is_first: bool) -> Dims:
        """Return how the first or second weight of a half lies where it is multiplied."""
        return tuple(role.w_in if is_first else role.w_out for role in self.axes)

    def product(self, is_first: bool) -> Dims:
        """Return how the first or second product of a half lies before it is moved."""
        k: Dim = "hidden" if is_first else "inner"
        return product(self.operand(is_first), self.weight(is_first), (k,))

    @property
    def gain(self) -> Dims:
        """Return how the parameters of a norm lie where they are used."""
        return tuple("hidden" if role.residual == "hidden" else "" for role in self.axes)

    @property
    def statistics(self) -> Dims:
        """Return how finished statistics of tokens lie."""
        return tuple(dim if dim in TOKENS else "" for dim in self.residual)

    @property
    def two_step_norms(self) -> bool:
        """Return whether features of a row lie on several ranks."""
        return "hidden" in self.residual

    @property
    def keeps_gathered(self) -> bool:
        """Return whether gathered operands are kept for the backward part."""
        return any(role.keeps_gathered for role in self.axes)

    @property
    def keeps_weights(self) -> bool:
        """Return whether gathered weights are kept for the backward part."""
        return any(role.keeps_weights for role in self.axes)

    @property
    def reduces_last(self) -> bool:
        """Return whether gradients of weights are reduced after all backward parts."""
        return any(role.reduces_last for role in self.axes)

    def stored(self, used: Dims, sides: Iterable[Side]) -> Dims:
        """Return how a weight is kept: as it is used, and in parts along axes that keep parts."""
        return _divided(used, sides, [role.shards_weights for role in self.axes])

    def gradient(self, used: Dims, sides: Iterable[Side]) -> Dims:
        """Return how the gradient of a weight is to lie."""
        return _divided(used, sides, [role.scatters_gradients for role in self.axes])


def _divided(used: Dims, sides: Iterable[Side], divides: Iterable[bool]) -> Dims:
    """Return a layout in which some axes divide the first dim of a weight that no axis divides yet."""
    free: list[Dim] = [side.dim for side in sides if side.dim not in used]
    out = []
    for dim, is_divided in zip(used, divides, strict=True):
        if is_divided and not free:
            raise LayoutError(f"a weight that lies as {used} has no dim left to keep parts of")
        out.append(free[0] if is_divided else dim)
    return tuple(out)
