"""`meshweave.matmul`: the product of two DTensors, whatever their placements, without resharding either.

Each operand stays as it is; the universal product (Slicing Is All You Need) moves only the parts that a rank
needs and does not have. Which matrix stays put, and how the work is split, is tuned once per kind of product;
programs are bound once and reused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from meshweave.algorithms.universal import Operand
from meshweave.base.errors import BindError, LayoutError, UnsupportedError
from meshweave.cost.rates import RankRates
from meshweave.describe.layout import Layout
from meshweave.describe.machine.cluster import Cluster, load_cluster
from meshweave.execute.torch import compat
from meshweave.execute.torch.context import TorchContext
from meshweave.nn.placements import layout_of, layout_on, matrix_shape
from meshweave.nn.products import DTYPES, Matrix, Order, Product, Transport, cheapest, prepare, problem_of
from meshweave.tune.universal import SLICES, Objective, tune_universal

Stationary = Literal["auto", "a", "b", "c"]

_MACHINES = {"cpu": "local-cpu", "cuda": "h100-node"}
"""The cluster of the catalog whose rates choose among ways that move the same, where the caller names none."""


@dataclass(frozen=True)
class How:
    """What a product is computed with, forward and backward."""

    stationary: Operand | None
    transport: Transport
    objective: Objective
    rates: RankRates
    context: TorchContext | None

    @classmethod
    def of(
        cls,
        device_type: str,
        stationary: Stationary,
        transport: Transport,
        cluster: Cluster | str | None,
        context: TorchContext | None,
    ) -> How:
        """As `matmul` is told it. Raises LayoutError, DescriptionError."""
        if stationary not in ("auto", "a", "b", "c"):
            raise LayoutError(f"stationary is {stationary!r}; it must be 'auto', 'a', 'b' or 'c'")
        return cls(
            None if stationary == "auto" else stationary,
            transport,
            "bytes" if cluster is None else "time",
            _rates(_MACHINES.get(device_type, "local-cpu") if cluster is None else cluster),
            context or TorchContext.default(device_type),
        )


def matmul(
    a: DTensor,
    b: DTensor,
    out: Sequence[Placement] | None = None,
    stationary: Stationary = "auto",
    *,
    transport: Transport = "messages",
    cluster: Cluster | str | None = None,
    context: TorchContext | None = None,
) -> DTensor:
    """C = A B of DTensors with any placements; every rank of their meshes calls it.

    Args:
        a: of global shape (..., K). Leading dims may be sharded, too.
        b: of global shape (K, N), on the same device mesh or on one of another shape over the same ranks.
        out: the placements of C (..., N), one per dim of a's device mesh: Shard, Replicate, Partial("sum") or
            _StridedShard. None takes what is cheapest of Shard and Replicate by the same measure.
        stationary: the matrix that is not moved, "a", "b" or "c"; "auto" leaves that to the choice.
        transport: "messages" (matched send and recv, which work anywhere), "shared" (memory that the ranks of one
            host share), "mpi" (remote memory access) or "symmetric" (torch symmetric memory on CUDA).
        cluster: the machine, described (best by `meshweave calibrate`) or named as in the catalog: the way that is
            estimated to be fastest on it is taken, even where that moves more. None assumes nothing about rates
            and takes the way that moves least, which is never more than DTensor moves for the same placements.
            All ranks must name the same.
        context: process groups, deadline and liveness; by default those of the default process group.

    Returns:
        A DTensor on a's device mesh of the operands' dtype. Once differentiable in a and b: gradients have the
        placements of what they are gradients of, with Replicate where that is partial. Whether each needs a
        gradient must be the same on all ranks.

    Raises:
        LayoutError: shapes, meshes or placements that do not fit each other.
        BindError: dtypes that differ or that no program has; ranks that do not ask for the same product at the
            first one of its kind, before any byte of it moves.
        UnsupportedError: the transport is not available here; in a backward pass, a second derivative.
        RankLostError, DeadlineError: other ranks are missing or late.
    """
    if not (isinstance(a, DTensor) and isinstance(b, DTensor)):
        raise LayoutError(f"matmul takes two DTensors, not {type(a).__name__} and {type(b).__name__}")
    how = How.of(a.device_mesh.device_type, stationary, transport, cluster, context)
    if b.ndim != 2 or a.ndim < 1 or a.shape[-1] != b.shape[0]:
        raise LayoutError(
            f"a of shape {tuple(a.shape)} cannot be multiplied by b of shape {tuple(b.shape)}: (..., K) by (K, N)"
        )
    check_dtypes(a=a, b=b)
    result: DTensor = _Product.apply(a, b, placements_given(out, a.ndim), how)
    return result


def check_dtypes(**operands: Tensor) -> None:
    """Raises BindError where operands are not of one dtype that programs have."""
    found = {operand.dtype for operand in operands.values()}
    if len(found) > 1 or not found <= set(DTYPES):
        said = " and ".join(f"{name} {operand.dtype}" for name, operand in operands.items())
        raise BindError(f"dtypes are {said}; all must be one of {', '.join(DTYPES.values())}")


def placements_given(out: Sequence[Placement] | None, num_dims: int) -> tuple[Placement, ...] | None:
    """`out` of a result of so many dims, with dims counted from the front. Raises LayoutError."""
    if out is None:
        return None
    if isinstance(out, (Placement, str)) or not isinstance(out, Sequence):
        raise LayoutError(f"out is {out!r}; it must be a sequence with one placement per dim of the mesh")
    return tuple(_from_the_front(one, num_dims) for one in out)


def _from_the_front(placement: Placement, num_dims: int) -> Placement:
    if type(placement) is Shard and placement.dim < 0:
        return Shard(placement.dim + num_dims)
    if compat.is_strided_shard(placement) and placement.dim < 0:
        return compat.strided_shard(placement.dim + num_dims, placement.split_factor)
    return placement


_KNOWN_RATES: dict[Cluster | str, RankRates] = {}


def _rates(cluster: Cluster | str) -> RankRates:
    """The rates of a cluster, described or named as in the catalog. Raises DescriptionError."""
    if cluster not in _KNOWN_RATES:
        _KNOWN_RATES[cluster] = RankRates.of(load_cluster(cluster) if isinstance(cluster, str) else cluster)
    return _KNOWN_RATES[cluster]


class _Product(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, a: DTensor, b: DTensor, out: tuple[Placement, ...] | None, how: How) -> DTensor:
        ctx.save_for_backward(*for_backward(ctx, a, b))
        ctx.of_a, ctx.of_b, ctx.how = Target.like(a), Target.like(b), how
        target = Target(torch.Size((*a.shape[:-1], b.shape[-1])), a.device_mesh, out)
        return multiply(Folded(a), Folded(b), target, how)

    @staticmethod
    def backward(ctx: Any, *grads: DTensor) -> tuple[DTensor | None, ...]:
        refuse_second_derivative()
        a, b = ctx.saved_tensors
        # What stays forward need not stay backward: there it is another product.
        how = replace(ctx.how, stationary=None)
        of_a = of_b = None
        if ctx.needs_input_grad[0]:
            of_a = multiply(Folded(grads[0]), Folded(b, turned=True), ctx.of_a, how)
        if ctx.needs_input_grad[1]:
            of_b = multiply(Folded(a, turned=True), Folded(grads[0]), ctx.of_b, how)
        return of_a, of_b, None, None


def refuse_second_derivative() -> None:
    """Raises UnsupportedError where a backward pass is itself to be differentiated (`create_graph=True`).

    torch's `once_differentiable` lets that pass, and drops terms, where the incoming gradient needs no gradient.
    """
    if torch.is_grad_enabled():
        raise UnsupportedError(
            "products of DTensors are differentiable once, and create_graph=True asks for more"
        )


def for_backward(ctx: Any, a: DTensor, b: DTensor) -> tuple[DTensor | None, DTensor | None]:
    """Of the first two inputs of a function those that the gradient of the other takes."""
    return a if ctx.needs_input_grad[1] else None, b if ctx.needs_input_grad[0] else None


@dataclass(frozen=True)
class Folded:
    """A DTensor as a matrix, leading dims folded into rows; `turned`, its transpose."""

    tensor: DTensor
    turned: bool = False

    @property
    def local(self) -> Tensor:
        """This rank's part, of two dims."""
        local = compat.local_tensor(self.tensor)
        if local.ndim != 2:
            local = local.reshape(math.prod(local.shape[:-1]), local.shape[-1])
        return local.t() if self.turned else local

    @property
    def matrix(self) -> Matrix:
        order: Order = None
        if self.tensor.ndim == 2:
            down, across = self.tensor.stride()
            order = (1, 0) if down < across else None
        found = Matrix(layout_of(self.tensor), matrix_shape(tuple(self.tensor.shape)), order)
        return found.transposed if self.turned else found


