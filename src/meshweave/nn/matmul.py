"""`meshweave.matmul`: the product of two DTensors, whatever their placements, without resharding either.

Each operand stays as it is; the universal product (Slicing Is All You Need) moves only the parts that a rank
needs and does not have. Which matrix stays put, and how the work is split, is tuned once per kind of product;
programs are bound once and reused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from meshweave.algorithms.universal import Operand
from meshweave.algorithms.universal.config import SCHEDULE_KINDS, ScheduleKind
from meshweave.algorithms.universal.schedule import STAGE_LIMITS, StageLimits
from meshweave.base.errors import BindError, LayoutError, UnsupportedError
from meshweave.cost.rates import RankRates
from meshweave.describe.layout import Layout
from meshweave.describe.machine.cluster import Cluster, load_cluster
from meshweave.execute.torch import compat
from meshweave.execute.torch.cache import CachedProgram
from meshweave.execute.torch.call_order import call_order, require_process_group, share_refusal
from meshweave.execute.torch.context import TorchContext
from meshweave.nn.dtensor import MatrixView, from_the_front, layout_on, mesh_of, size_text
from meshweave.nn.products import DTYPES, LocalProduct, Matrix, cheapest, prepare_cached, problem_of, tune
from meshweave.nn.shard_spec import ShardSpec
from meshweave.nn.transports import Transport, check_transport, resolve

Stationary = Literal["auto", "a", "b", "c"]

NOT_COMPILED = (
    "meshweave plans, binds and runs distributed programs in Python: torch.compile has nothing to trace"
)

_MACHINES = {"cpu": "local-cpu", "cuda": "h100-node"}
"""The cluster of the catalog whose rates choose among variants that move the same, where the caller names none."""


@dataclass(frozen=True)
class MatmulOptions:
    """How a product is computed, forward and backward.

    Attributes:
        stationary: the operand that is not moved in the forward pass; None leaves that to the tuner.
        rates: those of the cluster that the caller names, or None.
        default_rates: what decides among equals where there is no cluster.
        schedule, limits: in which order ranks issue their steps, and how many at once.
    """

    stationary: Operand | None
    transport: Transport
    rates: RankRates | None
    default_rates: RankRates
    context: TorchContext = field(compare=False)
    schedule: ScheduleKind = "direct"
    limits: StageLimits = STAGE_LIMITS

    @classmethod
    def of(
        cls,
        device_type: str,
        stationary: Stationary,
        transport: Transport,
        cluster: Cluster | str | None,
        context: TorchContext | None,
        schedule: ScheduleKind = "direct",
        limits: StageLimits = STAGE_LIMITS,
    ) -> MatmulOptions:
        """Return the options for arguments of `matmul`. Raises LayoutError, UnsupportedError, DescriptionError."""
        if stationary not in ("auto", "a", "b", "c"):
            raise LayoutError(f"stationary is {stationary!r}; it must be 'auto', 'a', 'b' or 'c'")
        if schedule not in SCHEDULE_KINDS:
            raise LayoutError(f"schedule is {schedule!r}; it must be one of {', '.join(SCHEDULE_KINDS)}")
        check_transport(transport)
        return cls(
            None if stationary == "auto" else stationary,
            transport,
            None if cluster is None else _rates(cluster),
            _rates(_MACHINES.get(device_type, "local-cpu")),
            context or TorchContext.default(device_type),
            schedule,
            limits,
        )


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
) -> DTensor:
    """C = A B of DTensors with any placements; every rank of their meshes calls it.

    Under `torch.autocast` operands are cast as for `torch.matmul`. `torch.compile` breaks the graph at the call.

        operand  global shape  placements
        a        (..., K)      any, leading dims included
        b        (K, N)        any, on a's device mesh or one of another shape over the same ranks
        result   (..., N)      `out`, on a's device mesh

    Args:
        out: the placements of C, one per dim of a's device mesh: Shard, Replicate, Partial("sum") or
            _StridedShard. None takes what is cheapest of Shard and Replicate by the same measure.
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
            listed, or "greedy", "cost-greedy", "exhaustive" by their costs on the cluster. The gradients take it
            too. `search_schedule` simulates all four. All ranks must give the same.
        limits: the most products, fetches and accumulates of one stage of such a schedule; also how many products,
            and accumulates, a rank may run at once.

    Returns:
        A DTensor on a's device mesh of the operands' dtype. Its copies on several ranks have the same bits, and so
        have those of gradients. Over messages and in shared memory the same call gives the same bits each time.
        Once differentiable in a and b: gradients have the placements of what they are gradients of, with Replicate
        where that is partial. Whether each needs a gradient must be the same on all ranks.

    Raises:
        LayoutError: shapes, meshes or placements that do not fit each other.
        BindError: dtypes that differ or that no program has; ranks that do not ask for the same product at the
            first one of its kind, before any byte of it moves.
        UnsupportedError: there is no such transport, or it is not available here; in a backward pass, a second
            derivative.
        RankLostError, DeadlineError: other ranks are missing or late.
    """
    if torch.compiler.is_compiling():
        return _uncompiled_matmul(a, b, out, stationary, transport, cluster, context, schedule, limits)
    require_process_group()
    if not (isinstance(a, DTensor) and isinstance(b, DTensor)):
        raise LayoutError(f"matmul takes two DTensors, not {type(a).__name__} and {type(b).__name__}")
    device_type = a.device_mesh.device_type
    context = context or TorchContext.default(device_type)
    needs_grad = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)
    key = None
    is_listed = out is None or isinstance(out, (list, tuple))
    if is_listed and not needs_grad and not torch.is_autocast_enabled(device_type):
        placements = None if out is None else tuple(out)
        settings = placements, stationary, transport, cluster, schedule, limits
        key = compat.spec_of(a), compat.spec_of(b), *settings
        plan = context.cache(_Calls).get(key)
        if plan is not None:
            return plan.run(MatrixView(a).local, MatrixView(b).local)
    title = f"matmul {size_text(a.shape)} @ {size_text(b.shape)}"
    with share_refusal(context, mesh_of(a.device_mesh).ranks, title):
        options = MatmulOptions.of(device_type, stationary, transport, cluster, context, schedule, limits)
        if b.ndim != 2 or a.ndim < 1 or a.shape[-1] != b.shape[0]:
            raise LayoutError(
                f"a of shape {tuple(a.shape)} cannot be multiplied by b of shape {tuple(b.shape)}: "
                "(..., K) by (K, N)"
            )
        a, b = autocast_operands(device_type, a, b)
        check_dtypes(a=a, b=b)
        target = checked_placements(out, a.ndim)
        if key is not None:
            views, shape = (MatrixView(a), MatrixView(b)), torch.Size((*a.shape[:-1], b.shape[-1]))
            plan = plan_of(*views, shape, ShardSpec(a.device_mesh, target), options)
            context.cache(_Calls)[key] = plan
            plan.product.tie(context.cache(_Calls), key)
            return plan.run(*(view.local for view in views))
        result: DTensor = _MatmulFunction.apply(a, b, target, options)
        return result


@torch.compiler.disable(reason=NOT_COMPILED)  # type: ignore[untyped-decorator]
def _uncompiled_matmul(*arguments: Any) -> DTensor:
    *positional, transport, cluster, context, schedule, limits = arguments
    return matmul(
        *positional,
        transport=transport,
        cluster=cluster,
        context=context,
        schedule=schedule,
        limits=limits,
    )


def autocast_operands(device_type: str, *operands: Any) -> tuple[Any, ...]:
    """Return the operands as `torch.autocast` has those of a product, differentiably: floating ones other than
    float64 in its dtype where it is enabled. None stays None."""
    if not torch.is_autocast_enabled(device_type):
        return operands
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(
        operand.to(dtype)
        if operand is not None and operand.is_floating_point() and operand.dtype != torch.float64
        else operand
        for operand in operands
    )


def check_dtypes(**operands: Tensor) -> None:
    """Raise BindError where operands are not of one dtype that programs have."""
    dtypes = {operand.dtype for operand in operands.values()}
    if len(dtypes) > 1 or not dtypes <= set(DTYPES):
        listed = " and ".join(f"{name} {operand.dtype}" for name, operand in operands.items())
        raise BindError(f"dtypes are {listed}; all must be one of {', '.join(DTYPES.values())}")


def checked_placements(out: Sequence[Placement] | None, num_dims: int) -> tuple[Placement, ...] | None:
    """Return `out` of a result of `num_dims` dims, with dims counted from the front. Raises LayoutError."""
    if out is None:
        return None
    if isinstance(out, (Placement, str)) or not isinstance(out, Sequence):
        raise LayoutError(f"out is {out!r}; it must be a sequence with one placement per dim of the mesh")
    return tuple(from_the_front(placement, num_dims, "out") for placement in out)


_KNOWN_RATES: dict[Cluster | str, RankRates] = {}


def _rates(cluster: Cluster | str) -> RankRates:
    """Return the rates of a cluster, described or named as in the catalog. Raises DescriptionError."""
    if cluster not in _KNOWN_RATES:
        _KNOWN_RATES[cluster] = RankRates.of(load_cluster(cluster) if isinstance(cluster, str) else cluster)
    return _KNOWN_RATES[cluster]


# --- autograd ---------------------------------------------------------------------------------------------------


class _MatmulFunction(torch.autograd.Function):  # type: ignore[misc]
    """C = A B; A' = C' B^T and B' = A^T C', each a product of its own."""

    @staticmethod
    def forward(
        ctx: Any, a: DTensor, b: DTensor, out: tuple[Placement, ...] | None, options: MatmulOptions
    ) -> DTensor:
        ctx.save_for_backward(*saved_operands(ctx, a, b))
        ctx.specs, ctx.options = (ShardSpec.of(a).gradient, ShardSpec.of(b).gradient), options
        ctx.shapes = a.shape, b.shape
        shape = torch.Size((*a.shape[:-1], b.shape[-1]))
        return multiply(MatrixView(a), MatrixView(b), shape, ShardSpec(a.device_mesh, out), options)

    @staticmethod
    def backward(ctx: Any, *grads: DTensor) -> tuple[DTensor | None, ...]:
        refuse_second_derivative()
        a, b = ctx.saved_tensors
        # What stays forward need not stay backward: there it is another product.
        options = replace(ctx.options, stationary=None)
        grad, grad_a, grad_b = MatrixView(grads[0]), None, None
        if ctx.needs_input_grad[0]:
            grad_a = multiply(grad, MatrixView(b, is_transposed=True), ctx.shapes[0], ctx.specs[0], options)
        if ctx.needs_input_grad[1]:
            grad_b = multiply(MatrixView(a, is_transposed=True), grad, ctx.shapes[1], ctx.specs[1], options)
        return grad_a, grad_b, None, None


def refuse_second_derivative() -> None:
    """Raise UnsupportedError where a backward pass is itself to be differentiated (`create_graph=True`).

    torch's `once_differentiable` lets that pass, and drops terms, where the incoming gradient needs no gradient.
    """
    if torch.is_grad_enabled():
        raise UnsupportedError(
            "products of DTensors are differentiable once, and create_graph=True asks for more"
        )


def saved_operands(ctx: Any, a: DTensor, b: DTensor) -> tuple[DTensor | None, DTensor | None]:
    """Return the operands that must be saved for the backward pass, None for the others: each is a factor of the
    other's gradient."""
    return a if ctx.needs_input_grad[1] else None, b if ctx.needs_input_grad[0] else None


