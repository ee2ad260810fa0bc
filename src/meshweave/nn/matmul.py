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
from torch.autograd.function import once_differentiable
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

from meshweave.algorithms.matmul.universal import Operand
from meshweave.describe.cluster import Cluster, load_cluster
from meshweave.describe.layout import Layout
from meshweave.errors import BindError, LayoutError
from meshweave.estimate.universal import Rates
from meshweave.execute.groups import TorchContext
from meshweave.nn.placements import layout_of, layout_on, matrix_shape
from meshweave.nn.products import DTYPES, Matrix, Order, Transport, cheapest, problem_of, run_product
from meshweave.tune.universal import tune_universal

Stationary = Literal["auto", "a", "b", "c"]

_MACHINES = {"cpu": "local-cpu", "cuda": "h100-node"}
"""The cluster of the catalog whose rates a choice is made with, where the caller names none."""


@dataclass(frozen=True)
class _How:
    """What a product is computed with, forward and backward."""

    stationary: Operand | None
    transport: Transport
    rates: Rates
    context: TorchContext


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
            _StridedShard. None takes what is cheapest of Shard and Replicate.
        stationary: the matrix that is not moved, "a", "b" or "c"; "auto" takes what is estimated to be fastest.
        transport: "messages" (matched send and recv, which work anywhere), "shared" (memory that the ranks of one
            host share), "mpi" (remote memory access) or "symmetric" (torch symmetric memory on CUDA).
        cluster: the machine for whose rates the way is chosen, described or named as in the catalog; by default
            `local-cpu` on CPUs, `h100-node` on CUDA. All ranks must name the same.
        context: process groups, deadline and liveness; by default those of the default process group.

    Returns:
        A DTensor on a's device mesh of the operands' dtype. Once differentiable in a and b: gradients have the
        placements of what they are gradients of, with Replicate where that is partial. Whether each needs a
        gradient must be the same on all ranks.

    Raises:
        LayoutError: shapes, meshes or placements that do not fit each other.
        BindError: dtypes that differ or that no program has; ranks that do not ask for the same product, before
        any
            byte of it moves.
        UnsupportedError: the transport is not available here.
        RankLostError, DeadlineError: other ranks are missing or late.
    """
    if not (isinstance(a, DTensor) and isinstance(b, DTensor)):
        raise LayoutError(f"matmul takes two DTensors, not {type(a).__name__} and {type(b).__name__}")
    if b.ndim != 2 or a.ndim < 1 or a.shape[-1] != b.shape[0]:
        raise LayoutError(
            f"a of shape {tuple(a.shape)} cannot be multiplied by b of shape {tuple(b.shape)}: (..., K) by (K, N)"
        )
    if a.dtype != b.dtype or a.dtype not in DTYPES:
        raise BindError(f"a is {a.dtype} and b {b.dtype}; both must be one of {', '.join(DTYPES.values())}")
    if stationary not in ("auto", "a", "b", "c"):
        raise LayoutError(f"stationary is {stationary!r}; it must be 'auto', 'a', 'b' or 'c'")
    how = _How(
        None if stationary == "auto" else stationary,
        transport,
        rates_of(cluster, a.device_mesh),
        context or TorchContext.default(a.device_mesh.device_type),
    )
    placements = None if out is None else tuple(out)
    result: DTensor = _Product.apply(a, b, placements, how)
    return result


def rates_of(cluster: Cluster | str | None, device_mesh: DeviceMesh) -> Rates:
    """The rates of a cluster, or of the catalog's for the kind of device. Raises DescriptionError."""
    if cluster is None:
        cluster = _MACHINES.get(device_mesh.device_type, "local-cpu")
    return _rates(cluster)


_KNOWN_RATES: dict[Cluster | str, Rates] = {}


def _rates(cluster: Cluster | str) -> Rates:
    if cluster not in _KNOWN_RATES:
        _KNOWN_RATES[cluster] = Rates.of(load_cluster(cluster) if isinstance(cluster, str) else cluster)
    return _KNOWN_RATES[cluster]