@dataclass(frozen=True)
class Target:
    """Global shape, mesh and placements of a result; `order` in which axes shard a dim, where it is not the
    usual."""

    shape: torch.Size
    device_mesh: DeviceMesh
    placements: tuple[Placement, ...] | None
    order: Any = None

    @classmethod
    def like(cls, tensor: DTensor) -> Target:
        """Of the gradient of a tensor: as the tensor, but that of each term of a sum is the gradient of the
        sum."""
        spec = compat.spec_of(tensor)
        placements = tuple(Replicate() if isinstance(p, Partial) else p for p in spec.placements)
        order = compat.explicit_shard_order(spec) if placements == spec.placements else None
        return cls(tensor.shape, spec.mesh, placements, order)


def multiply(a: Folded, b: Folded, target: Target, how: How) -> DTensor:
    """The product of `matmul` outside autograd. What it takes is prepared at the first product of a kind."""
    specs = compat.spec_of(a.tensor), compat.spec_of(b.tensor)
    key = specs, a.turned, b.turned, target, replace(how, context=None)
    assert how.context is not None
    plans = how.context.cache(_Plans)
    plan = plans.get(key)
    if plan is None:
        plan = plans[key] = _plan(a.matrix, b.matrix, a.tensor.dtype, target, how)
    run, spec, shape = plan
    return compat.from_spec(run(a.local, b.local).view(shape), spec)