# --- outside autograd -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MatmulPlan:
    """A product, tuned and bound: what multiplies local parts, the spec of the result and its local shape."""

    product: CachedProgram[LocalProduct]
    spec: compat.DTensorSpec
    local_shape: tuple[int, ...]

    def run(self, a: Tensor, b: Tensor) -> DTensor:
        """Return the product of this rank's parts a (local rows, local k) and b (local k, local columns)."""
        local = self.product.touch()(a, b)
        if len(self.local_shape) != 2:
            local = local.view(self.local_shape)
        return compat.from_spec(local, self.spec)


class _Plans(dict[Any, MatmulPlan]):
    """The plans of a context by what is multiplied how."""


class _Calls(dict[Any, MatmulPlan]):
    """The plans of a context by the arguments of a call of `matmul` that needs no gradient."""


def multiply(
    a: MatrixView, b: MatrixView, shape: torch.Size, out: ShardSpec, options: MatmulOptions
) -> DTensor:
    """Return the product of `matmul` outside autograd; arguments as for `plan_of`."""
    return plan_of(a, b, shape, out, options).run(a.local, b.local)


def plan_of(
    a: MatrixView, b: MatrixView, shape: torch.Size, out: ShardSpec, options: MatmulOptions
) -> MatmulPlan:
    """Return the plan of a product, made at the first of a kind by all of its ranks together.

    Args:
        shape: of the result, which may have several dims that are rows of the product.
        out: how the result lies; without placements what is cheapest.
    """
    specs = compat.spec_of(a.tensor), compat.spec_of(b.tensor)
    key = specs, a.is_transposed, b.is_transposed, shape, out, options
    plans = options.context.cache(_Plans)
    plan = plans.get(key)
    if plan is None:
        (m, k), (_, n) = (v.shape[::-1] if v.is_transposed else v.shape for v in (a, b))
        title = f"matmul {m}x{k} @ {k}x{n}"
        # What is bound outlives the call, and later ones may be outside inference mode.
        with call_order(options.context).titled(title), torch.inference_mode(False):
            plan = plans[key] = _new_plan(a, b, tuple(shape), out, options)
        plan.product.tie(plans, key)
    return plan


