"""Products of DTensors outside of autograd: their options, how they are planned, and the plans of a context."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from meshweave.algorithms.fused import Tiles, ring_problems
from meshweave.algorithms.table import FUSED_PRODUCTS
from meshweave.algorithms.universal import Operand, UniversalProblem, universal_program
from meshweave.algorithms.universal.config import SCHEDULE_KINDS, STAGE_LIMITS, ScheduleKind, StageLimits
from meshweave.base.errors import BindError, LayoutError
from meshweave.cost.rates import RankRates
from meshweave.describe.layout import Layout
from meshweave.describe.machine.cluster import Cluster, described
from meshweave.execute.torch import compat
from meshweave.execute.torch.cache import CachedProgram
from meshweave.execute.torch.call_order import call_order
from meshweave.execute.torch.context import TorchContext
from meshweave.nn.dtensor import MatrixView, from_the_front, layout_on
from meshweave.nn.fused_products import FusedOptions, prepare_fused
from meshweave.nn.in_graphs import traced_product
from meshweave.nn.products import DTYPES, LocalProduct, Matrix, cheapest, prepare_cached, problem_of, tune
from meshweave.nn.shard_spec import ShardSpec
from meshweave.nn.transports import Resolved, Transport, check_transport, resolve_transport
from meshweave.tune.fused import faster_than, tune_fused
from meshweave.tune.universal import TunedUniversal

Stationary = Literal["auto", "a", "b", "c"]

Overlap = Literal["auto", "slices", "fused"]
"""How communication of a product is hidden: behind slices of it, or tile by tile (`algorithms.fused`)."""

_MACHINES = {"cpu": "local-cpu", "cuda": "h100-node"}
"""The cluster of the catalog whose rates choose among variants that move the same, where the caller names none."""


@dataclass(frozen=True)
class MatmulOptions:
    """How a product of DTensors is computed, forward and backward.

    Attributes:
        stationary: the operand that is not moved in the forward pass; None leaves that to the tuner.
        transport: how ranks get operands of others; "auto" chooses.
        rates: FLOP/s and bytes/s of the cluster that the caller names; None if it names none.
        default_rates: the rates that decide between products that move equally many bytes, without a cluster.
        context: process groups, deadline and liveness.
        schedule, limits: in which order ranks issue their steps, and how many at once.
        overlap: how communication is hidden: "slices", "fused" or "auto" of `meshweave.matmul`. "fused" is refused
            where no fused product takes the operands, unless `is_lenient`.
        is_lenient: whether "fused" means "slices" where no fused product takes the operands.
        cluster: what the caller names, on which fused products are simulated; None if it names none.
    """

    stationary: Operand | None
    transport: Transport
    rates: RankRates | None
    default_rates: RankRates
    context: TorchContext = field(compare=False)
    schedule: ScheduleKind = "direct"
    limits: StageLimits = STAGE_LIMITS
    overlap: Overlap = "auto"
    is_lenient: bool = False
    cluster: Cluster | None = None

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
        overlap: Overlap = "auto",
    ) -> MatmulOptions:
        """Return the options for arguments of `matmul`.

        Args:
            device_type: that of the operands, which gives `default_rates` and the context.
            context: None for the default context of `device_type`.

        Raises:
            UnsupportedError: the transport is unknown.
            DescriptionError: the cluster is unknown.
            LayoutError: any other value is not allowed.
        """
        if overlap not in get_args(Overlap):
            raise LayoutError(f"overlap is {overlap!r}; it must be one of {', '.join(get_args(Overlap))}")
        if stationary not in ("auto", "a", "b", "c"):
            raise LayoutError(f"stationary is {stationary!r}; it must be 'auto', 'a', 'b' or 'c'")
        if schedule not in SCHEDULE_KINDS:
            raise LayoutError(f"schedule is {schedule!r}; it must be one of {', '.join(SCHEDULE_KINDS)}")
        if not isinstance(limits, StageLimits):
            raise LayoutError(f"limits is {limits!r}; it must be a meshweave.algorithms.StageLimits")
        check_transport(transport)
        machine = None if cluster is None else described(cluster)
        return cls(
            None if stationary == "auto" else stationary,
            transport,
            None if machine is None else _rates(machine),
            _rates(_MACHINES.get(device_type, "local-cpu")),
            context or TorchContext.default(device_type),
            schedule,
            limits,
            overlap,
            cluster=machine,
        )

    @property
    def considers_fused(self) -> bool:
        """Return whether a fused product may replace the universal one where it is simulated to be faster.

        True with `overlap` "auto", no given stationary operand and the schedule "direct".
        """
        return self.overlap == "auto" and self.stationary is None and self.schedule == "direct"

    @property
    def of_gradient(self) -> MatmulOptions:
        """Return the options for the product that computes a gradient: `stationary` None and `is_lenient` True."""
        return replace(self, stationary=None, is_lenient=True)


def check_dtypes(**operands: Tensor) -> None:
    """Raise BindError unless all operands have one dtype, and it is one that programs compute in (`DTYPES`)."""
    dtypes = {operand.dtype for operand in operands.values()}
    if len(dtypes) > 1 or not dtypes <= set(DTYPES):
        listed = " and ".join(f"{name} {operand.dtype}" for name, operand in operands.items())
        raise BindError(f"dtypes are {listed}; all must be one of {', '.join(DTYPES.values())}")


def checked_placements(out: Sequence[Placement] | None, num_dims: int) -> tuple[Placement, ...] | None:
    """Return `out`, placements of a result of `num_dims` dims, with dims counted from the front; None stays None.

    Raises LayoutError where it is no sequence of placements, or names a dim that is not there.
    """
    if out is None:
        return None
    if isinstance(out, (Placement, str)) or not isinstance(out, Sequence):
        raise LayoutError(f"out is {out!r}; it must be a sequence with one placement per dim of the mesh")
    return tuple(from_the_front(placement, num_dims, "out") for placement in out)


@cache
def _rates(cluster: Cluster | str) -> RankRates:
    """Return the rates of a cluster, described or named as in the catalog. Raises DescriptionError."""
    return RankRates.of(described(cluster))


# --- plans -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MatmulPlan:
    """A product C = A B, tuned and bound on this rank.

    Attributes:
        product: the cached function from this rank's shards of A and B, as matrices, to that of C.
        spec: torch's spec of C, with its global shape.
        local_shape: the shape of this rank's shard of C, with all its dims.
    """

    product: CachedProgram[LocalProduct]
    spec: compat.DTensorSpec
    local_shape: tuple[int, ...]

    def run(self, a: Tensor, b: Tensor) -> DTensor:
        """Return the DTensor C, from this rank's shards a (local rows, local k) and b (local k, local columns).

        Collective.
        """
        return as_dtensor(self.multiply(a, b), self.local_shape, self.spec)

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        """Return this rank's shard of C as a matrix, from its shards of A and B as matrices. Collective."""
        return self.product.touch()(a, b)


