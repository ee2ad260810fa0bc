"""What the axes of a mesh do in a layer: where tensors lie, from which the writer derives what moves.

A role says, for one mesh axis, along which dim each kind of tensor is sharded: "batch", "sequence", "hidden" (the
features of the residual), "inner" (groups of heads, or FFN features), or "" for not at all. A strategy is a role
for each axis. How a product lies follows from its operands: sharded along k it is "partial", else as they are.
Where that is not how its result is to lie, it is moved: reduced, reduced and scattered, or gathered.

Along an axis that replicates a tensor, the terms of its gradient are summed. Where a tensor is partial, its
gradient is replicated. So the backward part needs no role of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from meshweave.base.errors import LayoutError

Dim = Literal["", "batch", "sequence", "hidden", "inner", "partial", "expert"]
AxisDims = tuple[Dim, ...]
"""For each mesh axis the dim of a tensor that it splits: "" where it replicates the tensor, "partial" where ranks
have terms of a sum."""


@dataclass(frozen=True)
class Side:
    """One dim of a tensor: its name, and `count` units of `unit` elements. Ranks have whole units.

    A mesh axis that shards `dim` shards every side of that name. 8 heads of 64 features are Side("inner", 8, 64).
    """

    dim: Dim
    count: int
    unit: int = 1

    @property
    def size(self) -> int:
        """Return the global number of elements of the dim, `count` times `unit`."""
        return self.count * self.unit


Sides = tuple[Side, ...]

TOKENS: tuple[Dim, ...] = ("batch", "sequence")


@dataclass(frozen=True)
class AxisRole:
    """How the tensors of a layer lie along one mesh axis.

    Each `Dim` says which dim of some tensors the axis shards: "batch", "sequence", "hidden" (features of the
    residual), "inner" (heads or features of the feed-forward part), "expert"; "partial" if ranks have terms of a
    sum, "" if each rank has all.

    Attributes:
        name: the key in `BLOCK_ROLES`, and what the role is called in errors and titles of strategies.
        residual: of the residual, norms and what is added to the residual.
        operand_in: of the operand of the first product, that with W_qkv or W_1.
        attention, feed_forward: of what attention, or the activation, reads and makes.
        operand_out: of the operand of the second product, that with W_o or W_2.
        w_in, w_out: of W_qkv and W_1, or W_o and W_2, when products read them.
        shards_weights: whether weights are given in parts along this axis, and gathered for each use.
        keeps_weights: whether gathered weights are kept for the backward part. Else they are gathered again.
        scatters_gradients: whether gradients of weights end in parts along this axis.
        products_gather: whether each product gathers its weight along this axis, and scatters its gradient, beside
            what it moves along other axes. Else many weights may be gathered together, as those of ZeRO are.
        reduces_last: whether gradients of weights are reduced after all backward parts. Else each is as soon as
            it is complete.
        keeps_gathered: whether operands that were gathered forward are kept for the gradients of weights. Else
            they are gathered again.

    Raises:
        LayoutError: products gather weights that are not in parts, or leave their gradients whole.
    """

    name: str
    residual: Dim = ""
    operand_in: Dim = ""
    attention: Dim = ""
    feed_forward: Dim = ""
    operand_out: Dim = ""
    w_in: Dim = ""
    w_out: Dim = ""
    shards_weights: bool = False
    keeps_weights: bool = False
    scatters_gradients: bool = False
    products_gather: bool = False
    reduces_last: bool = False
    keeps_gathered: bool = False

    def __post_init__(self) -> None:
        if self.products_gather and not (self.shards_weights and self.scatters_gradients):
            raise LayoutError(
                f"role {self.name}: products_gather is for weights in parts; give shards_weights=True and "
                "scatters_gradients=True with it"
            )


IDLE = AxisRole("idle")
"""An axis that splits nothing. Axes of one rank have this role."""

INNER = AxisRole(
    "inner", attention="inner", feed_forward="inner", operand_out="inner", w_in="inner", w_out="inner"
)
"""Megatron's tensor parallelism: columns of the first weight and rows of the second; a sum at the end."""

SEQUENCE_INNER = replace(INNER, name="sequence and inner", residual="sequence")
"""INNER with sequence parallelism: the residual is sharded by tokens, gathered before and scattered after."""

HIDDEN = AxisRole(
    "hidden",
    residual="hidden",
    operand_in="hidden",
    attention="inner",
    w_in="hidden",
    w_out="hidden",
    keeps_gathered=True,
)
"""The second axis of ATP: it splits the features of the residual, and in attention groups of heads once more."""

COLUMNS = AxisRole(
    "columns", residual="hidden", attention="inner", feed_forward="inner", w_in="inner", w_out="hidden"
)
"""The column axis of 2D products: every matrix is sharded by columns, and operands are gathered."""

BATCH = AxisRole(
    "batch",
    residual="batch",
    operand_in="batch",
    attention="batch",
    feed_forward="batch",
    operand_out="batch",
)
"""Data parallelism: gradients of weights are summed."""

