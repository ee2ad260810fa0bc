"""Linear layers fused with their collectives: communication that starts as tiles are finished, or starts them.

`linear_reduce_scatter` and `all_gather_linear` are the two products of a tensor-parallel layer whose activations
are sharded by rows in between (sequence parallelism). They run the programs of `algorithms.fused`, which are also
simulated, with their products written out by tiles. The backward pass of each is the other's program.

Ranks communicate along one dim of a device mesh: each ring of ranks along it runs a program of its own,
independently of the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.placement_types import Placement

from meshweave.algorithms.fused import Tiles
from meshweave.algorithms.fused.product import Parts
from meshweave.algorithms.universal.problem import UniversalProblem
from meshweave.base.errors import LayoutError, did_you_mean
from meshweave.describe.layout import Layout
from meshweave.describe.layout import Shard as LayoutShard
from meshweave.describe.layout.mesh import Mesh
from meshweave.execute.torch import compat
from meshweave.execute.torch.call_order import require_process_group, share_refusal
from meshweave.execute.torch.context import TorchContext
from meshweave.nn.autocast import autocast_operands
from meshweave.nn.custom_ops import refuse_second_derivative
from meshweave.nn.dtensor import mesh_of, require_member
from meshweave.nn.fused_placements import placed_linear
from meshweave.nn.fused_products import FusedKernels, FusedOptions, bound_product
from meshweave.nn.matmul_plans import check_dtypes
from meshweave.nn.products import DTYPES
from meshweave.nn.saved_versions import SavedVersions
from meshweave.nn.transports import Transport, check_transport

_ALL_GATHER = "t3_all_gather"
_NO_GRAPH = "a fused linear layer is no op of a graph; meshweave.matmul with overlap='fused' is one"
REDUCE_SCATTERS = ("t3_ring", "t3_direct", "t3_copied", "looped_reduce_scatter", "t3_sequential")
"""The algorithms of `linear_reduce_scatter`, by their names in `ALGORITHMS`."""


@dataclass(frozen=True)
class _Options:
    fused: FusedOptions
    context: TorchContext = field(compare=False)


@torch.compiler.disable(reason=_NO_GRAPH)  # type: ignore[untyped-decorator]
def linear_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    *,
    dim: int = 0,
    device_mesh: DeviceMesh | None = None,
    algorithm: str = "t3_ring",
    tiles: Tiles | None = None,
    transport: Transport = "auto",
    products: FusedKernels = "auto",
    context: TorchContext | None = None,
) -> Tensor:
    """Return this rank's part of the sum over ranks of x weight^T; all ranks of a ring call it.

        operand  local shape            global shape, of DTensors  placement on the mesh dim of the ring
        x        (..., d, K / ranks)    (..., d, K)                Shard(-1)
        weight   (N, K / ranks)         (N, K)                     Shard(1)
        result   (..., d / ranks, N)    (..., d, N)                Shard(dim)

    Each part of the result is computed by tiles, in an order that differs from rank to rank, and moves on as
    soon as all its terms are there. Differentiable once: the gradient of x is `all_gather_linear`'s program, and
    that of weight takes the rows that it gathers. Equal calls give equal bits. Under `torch.autocast` x and weight
    are cast as for `torch.nn.functional.linear`.

    DTensors may be on a mesh of several dims. On the others x may be sharded by rows, or weight by N (Shard(0)).
    All rings then run independently.

    Args:
        x: the local tensor of each rank, or a DTensor; so is `weight`.
        dim: the dim of the result, not the last, that is scattered; its size in x is d. Where ranks do not divide
            it the last one has less, which needs an x of two dims.
        device_mesh: for local tensors, the mesh of one dim whose ranks are the ring; None for the default process
            group.
        algorithm: "t3_ring", "t3_direct", "t3_copied"; without tiles "looped_reduce_scatter", "t3_sequential".
            `tune_fused` chooses by simulation.
        tiles: sizes and order of tiles; None for four tiles of whole rows to a part.
        transport: "messages", "shared" memory of one host, "mpi", "symmetric" memory on CUDA; "auto": shared
            where the ranks are processes of one host with tensors on the CPU, else messages.
        products: "tracked", one Triton kernel that counts its tiles, in memory that ranks share; "library", a
            call of torch for each tile; "auto", tracked on CUDA where the kernel has the dtype.
        context: process groups, deadline and liveness; by default those of the default process group.

    Raises:
        LayoutError: shapes or placements do not fit; some rank would have no rows, or parts would cut through d;
            `algorithm` or `products` has no such value, or the ring has one rank.
        BindError: dtypes differ, ranks are about to run different products, or there is no process group.
        UnsupportedError: the transport, or "tracked" over it, is not available here; a second derivative.
        RankLostError, DeadlineError: other ranks are missing or late. The error names the region that is not
            whole, its rank, and the ranks that have not delivered.
    """
    options = _options(FusedOptions(algorithm, tiles or Tiles(), transport, products), context, x)
    return _linear(x, weight, dim, device_mesh, options, is_gather=False)


@torch.compiler.disable(reason=_NO_GRAPH)  # type: ignore[untyped-decorator]
def all_gather_linear(
    x: Tensor,
    weight: Tensor,
    *,
    dim: int = 0,
    device_mesh: DeviceMesh | None = None,
    algorithm: str = "t3_ring",
    tiles: Tiles | None = None,
    transport: Transport = "auto",
    products: FusedKernels = "auto",
    context: TorchContext | None = None,
) -> Tensor:
    """Return x weight^T for the rows of all ranks; all ranks of a ring call it.

        operand  local shape            global shape, of DTensors  placement on the mesh dim of the ring
        x        (..., d / ranks, K)    (..., d, K)                Shard(dim)
        weight   (N / ranks, K)         (N, K)                     Shard(0)
        result   (..., d, N / ranks)    (..., d, N)                Shard(-1)

    Rows go around a ring, and those of a tile are multiplied as soon as they are there. Differentiable once: the
    gradient of x is `linear_reduce_scatter`'s program with `algorithm`; what was gathered is kept for that of
    weight. Local tensors have one shape on all ranks. Under `torch.autocast` x and weight are cast.

    Args:
        x: the local tensor of each rank, or a DTensor; so is `weight`.
        dim: the dim of x, not the last, that is gathered; of DTensors it is the one that x shards, in any case.
        algorithm: of the gradient of x, see `linear_reduce_scatter`.
        device_mesh: as for `linear_reduce_scatter`; so are tiles, transport, products and context.

    Raises:
        LayoutError: shapes or placements do not fit, some rank would have no rows, `algorithm` or `products` has
            no such value, or the ring has one rank.
        BindError: dtypes differ, ranks are about to run different products, or there is no process group.
        UnsupportedError: the transport, or "tracked" over it, is not available here; a second derivative.
        RankLostError, DeadlineError: other ranks are missing or late.
    """
    options = _options(FusedOptions(algorithm, tiles or Tiles(), transport, products), context, x)
    return _linear(x, weight, dim, device_mesh, options, is_gather=True)


def _linear(
    x: Tensor, weight: Tensor, dim: int, device_mesh: DeviceMesh | None, options: _Options, *, is_gather: bool
) -> Tensor:
    """Return the result of `all_gather_linear` or `linear_reduce_scatter`.

    x is seen as a matrix whose rows begin with its dim `dim`.
    """
    name = "all_gather_linear" if is_gather else "linear_reduce_scatter"
    with share_refusal(options.context, _ranks(x, device_mesh, name), name):
        x, weight = autocast_operands(x.device.type, x, weight)
        dim = _checked(x, weight, dim, device_mesh, name)
        if isinstance(x, DTensor):
            assert isinstance(weight, DTensor)
            placed = placed_linear(
                compat.spec_of(x), compat.spec_of(weight), dim, is_gather=is_gather, name=name
            )
            local_x, local_w = _local(x, placed.grads_x), _local(weight, placed.grads_w)
            problem, dim = placed.problem, placed.dim
        else:
            local_x, local_w, placed = x, weight, None
            problem = _of_local(x, weight, dim, device_mesh, is_gather=is_gather, name=name)
        rows = local_x.movedim(dim, 0)
        lead = rows.shape[1:-1]
        saved = (None if is_gather else x, weight) if placed is not None else ()
        versions = SavedVersions(saved)
        matrix = _FusedLinear.apply(rows.flatten(0, -2), local_w, problem, options, versions, is_gather)
        size = matrix.shape[0] // math.prod(lead)
        local: Tensor = matrix.reshape(size, *lead, matrix.shape[-1]).movedim(0, dim)
        if placed is None:
            return local
        shape = torch.Size((*x.shape[:-1], weight.shape[0]))
        stride = torch.empty(shape, device="meta").stride()
        result: Tensor = DTensor.from_local(
            local.contiguous(), x.device_mesh, placed.out, run_check=False, shape=shape, stride=stride
        )
        return result


# --- autograd ---------------------------------------------------------------------------------------------------


class _FusedLinear(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        problem: UniversalProblem,
        options: _Options,
        versions: SavedVersions,
        is_gather: bool,
    ) -> Tensor:
        """Return the result, and keep what gradients need: x, or all of it where it is gathered, and weight."""
        if is_gather:
            result, kept = _all_gather(x, weight.t(), problem, options)
        else:
            result, kept = _reduce_scatter(x, weight.t(), problem, options), x
        ctx.save_for_backward(kept, weight)
        ctx.problem, ctx.options, ctx.versions, ctx.is_gather = problem, options, versions, is_gather
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the arguments; None for what has none."""
        refuse_second_derivative("a fused linear layer")
        kept, weight = ctx.saved_tensors
        ctx.versions.check()
        grad, sizes = grads[0], replace(ctx.problem, n=ctx.problem.k, k=ctx.problem.n)
        if ctx.is_gather:
            grad_x = _reduce_scatter(grad, weight, sizes, ctx.options)
        else:
            grad_x, grad = _all_gather(grad, weight, sizes, ctx.options)
        return grad_x, grad.t() @ kept, None, None, None, None


