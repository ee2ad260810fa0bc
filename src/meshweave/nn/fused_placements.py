"""Fused linear layers of DTensors: the product on a ring of ranks, and the placements of result and gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from meshweave.algorithms.fused import ring_problems
from meshweave.algorithms.fused.product import Parts
from meshweave.algorithms.universal.problem import UniversalProblem, transposed_layout
from meshweave.base.errors import LayoutError, listed
from meshweave.execute.torch import compat
from meshweave.nn.dtensor import from_the_front, layout_on
from meshweave.nn.products import DTYPES


@dataclass(frozen=True)
class PlacedLinear:
    """A linear layer of DTensors, x weight^T, as a product on this rank's ring.

    Attributes:
        problem: the product A B on the ring, with A the rows of x and B the transpose of weight.
        dim: the dim of x that is gathered, or of the result that is scattered.
        out: the placements of the result.
        grads_x, grads_w: the placements of the gradients of x and weight as each ring computes them: Partial on
            mesh dims along which several rings have the same x or weight.
    """

    problem: UniversalProblem
    dim: int
    out: tuple[Placement, ...]
    grads_x: tuple[Placement, ...]
    grads_w: tuple[Placement, ...]


@lru_cache(maxsize=512)
def placed_linear(
    x: compat.DTensorSpec, weight: compat.DTensorSpec, dim: int, *, is_gather: bool, name: str
) -> PlacedLinear:
    """Return the ring product x @ weight.T of DTensors, and how its result and gradients are placed.

    On one mesh dim, the ring, x is sharded along a dim of rows and `weight` along dim 0 (with `is_gather`), or
    both along their last dims (without). On each other mesh dim rows of x, or rows of `weight`, or neither are
    sharded.

    Args:
        x, weight: specs of (..., in features) and (out features, in features), on one mesh.
        dim: the dim of the result that is scattered; ignored with `is_gather`, where x is gathered along the dim
            that its own placements shard on the ring.
        is_gather: whether rows are gathered before the product; else the result is scattered after it.
        name: of the function, for errors.

    Raises LayoutError where placements are others, or not applied from left to right, leave a rank of a ring
    without rows, or divide a dim unevenly so that other ranks of a ring than the last one have less.
    """
    last = x.ndim - 1
    placements = tuple(from_the_front(one, x.ndim, "x") for one in x.placements)
    of_weight = tuple(from_the_front(one, 2, "weight") for one in weight.placements)
    for what, spec in (("x", x), ("weight", weight)):
        if any(list(axes) != sorted(axes) for _, axes in compat.explicit_shard_order(spec) or ()):
            raise LayoutError(
                f"{name}: mesh dims shard {what} in another order than from left to right, {spec.shard_order}; "
                "redistribute it"
            )
    out: list[Placement] = []
    grads: tuple[list[Placement], list[Placement]] = [], []
    num_rings = 0
    for of_x, of_w in zip(placements, of_weight, strict=True):
        rows = type(of_x) is Shard and of_x.dim < last
        if is_gather and rows and of_w == Shard(0):
            num_rings, dim = num_rings + 1, of_x.dim
            result: Placement = Shard(last)
        elif not is_gather and of_x == Shard(last) and of_w == Shard(1):
            num_rings, result = num_rings + 1, Shard(dim)
        elif rows and of_w == Replicate():
            result, of_w = of_x, Partial()
        elif of_x == Replicate() and of_w == Shard(0):
            result, of_x = Shard(last), Partial()
        elif of_x == of_w == Replicate():
            result = of_x
        else:
            num_rings = -len(placements)
            break
        out.append(result)
        grads[0].append(of_x)
        grads[1].append(of_w)
    wanted = (
        "Shard of a dim of rows and weight in Shard(0)" if is_gather else "Shard(-1) and weight in Shard(1)"
    )
    if num_rings != 1:
        raise LayoutError(
            f"{name} needs x in {wanted} on one mesh dim, and on others rows of x, rows of weight or nothing "
            f"sharded; x is in {x.placements}, weight in {weight.placements}"
        )
    rings, rank = _rings_of(x, weight, dim, tuple(out)), x.mesh.get_rank()
    for ring in rings:  # of others, too: a refusal is that of all ranks
        if Parts(ring.m, len(ring.ranks)).has_empty:
            raise LayoutError(
                f"{name}: {ring.m} rows leave some of ranks {listed(ring.ranks)} without any, as "
                f"x {tuple(x.shape)} is in {x.placements}"
            )
    problem = next((ring for ring in rings if rank in ring.ranks), None)
    if problem is None:
        raise LayoutError(
            f"{name}: the parts of x {tuple(x.shape)} in {x.placements} are not those of a ring; make dim {dim} "
            "divisible by its ranks, or shard it on one mesh dim only"
        )
    return PlacedLinear(problem, dim, tuple(out), tuple(grads[0]), tuple(grads[1]))


def _rings_of(
    x: compat.DTensorSpec, weight: compat.DTensorSpec, dim: int, out: tuple[Placement, ...]
) -> tuple[UniversalProblem, ...]:
    """Return the product of each ring, of x with its dim `dim` in front; () where there is none."""
    mesh, order = x.mesh, (dim, *(other for other in range(x.ndim) if other != dim))

    def in_front(placements: Sequence[Placement]) -> list[Placement]:
        fronted = (from_the_front(one, x.ndim, "x") for one in placements)
        return [Shard(order.index(one.dim)) if type(one) is Shard else one for one in fronted]

    shape = tuple(x.shape[at] for at in order)
    a = layout_on(mesh, in_front(x.placements), shape)
    c = layout_on(mesh, in_front(out), (*shape[:-1], weight.shape[0]))
    b = transposed_layout(layout_on(mesh, weight.placements, tuple(weight.shape)))
    m = math.prod(shape[:-1])
    problem = UniversalProblem(m, weight.shape[0], weight.shape[1], a, b, c, DTYPES[x.tensor_meta.dtype])
    return ring_problems(problem)