def as_dtensor(local: Tensor, shape: tuple[int, ...], spec: compat.DTensorSpec) -> DTensor:
    """Return the DTensor of spec `spec` whose local shard is `local`, a matrix that is first viewed as `shape`."""
    if len(shape) != 2:
        local = local.view(shape)
    return compat.from_spec(local, spec)


class _Plans(dict[Any, MatmulPlan]):
    """The plans of a context by what is multiplied how."""


class Calls(dict[Any, MatmulPlan]):
    """The plans of a context, for calls of `matmul` that need no gradient, by the arguments of the call."""


def multiply(
    a: MatrixView, b: MatrixView, shape: torch.Size, out: ShardSpec, options: MatmulOptions
) -> DTensor:
    """Return C = A B without recording it for autograd. Collective.

    Args:
        a, b: the operands as matrices, this rank's shards of them inside.
        shape: the global shape of C, whose dims but the last are rows of the product.
        out: the device mesh and placements of C; without placements the cheapest ones are taken.
        options: how the product is computed.

    Raises LayoutError, BindError and UnsupportedError where the product cannot be planned, see `plan_of`, and
    RankLostError or DeadlineError where other ranks are missing or late.
    """
    if compat.is_traced(compat.local_tensor(a.tensor)):
        return _multiply_in_graph(a, b, shape, out, options)
    return plan_of(a, b, shape, out, options).run(a.local, b.local)