# --- on local matrices ---------------------------------------------------------------------------------------


def _reduce_scatter(a: Tensor, b: Tensor, sizes: UniversalProblem, options: _Options) -> Tensor:
    """Return this rank's rows of A B, of which `a` has columns and `b` rows."""
    bound = bound_product(_problem(a, b, sizes, (1, 0, 0)), options.fused, options.context).touch()
    bound.run({"a": a, "b": b})
    return bound.outputs["c"].clone()


def _all_gather(a: Tensor, b: Tensor, sizes: UniversalProblem, options: _Options) -> tuple[Tensor, Tensor]:
    """Return the columns of A B that `b` has, and all of A, of which `a` has this rank's rows."""
    problem = _problem(a, b, sizes, (0, 1, 1))
    fused = replace(options.fused, algorithm=_ALL_GATHER)
    bound = bound_product(problem, fused, options.context).touch()
    bound.run({"a": a, "b": b})
    gathered = bound.scratch["gathered"].clone()
    ranks = problem.a.mesh.ranks
    start = Parts(problem.m, len(ranks)).size * ranks.index(bound.rank)
    gathered[start : start + a.shape[0]] = a  # no rank sends itself its own rows
    return bound.outputs["c"].clone(), gathered


def _problem(a: Tensor, b: Tensor, sizes: UniversalProblem, shards: tuple[int, int, int]) -> UniversalProblem:
    """Return the product of `sizes` on its ring with operands that lie as in memory."""
    of_a, of_b, of_c = (Layout(sizes.a.mesh, (LayoutShard(dim),)) for dim in shards)
    order_a, order_b = ((1, 0) if one.stride(0) == 1 and one.stride(1) > 1 else None for one in (a, b))
    return UniversalProblem(*sizes.sizes, of_a, of_b, of_c, DTYPES[a.dtype], (order_a, order_b, None))