class _Product(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, a: DTensor, b: DTensor, out: tuple[Placement, ...] | None, how: _How) -> DTensor:
        ctx.save_for_backward(a, b)
        ctx.how = how
        shape = (*a.shape[:-1], b.shape[-1])
        return _multiply(_matrix(a), _matrix(b), shape, a.device_mesh, out, how)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: DTensor) -> tuple[DTensor | None, ...]:
        a, b = ctx.saved_tensors
        # What stays forward need not stay backward: there it is another product.
        how = replace(ctx.how, stationary=None)
        grad = _matrix(grads[0])
        of_a = of_b = None
        if ctx.needs_input_grad[0]:
            of_a = _multiply(grad, _matrix(b).transposed, a.shape, a.device_mesh, _whole(a), how)
        if ctx.needs_input_grad[1]:
            of_b = _multiply(_matrix(a).transposed, grad, b.shape, b.device_mesh, _whole(b), how)
        return of_a, of_b, None, None


def _whole(tensor: DTensor) -> DTensorSpec:
    """How the gradient of a tensor lies: as the tensor, but that of each term of a sum is the gradient of the
    sum."""
    spec = tensor._spec
    placements = tuple(Replicate() if isinstance(p, Partial) else p for p in spec.placements)
    return DTensorSpec(spec.mesh, placements) if placements != spec.placements else spec


def _matrix(tensor: DTensor) -> Matrix:
    """A DTensor as an operand: leading dims folded into rows."""
    local = tensor._local_tensor
    if isinstance(local, AsyncCollectiveTensor):
        local = local.wait()
    order: Order = None
    if tensor.ndim == 2:
        down, across = tensor.stride()
        order = (1, 0) if down < across else None
    else:
        local = local.reshape(math.prod(local.shape[:-1]), local.shape[-1])
    return Matrix(layout_of(tensor), matrix_shape(tuple(tensor.shape)), order, local.detach())


def _multiply(
    a: Matrix,
    b: Matrix,
    shape: Sequence[int],
    device_mesh: DeviceMesh,
    out: tuple[Placement, ...] | DTensorSpec | None,
    how: _How,
) -> DTensor:
    """The product of `matmul` outside autograd, as a DTensor of global `shape`; `out` may be that of another
    one."""
    shape = tuple(shape)
    order = None
    if out is None:
        spec_placements = _cheapest(a, b, shape, device_mesh, how)
    elif isinstance(out, DTensorSpec):
        spec_placements = out.placements
        order = None if out.use_strided_shard_as_shard_order else getattr(out, "shard_order", None)
    else:
        spec_placements = out
    layout = layout_on(device_mesh, spec_placements, shape, shard_order=order)
    problem = problem_of(a, b, layout, a.local.dtype)
    tuned = tune_universal(problem, how.rates, stationary=how.stationary)
    rank = device_mesh.get_rank()
    local = run_product(problem, tuned, rank, a.local, b.local, how.transport, how.context)
    if len(shape) != 2:
        local = local.view(Layout(layout.mesh, layout.placements).local_shape(shape, rank))
    stride = torch.empty(shape, device="meta").stride()
    spec = DTensorSpec(
        device_mesh,
        tuple(spec_placements),
        tensor_meta=TensorMeta(torch.Size(shape), stride, local.dtype),
        **({} if order is None else {"shard_order": order}),
    )
    return DTensor(local, spec, requires_grad=False)


def _cheapest(
    a: Matrix, b: Matrix, shape: Sequence[int], device_mesh: DeviceMesh, how: _How
) -> tuple[Placement, ...]:
    tried = list(product((*(Shard(dim) for dim in range(len(shape))), Replicate()), repeat=device_mesh.ndim))
    tried.sort(key=lambda placed: sum(isinstance(one, Replicate) for one in placed))
    layouts = [layout_on(device_mesh, placed, shape) for placed in tried]
    found: tuple[Placement, ...] = tried[cheapest(a, b, layouts, a.local.dtype, how.rates, how.stationary)]
    return found
