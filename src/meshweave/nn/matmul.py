"""`meshweave.matmul`: the product of two DTensors, whatever their placements, without resharding either.

Each operand stays as it is; the universal product (Slicing Is All You Need) moves only the parts that a rank
needs and does not have. Which matrix stays put, and how the work is split, is tuned once per kind of product;
programs are bound once and reused.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, TypedDict, Unpack

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from meshweave.algorithms.universal.config import STAGE_LIMITS, ScheduleKind, StageLimits
from meshweave.base.errors import LayoutError
from meshweave.describe.machine.cluster import Cluster
from meshweave.execute.torch import compat
from meshweave.execute.torch.call_order import require_process_group, share_refusal
from meshweave.execute.torch.context import TorchContext
from meshweave.nn.autocast import autocast_operands
from meshweave.nn.custom_ops import refuse_second_derivative
from meshweave.nn.dtensor import MatrixView, mesh_of, require_dtensors, require_member, size_text
from meshweave.nn.in_graphs import (
    CLUSTER_NO_CONSTANT,
    allow_in_graph,
    context_of,
    placement_texts,
    placements_from,
)
from meshweave.nn.matmul2d_dtensors import matmul2d_of_dtensors
from meshweave.nn.matmul2d_programs import Slices
from meshweave.nn.matmul_plans import (
    Calls,
    MatmulOptions,
    Overlap,
    Stationary,
    check_dtypes,
    checked_placements,
    multiply,
    plan_of,
)
from meshweave.nn.saved_versions import SavedVersions
from meshweave.nn.shard_spec import ShardSpec
from meshweave.nn.transports import Transport


def matmul(
    a: DTensor,
    b: DTensor,
    out: Sequence[Placement] | None = None,
    stationary: Stationary = "auto",
    *,
    transport: Transport = "auto",
    cluster: Cluster | str | None = None,
    context: TorchContext | None = None,
    schedule: ScheduleKind = "direct",
    limits: StageLimits = STAGE_LIMITS,
    overlap: Overlap = "auto",
    algorithm: str | None = None,
    slices: Slices = 4,
) -> DTensor:
    """Return C = A B of DTensors with any placements; every rank of their meshes calls it.

    Under `torch.autocast` operands are cast as for `torch.matmul`. In a graph of
    `torch.compile` a call is one op of local tensors, forward and backward each.

        operand  global shape  placements
        a        (..., K)      any, leading dims included
        b        (K, N)        any, on a's device mesh or one of another shape over the same ranks
        result   (..., N)      `out`, on a's device mesh

    Args:
        out: the placements of C, one per dim of a's device mesh: Shard, Replicate, Partial("sum") or
            _StridedShard. None takes what costs least of Shard and Replicate: the least time with a `cluster` or
            in shared memory, else the fewest bytes.
        stationary: the matrix that is not moved, "a", "b" or "c"; "auto" leaves that to the tuner.
        transport: "shared" (memory that the ranks of one host share: they read each other's operands in place),
            "messages" (matched send and recv, which work anywhere), "mpi" (remote memory access) or "symmetric"
            (torch symmetric memory on CUDA). "auto" is "shared" where all ranks of the product are processes of
            one host with tensors on the CPU, else "messages".
        cluster: the machine, described (best by `meshweave calibrate`) or named as in the catalog: the variant
            that is estimated to be fastest on it is taken, even where that moves more. None assumes nothing about
            a network: over messages the variant that moves least is taken, which is never more than DTensor moves
            for the same placements. All ranks must name the same.
        context: process groups, deadline and liveness; by default those of the default process group.
        schedule: the order in which a rank issues its fetches, products and accumulates: "direct" as its steps are
            listed, or "greedy", "cost-greedy", "exhaustive" by their costs on the cluster, which need the package
            meshweave-studies. The gradients take it too. `meshweave tune schedule` simulates all four. All ranks
            must give the same.
        limits: the most products, fetches and accumulates of one stage of such a schedule; also how many products,
            and accumulates, a rank may run at once.
        overlap: how communication is hidden. "slices": by the universal product, which fetches the next slices
            while it multiplies. "fused": tile by tile, by the entries of `algorithms.fused`. On one mesh dim `a`
            is then sharded by columns, `b` and `out` by rows (a reduce-scatter behind the product), or `a` by
            rows, `b` and `out` by columns (an all-gather before it). Gradients are fused where their operands are
            sharded in one of these ways. "auto": the universal product, or over messages a fused one that is
            simulated to be faster on `cluster`.
        algorithm: the name of a 2D product of `ALGORITHMS` ("meshslice", "wang", "summa", ...) in place of all
            these. Both operands are then matrices on one mesh of two dims, stored as [Shard(0), Shard(1)]; one of
            them may be given as its `.t()`, which is the dataflow: A B is "os", A B.t() "ls", A.t() B "rs".
            Gradients have the placements of what they are gradients of, and no matrix is transposed.
        slices: with `algorithm`, MeshSlice's slice count, or the relative widths of unequal slices; else unused.

    Returns:
        A DTensor on a's device mesh of the operands' dtype. Its copies on several ranks have the same bits, and so
        have those of gradients. Over messages and in shared memory the same call gives the same bits each time.
        Once differentiable in a and b: gradients have the placements of what they are gradients of, with Replicate
        where that is partial. Whether each needs a gradient must be the same on all ranks.

    Raises:
        LayoutError: shapes, meshes or placements that do not fit each other; this rank is not in a's mesh; an
            `algorithm` beside an option that it does not have.
        BindError: dtypes that differ or that no program has; ranks that do not ask for the same product at the
            first one of its kind, before any byte of it moves.
        UnsupportedError: there is no such transport or algorithm, or it is not available here; in a backward pass,
            a second derivative.
        RankLostError, DeadlineError: other ranks are missing or late.
    """
    if algorithm is not None:
        others = _given(stationary, transport, cluster, schedule, limits, overlap)
        return matmul2d_of_dtensors(a, b, out, algorithm, slices, context, others)
    if torch.compiler.is_dynamo_compiling():
        constants: _Constants = {
            "stationary": stationary,
            "transport": transport,
            "schedule": schedule,
            "overlap": overlap,
        }
        return _matmul_of_dynamo(a, b, out, cluster, context, limits, **constants)
    require_process_group()
    require_dtensors(a, b)
    require_member(a.device_mesh, "matmul")
    device_type = a.device_mesh.device_type
    context = context or TorchContext.default(device_type)
    settings = stationary, transport, cluster, schedule, limits, overlap
    can_be_key = isinstance(limits, StageLimits) and isinstance(cluster, Hashable)
    key = _key(a, b, out, settings) if can_be_key else None
    if key is not None:
        plan = context.cache(Calls).get(key)
        if plan is not None:
            return plan.run(MatrixView(a).local, MatrixView(b).local)
    title = f"matmul {size_text(a.shape)} @ {size_text(b.shape)}"
    with share_refusal(context, mesh_of(a.device_mesh).ranks, title):
        options = MatmulOptions.of(
            device_type, stationary, transport, cluster, context, schedule, limits, overlap
        )
        _check_shapes(a, b)
        a, b = autocast_operands(device_type, a, b)
        check_dtypes(a=a, b=b)
        target = checked_placements(out, a.ndim)
        if key is not None:
            views, shape = (MatrixView(a), MatrixView(b)), torch.Size((*a.shape[:-1], b.shape[-1]))
            plan = plan_of(*views, shape, ShardSpec(a.device_mesh, target), options)
            context.cache(Calls)[key] = plan
            plan.product.tie(context.cache(Calls), key)
            return plan.run(*(view.local for view in views))
        result: DTensor = _MatmulFunction.apply(a, b, target, options)
        return result


def _check_shapes(a: DTensor, b: DTensor) -> None:
    if b.ndim != 2 or a.ndim < 1 or a.shape[-1] != b.shape[0]:
        raise LayoutError(
            f"a of shape {tuple(a.shape)} cannot be multiplied by b of shape {tuple(b.shape)}: "
            "(..., K) by (K, N)"
        )


_DEFAULTS = {
    "stationary": "auto",
    "transport": "auto",
    "cluster": None,
    "schedule": "direct",
    "limits": STAGE_LIMITS,
    "overlap": "auto",
}


def _given(*settings: Any) -> list[str]:
    """Return which options of the universal product are not the default ones, by name."""
    return [name for (name, default), one in zip(_DEFAULTS.items(), settings, strict=True) if one != default]


def _key(
    a: DTensor, b: DTensor, out: Sequence[Placement] | None, settings: tuple[Hashable, ...]
) -> tuple[Hashable, ...] | None:
    """Return what says which plan a call runs; None where that is not for the call alone to say."""
    is_listed = out is None or isinstance(out, (list, tuple))
    if (
        not is_listed
        or (torch.is_grad_enabled() and (a.requires_grad or b.requires_grad))
        or torch.is_autocast_enabled(a.device_mesh.device_type)
        or compat.is_traced(compat.local_tensor(a))
    ):
        return None
    return compat.spec_of(a), compat.spec_of(b), None if out is None else tuple(out), *settings


class _Constants(TypedDict):
    """Arguments of `matmul` that are constants of a graph."""

    stationary: Stationary
    transport: Transport
    schedule: ScheduleKind
    overlap: Overlap


def _matmul_of_dynamo(
    a: DTensor,
    b: DTensor,
    out: Sequence[Placement] | None,
    cluster: Cluster | str | None,
    context: TorchContext | None,
    limits: StageLimits,
    **constants: Unpack[_Constants],
) -> DTensor:
    """Put a call of `matmul` into the graph that dynamo traces; break the graph where it cannot be in one."""
    if not (cluster is None or isinstance(cluster, str)):
        return _uncompiled_matmul(a, b, out, cluster=cluster, context=context, limits=limits, **constants)
    texts, number = placement_texts(out), -1 if context is None else context.number
    most = limits.products, limits.fetches, limits.accumulates
    return _matmul_in_graph(a, b, texts, cluster, number, most, **constants)


_uncompiled_matmul = torch.compiler.disable(matmul, reason=CLUSTER_NO_CONSTANT)


@allow_in_graph  # type: ignore[untyped-decorator]
def _matmul_in_graph(
    a: DTensor,
    b: DTensor,
    out: Any,
    cluster: str | None,
    number: int,
    limits: tuple[int, int, int],
    **constants: Unpack[_Constants],
) -> DTensor:
    """Return a product of `matmul` whose arguments are those of a graph."""
    context, most = context_of(number, a.device_mesh.device_type), StageLimits(*limits)
    return matmul(a, b, placements_from(out), cluster=cluster, context=context, limits=most, **constants)


# --- autograd ---------------------------------------------------------------------------------------------------


class _MatmulFunction(torch.autograd.Function):  # type: ignore[misc]
    """C = A B; A' = C' B^T and B' = A^T C', each a product of its own."""

    @staticmethod
    def forward(
        ctx: Any, a: DTensor, b: DTensor, out: tuple[Placement, ...] | None, options: MatmulOptions
    ) -> DTensor:
        """Return the result, and keep what gradients need."""
        save_operands(ctx, a, b)
        ctx.specs, ctx.options = (ShardSpec.of(a).gradient, ShardSpec.of(b).gradient), options
        ctx.shapes = a.shape, b.shape
        shape = torch.Size((*a.shape[:-1], b.shape[-1]))
        return multiply(MatrixView(a), MatrixView(b), shape, ShardSpec(a.device_mesh, out), options)

    @staticmethod
    def backward(ctx: Any, *grads: DTensor) -> tuple[DTensor | None, ...]:
        """Return the gradients of the arguments; None for what has none."""
        refuse_second_derivative("a product of DTensors")
        a, b = ctx.saved_tensors
        ctx.versions.check()
        options = ctx.options.of_gradient
        grad, grad_a, grad_b = MatrixView(grads[0]), None, None
        if ctx.needs_input_grad[0]:
            grad_a = multiply(grad, MatrixView(b, is_transposed=True), ctx.shapes[0], ctx.specs[0], options)
        if ctx.needs_input_grad[1]:
            grad_b = multiply(MatrixView(a, is_transposed=True), grad, ctx.shapes[1], ctx.specs[1], options)
        return grad_a, grad_b, None, None


def save_operands(ctx: Any, a: DTensor, b: DTensor) -> None:
    """Save a and b in `ctx`, the context of an autograd function, for the backward pass.

    a is saved only if b needs a gradient, and b only if a does, else None. `ctx.versions` becomes the
    `SavedVersions` of what is saved, with which the backward pass finds changes in place.
    """
    saved = a if ctx.needs_input_grad[1] else None, b if ctx.needs_input_grad[0] else None
    ctx.save_for_backward(*saved)
    ctx.versions = SavedVersions(saved)