# --- arguments ----------------------------------------------------------------------------------------------


def _options(fused: FusedOptions, context: TorchContext | None, x: Tensor) -> _Options:
    require_process_group()
    algorithm = fused.algorithm
    if algorithm not in REDUCE_SCATTERS:
        raise LayoutError(
            f"algorithm is {algorithm!r}{did_you_mean(algorithm, REDUCE_SCATTERS)}; it must be one of "
            f"{', '.join(REDUCE_SCATTERS)}"
        )
    check_transport(fused.transport)
    if fused.products not in get_args(FusedKernels):
        kinds = ", ".join(get_args(FusedKernels))
        raise LayoutError(f"products is {fused.products!r}; it must be one of {kinds}")
    return _Options(fused, context or TorchContext.default(x.device.type))


def _ranks(x: Tensor, device_mesh: DeviceMesh | None, name: str) -> tuple[int, ...]:
    """Return the ranks that call a layer together: of DTensors those of their mesh.

    Raises LayoutError where this rank is none of them.
    """
    mesh = x.device_mesh if isinstance(x, DTensor) else device_mesh
    if mesh is None:
        return tuple(range(int(torch.distributed.get_world_size())))
    require_member(mesh, name)
    return mesh_of(mesh).ranks


def _checked(x: Tensor, weight: Tensor, dim: int, device_mesh: DeviceMesh | None, name: str) -> int:
    """Return `dim` counted from the front. Raises LayoutError, BindError."""
    if x.ndim < 2 or weight.ndim != 2 or x.shape[-1] != weight.shape[1]:
        raise LayoutError(
            f"{name} of x {tuple(x.shape)} and weight {tuple(weight.shape)}: they must be (..., K) and (N, K), "
            "with at least two dims each"
        )
    if isinstance(x, DTensor) != isinstance(weight, DTensor):
        raise LayoutError(f"{name} of a DTensor and a plain tensor: make both DTensors, or neither")
    if not -x.ndim <= dim < x.ndim or dim % x.ndim == x.ndim - 1:
        raise LayoutError(f"{name}: dim {dim} of x of {x.ndim} dims; it must be one of them but the last")
    check_dtypes(x=x, weight=weight)
    if isinstance(x, DTensor):
        if device_mesh is not None:
            raise LayoutError(f"{name}: DTensors have a device mesh of their own; give none")
        if x.device_mesh != weight.device_mesh:
            raise LayoutError(f"{name}: x is on {x.device_mesh}, weight on {weight.device_mesh}")
    elif device_mesh is not None and device_mesh.ndim != 1:
        raise LayoutError(
            f"{name}: device_mesh has {device_mesh.ndim} dims; give the one of the ring, as in mesh['tp']"
        )
    return int(dim % x.ndim)