FULLY_SHARDED = replace(BATCH, name="fully sharded", shards_weights=True, scatters_gradients=True)
"""Data parallelism with weights in parts, which are gathered for each use (ZeRO-3)."""

ROWS = replace(FULLY_SHARDED, name="rows", products_gather=True)
"""The row axis of 2D products: FULLY_SHARDED, but each product gathers its weight beside its operand."""

GATHERED_ONCE = replace(FULLY_SHARDED, name="gathered once", keeps_weights=True)
"""FULLY_SHARDED with weights that are gathered once a step (ZeRO-2)."""

REDUCED_LAST = replace(GATHERED_ONCE, name="reduced last", reduces_last=True)
"""GATHERED_ONCE with whole gradients until all of them are complete (ZeRO-1)."""

DATA_ROLES = (BATCH, REDUCED_LAST, GATHERED_ONCE, FULLY_SHARDED)
"""What the axis of data parallelism does at each level of ZeRO, from 0."""

RING = AxisRole(
    "ring",
    residual="sequence",
    operand_in="sequence",
    attention="sequence",
    feed_forward="sequence",
    operand_out="sequence",
)
"""Context parallelism by ring attention: sequences are sharded, and keys and values go round."""

HEADS_FOR_SEQUENCE = replace(RING, name="heads for sequence", attention="inner", keeps_gathered=True)
"""Context parallelism by all-to-all: sequences are sharded but in attention, where groups of heads are."""

BLOCK_ROLES = {
    role.name: role
    for role in (
        IDLE,
        INNER,
        SEQUENCE_INNER,
        HIDDEN,
        COLUMNS,
        ROWS,
        BATCH,
        RING,
        HEADS_FOR_SEQUENCE,
        FULLY_SHARDED,
        GATHERED_ONCE,
        REDUCED_LAST,
    )
}
"""The roles above by name, to combine to strategies."""


def num_parts(dims: AxisDims, shape: tuple[int, ...], of: Iterable[Dim]) -> int:
    """Return into how many parts a tensor in layout `dims` is split along all dims named in `of` together.

    `shape` has the sizes of the mesh axes: (("batch", "inner"), (2, 4), ("batch",)) -> 2.
    """
    return math.prod(size for dim, size in zip(dims, shape, strict=True) if dim in of)


def product(a: AxisDims, b: AxisDims, contracted: Iterable[Dim]) -> AxisDims:
    """Return the layout of a product before any communication, from the layouts `a` and `b` of its operands.

    A mesh axis that shards both operands along a `contracted` dim, over which the product sums, leaves the result
    "partial": each rank has a term of the sum.

    Raises:
        LayoutError: an axis shards only one operand along a contracted dim, or the operands along two different
            dims of the result.
    """
    k = tuple(contracted)
    return tuple(_along(left, right, k) for left, right in zip(a, b, strict=True))


def _along(left: Dim, right: Dim, contracted: tuple[Dim, ...]) -> Dim:
    if left in contracted or right in contracted:
        if left != right:
            raise LayoutError(
                f"a mesh axis splits operands of a product along {left or 'nothing'} and {right or 'nothing'}, of "
                "which one is summed over; give both the same"
            )
        return "partial"
    if left and right and left != right:
        raise LayoutError(
            f"a mesh axis would split a product along both {left} and {right}; let it replicate one operand"
        )
    return left or right


def gradient_dims(dims: AxisDims) -> AxisDims:
    """Return the layout in which backward products read the gradient of a result whose layout is `dims`.

    It is `dims`, but replicated ("") along axes where that is "partial": each term of a sum has the sum's
    gradient.
    """
    return tuple("" if dim == "partial" else dim for dim in dims)