def _multiply_in_graph(
    a: MatrixView, b: MatrixView, shape: torch.Size, out: ShardSpec, options: MatmulOptions
) -> DTensor:
    """Return the product as an op of the graph that is traced; it is planned when the op first runs."""
    with compat.outside_of_traces():
        target = _target(a, b, tuple(shape), out, options)
    specs = compat.spec_of(a.tensor), compat.spec_of(b.tensor)
    # With the problem, whose text has the ranks of meshes: that of torch's specs has their sizes alone.
    key = specs, a.is_transposed, b.is_transposed, tuple(shape), target.spec, target.problem, options
    # Of no elements: a plan needs to know how they lie, and the tensors of the graph end with the trace.
    views = tuple(
        replace(view, tensor=compat.from_spec(torch.empty(0, dtype=view.tensor.dtype, device="meta"), spec))
        for view, spec in zip((a, b), specs, strict=True)
    )

    def plan() -> MatmulPlan:
        return plan_of(views[0], views[1], shape, target.spec, options)

    *rows, columns = target.local_shape
    local = traced_product(
        options.context, key, _title(a, b), (math.prod(rows), columns), plan, a.local, b.local
    )
    return as_dtensor(local, target.local_shape, target.spec.torch_spec(shape, a.tensor.dtype))


def _title(a: MatrixView, b: MatrixView) -> str:
    (m, k), (_, n) = (v.shape[::-1] if v.is_transposed else v.shape for v in (a, b))
    return f"matmul {m}x{k} @ {k}x{n}"


def plan_of(
    a: MatrixView, b: MatrixView, shape: torch.Size, out: ShardSpec, options: MatmulOptions
) -> MatmulPlan:
    """Return the plan of C = A B; where the context has none, all ranks of the product tune and bind it together.

    Args:
        a, b: the operands as matrices, this rank's shards of them inside.
        shape: the global shape of C, whose dims but the last are rows of the product.
        out: the device mesh and placements of C; without placements the cheapest ones are taken.
        options: how the product is computed.

    Raises:
        LayoutError: sizes, meshes or placements do not fit each other, or `options` ask for a fused product and
            none takes the operands.
        BindError: ranks are about to run different products.
        UnsupportedError: the transport is not available here.
        RankLostError, DeadlineError: other ranks are missing or late.
    """
    specs = compat.spec_of(a.tensor), compat.spec_of(b.tensor)
    key = specs, a.is_transposed, b.is_transposed, shape, out, options
    plans = options.context.cache(_Plans)
    plan = plans.get(key)
    if plan is None:
        # What is bound outlives the call, and later ones may be outside inference mode.
        with call_order(options.context).titled(_title(a, b)), torch.inference_mode(False):
            plan = plans[key] = _new_plan(a, b, tuple(shape), out, options)
        plan.product.tie(plans, key)
    return plan


@dataclass(frozen=True)
class _Target:
    """Where the result of a product lies, and the problem that this makes of it."""

    spec: ShardSpec
    problem: UniversalProblem
    local_shape: tuple[int, ...]