class _Plans(dict[Any, tuple[Product, compat.DTensorSpec, tuple[int, ...]]]):
    """By what is multiplied how: what multiplies local parts, the spec of the result and its local shape."""


def _plan(
    a: Matrix, b: Matrix, dtype: torch.dtype, target: Target, how: How
) -> tuple[Product, compat.DTensorSpec, tuple[int, ...]]:
    """What multiplies local parts, how the result lies, and the local shape of that."""
    shape, mesh = tuple(target.shape), target.device_mesh
    placements = _cheapest(a, b, dtype, target, how) if target.placements is None else target.placements
    layout = layout_on(mesh, placements, shape, shard_order=target.order)
    problem = problem_of(a, b, layout, dtype)
    slices = (1,) if how.transport == "shared" else SLICES  # what is read in place needs nothing to hide it
    tuned = tune_universal(
        problem, how.rates, stationary=how.stationary, objective=how.objective, slices=slices
    )
    rank = mesh.get_rank()
    assert how.context is not None
    run = prepare(problem, tuned, rank, how.transport, how.context)
    spec = compat.make_spec(mesh, placements, shape, dtype, target.order)
    return run, spec, Layout(layout.mesh, layout.placements).local_shape(shape, rank)


def _cheapest(a: Matrix, b: Matrix, dtype: torch.dtype, target: Target, how: How) -> tuple[Placement, ...]:
    each = (*(Shard(dim) for dim in range(len(target.shape))), Replicate())
    tried: list[tuple[Placement, ...]] = list(product(each, repeat=target.device_mesh.ndim))
    tried.sort(key=lambda placed: sum(isinstance(one, Replicate) for one in placed))
    layouts = [layout_on(target.device_mesh, placed, tuple(target.shape)) for placed in tried]
    return tried[cheapest(a, b, layouts, dtype, how.rates, how.stationary, how.objective)]