@dataclass(frozen=True)
class Roles:
    """The roles of all mesh axes, and the layouts of a layer's tensors that follow from them.

    If the role of one axis keeps gathered operands or weights, or reduces last, this holds for all axes. A
    layout is an `AxisDims`: for each mesh axis the dim that it shards, "" where it replicates, "partial" for
    partial sums. Products with W_qkv or W_1 (from the residual to inner features) are first ones; those with W_o
    or W_2 (back to the residual) are second ones.

    Attributes:
        axes: the role of each mesh axis.
        product_2d: name of the algorithm of `matmul2d` that products are included from; "" for none.
        experts: for each axis "expert" if its ranks divide the experts of a routed layer among them, "inner"
            if they shard each expert, "" if they have equal ones; () for "inner" where other feed-forward
            parts are sharded by inner features.
    """

    axes: tuple[AxisRole, ...]
    product_2d: str = ""
    experts: AxisDims = ()

    @property
    def is_flat(self) -> bool:
        """Return whether tokens are one dim of size batch x sequence, as for 2D products, or else two dims."""
        return bool(self.product_2d)

    @cached_property
    def replicated(self) -> AxisDims:
        """Return the layout of a tensor that every rank has whole: "" for each mesh axis."""
        return tuple("" for _ in self.axes)

    @cached_property
    def residual(self) -> AxisDims:
        """Return the layout of the residual stream."""
        return tuple(role.residual for role in self.axes)

    @property
    def ring_axis(self) -> int | None:
        """Return the index of the mesh axis around which ring attention sends keys and values; None without it."""
        axes = [number for number, role in enumerate(self.axes) if role.attention == "sequence"]
        return axes[0] if axes else None

    @property
    def expert_dims(self) -> AxisDims:
        """Return `experts`; if that is (), "inner" for each axis that shards feed-forward features, else ""."""
        return self.experts or tuple("inner" if dim == "inner" else "" for dim in self.core(False))

    def core(self, is_attention: bool) -> AxisDims:
        """Return the layout of activations between two products: of attention, or of the feed-forward part."""
        return tuple(role.attention if is_attention else role.feed_forward for role in self.axes)

    def operand(self, is_first: bool) -> AxisDims:
        """Return the layout of the activation operand when a product reads it, after any communication.

        With `is_first` the product is that with W_qkv or W_1, else that with W_o or W_2.
        """
        return tuple(role.operand_in if is_first else role.operand_out for role in self.axes)

    def weight(self, is_first: bool) -> AxisDims:
        """Return the layout of W_qkv and W_1 (`is_first`), or else of W_o and W_2, when a product reads them."""
        return tuple(role.w_in if is_first else role.w_out for role in self.axes)

    def product(self, is_first: bool) -> AxisDims:
        """Return the layout of the result of the product with W_qkv or W_1 (`is_first`), or else W_o or W_2.

        It is the layout before any communication: "partial" along axes where ranks have terms of a sum.

        Raises:
            LayoutError: an axis shards operand and weight along dims that do not fit together.
        """
        k: Dim = "hidden" if is_first else "inner"
        return product(self.operand(is_first), self.weight(is_first), (k,))

    @property
    def scatters_core(self) -> bool:
        """Return whether partial sums after W_qkv or W_1 are scattered by heads or FFN features on some axis."""
        return any(
            before == "partial" and "inner" in (role.attention, role.feed_forward)
            for before, role in zip(self.product(True), self.axes, strict=True)
        )

    @property
    def gain(self) -> AxisDims:
        """Return the layout of a norm's parameters when they are used: sharded as the residual's features are."""
        return tuple("hidden" if role.residual == "hidden" else "" for role in self.axes)

    @property
    def statistics(self) -> AxisDims:
        """Return the layout of the norms' complete statistics: sharded by tokens as the residual is."""
        return tuple(dim if dim in TOKENS else "" for dim in self.residual)

    @property
    def two_step_norms(self) -> bool:
        """Return whether the features of a token lie on several ranks, so that norms need a reduction."""
        return "hidden" in self.residual

    @property
    def keeps_gathered(self) -> bool:
        """Return whether gathered operands stay in memory for the backward part, else they are gathered again."""
        return any(role.keeps_gathered for role in self.axes)

    @cached_property
    def keeps_weights(self) -> bool:
        """Return whether gathered weights stay in memory for the backward part, else they are gathered again."""
        return any(role.keeps_weights for role in self.axes)

    @property
    def reduces_last(self) -> bool:
        """Return whether gradients of weights are reduced after the whole backward part, else as they complete."""
        return any(role.reduces_last for role in self.axes)

    def stored(self, used: AxisDims, sides: Iterable[Side]) -> AxisDims:
        """Return the layout in which ranks store a weight between its uses.

        It is `used`, the layout in which products read the weight, except that axes whose role has
        `shards_weights` shard the first of its dims `sides` that no axis shards in `used`.

        Raises:
            LayoutError: no dim of the weight is left to shard.
        """
        return _divided(used, sides, [role.shards_weights for role in self.axes])

    def gradient(self, used: AxisDims, sides: Iterable[Side]) -> AxisDims:
        """Return the layout of a weight's gradient after its reduction over ranks.

        It is `used`, the layout in which products read the weight, except that axes whose role has
        `scatters_gradients` shard the first of its dims `sides` that no axis shards in `used`.

        Raises:
            LayoutError: no dim of the weight is left to scatter over.
        """
        return _divided(used, sides, [role.scatters_gradients for role in self.axes])


def _divided(used: AxisDims, sides: Iterable[Side], divides: Iterable[bool]) -> AxisDims:
    """Return a layout in which some axes divide the first dim of a weight that no axis divides yet."""
    free: list[Dim] = [side.dim for side in sides if side.dim not in used]
    out = []
    for dim, is_divided in zip(used, divides, strict=True):
        if is_divided and not free:
            split = ", ".join(name or "nothing" for name in used)
            raise LayoutError(f"a weight split along {split} has no dim left to keep in parts")
        out.append(free[0] if is_divided else dim)
    return tuple(out)