def _new_plan(
    a: MatrixView, b: MatrixView, shape: tuple[int, ...], out: ShardSpec, options: MatmulOptions
) -> MatmulPlan:
    mesh, dtype, context = out.device_mesh, a.tensor.dtype, options.context
    specs = [out] if out.placements is not None else _candidates(out, len(shape))
    layouts = [layout_on(mesh, spec.placements or (), shape, shard_order=spec.shard_order) for spec in specs]
    matrices = _matrix(a), _matrix(b)
    problems = [problem_of(*matrices, layout, dtype) for layout in layouts]
    transport = resolve(options.transport, problems[0].ranks, context)
    measure = transport, options.rates, options.stationary, options.default_rates
    best = cheapest(problems, *measure)
    rank = mesh.get_rank()
    tuned = tune(problems[best], *measure, options.schedule, options.limits)
    run = prepare_cached(problems[best], tuned, rank, options.transport, context)
    layout = layouts[best]
    local_shape = Layout(layout.mesh, layout.placements).local_shape(shape, rank)
    return MatmulPlan(run, specs[best].torch_spec(shape, dtype), local_shape)


def _matrix(view: MatrixView) -> Matrix:
    matrix = Matrix(view.layout, view.shape, view.order)
    return matrix.transposed if view.is_transposed else matrix


def _candidates(out: ShardSpec, num_dims: int) -> list[ShardSpec]:
    """Return the specs with every placement of Shard and Replicate, those with fewest copies first."""
    each = (*(Shard(dim) for dim in range(num_dims)), Replicate())
    tried = list(product(each, repeat=out.device_mesh.ndim))
    tried.sort(key=lambda placements: sum(isinstance(placement, Replicate) for placement in placements))
    return [replace(out, placements=placements) for placements in tried]