def _target(
    a: MatrixView, b: MatrixView, shape: tuple[int, ...], out: ShardSpec, options: MatmulOptions
) -> _Target:
    """Return where the result lies: as `out` says, or where it costs least, on which all ranks agree."""
    specs = [out] if out.placements is not None else _candidates(out, len(shape))
    layouts = [
        layout_on(out.device_mesh, spec.placements or (), shape, shard_order=spec.shard_order)
        for spec in specs
    ]
    matrices, best = (_matrix(a), _matrix(b)), 0
    problems = [problem_of(*matrices, layout, a.tensor.dtype) for layout in layouts]
    if len(problems) > 1:
        best = cheapest(problems, *_measure(problems[0], options))
    layout = layouts[best]
    local_shape = Layout(layout.mesh, layout.placements).local_shape(shape, out.device_mesh.get_rank())
    return _Target(specs[best], problems[best], local_shape)


def _measure(
    problem: UniversalProblem, options: MatmulOptions
) -> tuple[Resolved, RankRates | None, Operand | None, RankRates]:
    transport = resolve_transport(options.transport, problem.ranks, options.context)
    return transport, options.rates, options.stationary, options.default_rates


def _new_plan(
    a: MatrixView, b: MatrixView, shape: tuple[int, ...], out: ShardSpec, options: MatmulOptions
) -> MatmulPlan:
    target, rank = _target(a, b, shape, out, options), out.device_mesh.get_rank()
    measure = _measure(target.problem, options)
    tuned = tune(target.problem, *measure, options.schedule, options.limits)
    fused = _fused(target.problem, tuned, measure[0], options)
    if fused is None:
        run = prepare_cached(target.problem, tuned, rank, options.transport, options.context)
    else:
        run = prepare_fused(target.problem, fused, options.context)
    return MatmulPlan(run, target.spec.torch_spec(shape, a.tensor.dtype), target.local_shape)


def _fused(
    problem: UniversalProblem, tuned: TunedUniversal, transport: Resolved, options: MatmulOptions
) -> FusedOptions | None:
    """Return the fused product that computes it, None for the universal product.

    "fused" takes what is simulated to be fastest by tiles on the caller's cluster, without one the ring. "auto"
    takes any entry of `algorithms.fused`, where a cluster is named on which it is simulated to be faster than the
    universal product; in memory that ranks share, operands are read in place and nothing is left to hide.
    """
    cluster, chosen = options.cluster, None
    if options.overlap == "fused":
        rings = ring_problems(problem)
        names = [
            name
            for name, entry in FUSED_PRODUCTS.items()
            if rings and not any(entry.refusal(ring) for ring in rings)
        ]
        if not names and not options.is_lenient:
            raise LayoutError(
                f"overlap is 'fused', and no fused product takes a {problem.a}, b {problem.b}, out {problem.c}: "
                "a by columns, b and out by rows; or a by rows, b and out by columns; on one mesh dim, evenly"
            )
        if names and cluster is not None and problem.ranks[-1] < cluster.num_chips:
            chosen = tune_fused(problem, cluster, by_tiles=True)
        elif names:
            return FusedOptions(names[0], Tiles(), transport)
    elif cluster is not None and options.considers_fused and transport == "messages":
        chosen = faster_than(problem, universal_program(problem, tuned.config), cluster)
    if chosen is None:
        return None
    return FusedOptions(chosen.algorithm, chosen.tiles or Tiles(), transport)


def _matrix(view: MatrixView) -> Matrix:
    matrix = Matrix(view.layout, view.shape, view.order)
    return matrix.transposed if view.is_transposed else matrix


def _candidates(out: ShardSpec, num_dims: int) -> list[ShardSpec]:
    """Return the specs with every placement of Shard and Replicate, those with fewest copies first."""
    each = (*(Shard(dim) for dim in range(num_dims)), Replicate())
    tried = list(product(each, repeat=out.device_mesh.ndim))
    tried.sort(key=lambda placements: sum(isinstance(placement, Replicate) for placement in placements))
    return [replace(out, placements=placements) for placements in tried]