def _of_local(
    x: Tensor, weight: Tensor, dim: int, device_mesh: DeviceMesh | None, *, is_gather: bool, name: str
) -> UniversalProblem:
    """Return the product of local tensors on their ring. Raises LayoutError."""
    ranks = _ranks(x, device_mesh, name)
    count = len(ranks)
    rows, n, k = math.prod(x.shape[:-1]), weight.shape[0], weight.shape[1]
    if not is_gather and x.ndim > 2 and x.shape[dim] % count:
        raise LayoutError(
            f"{name}: {count} ranks do not divide dim {dim} of x {tuple(x.shape)}, which they must where x has "
            "three dims or more"
        )
    m, n, k = (rows * count, n * count, k) if is_gather else (rows, n, k * count)
    mesh = Mesh("tp", (count,), ("x",), ranks)
    a, b, c = (Layout(mesh, (LayoutShard(at),)) for at in ((0, 1, 1) if is_gather else (1, 0, 0)))
    return UniversalProblem(m, n, k, a, b, c, DTYPES[x.dtype])


def _local(one: DTensor, grads: tuple[Placement, ...]) -> Tensor:
    """Return the local tensor of a DTensor whose gradient is computed in `grads`, and summed up where partial."""
    if not any(isinstance(placement, Partial) for placement in grads):
        return one.to_local()
    # The backward pass of `redistribute` makes the gradient lie as its argument does.
    return one.redistribute(one.device_mesh, one.placements).to_local(grad_placements=grads)
