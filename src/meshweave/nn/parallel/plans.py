"""What users give as a plan, and the strategy on a device mesh that it stands for."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshweave.algorithms.block import BlockAlgorithm, BlockConfig
from meshweave.algorithms.block.problem import Overlap
from meshweave.algorithms.block.roles import (
    DATA_ROLES,
    IDLE,
    RING,
    AxisDims,
    AxisRole,
)
from meshweave.algorithms.step import Parallelism, Step
from meshweave.algorithms.step.layers import best_config, hidden_between_sites_s
from meshweave.algorithms.step.problem import Degree
from meshweave.algorithms.step.strategies import StrategyAround
from meshweave.algorithms.table import STRATEGIES
from meshweave.base.errors import LayoutError, PlanError, UnsupportedError
from meshweave.execute.torch.context import TorchContext
from meshweave.nn.parallel.all_ranks import device_type_here
from meshweave.nn.parallel.expert_axes import with_experts
from meshweave.nn.parallel.strategy import LayerStrategy, device_mesh_for
from meshweave.tune.plan import Plan
from meshweave.tune.plan_description import catalog_differences
from meshweave.tune.plan_file import load_plan
from meshweave.tune.step_cases import planned_step

PlanLike = str | Path | Parallelism | Step | Plan
"""The name of a strategy, a `Parallelism`, a `Step`, a plan of a step, or the path of a plan file."""


@dataclass(frozen=True)
class ResolvedPlan:
    """A strategy on its ranks.

    Attributes:
        strategy: the strategy.
        recompute: whether the backward pass computes layers again (activation checkpointing).
    """

    strategy: LayerStrategy
    recompute: bool = False


def resolve(
    plan: PlanLike,
    device_mesh: DeviceMesh | None,
    config: BlockConfig | None,
    overlap: Overlap | None = None,
    context: TorchContext | None = None,
    device: str = "cpu",
) -> ResolvedPlan:
    """Return the strategy that a plan stands for, on `device_mesh`, or on all ranks of the world for None.

    Warns where a plan file was made for another catalog, or where less or other than the plan is run.

    Args:
        plan: what a user gave `parallelize`.
        device_mesh: the ranks; None where the plan has sizes.
        config: chunks and slices; None for those of the plan, or the default ones.
        overlap: "sites" to accept a plan that counts on more overlap than that of single products; None to refuse
            it.
        context: that programs run in; None for the default one.
        device: the type of device of the mesh that is made where there is none.

    Raises:
        UnsupportedError: there is no such strategy, or the plan has pipeline ranks and no mesh, or shards weights
            in groups of replicas.
        LayoutError: the plan does not fit the mesh, or neither mesh nor sizes are given.
        PlanError: the plan counts on overlap that is not obtained.
        DescriptionError: a plan file is wrong.
    """
    if isinstance(plan, Step):
        _check_overlap(plan, overlap)
        config = config or best_config(plan.problem, plan.parallelism)
        plan = plan.parallelism
    if isinstance(plan, Parallelism):
        return _of_parallelism(plan, device_mesh, config, context, device)
    if isinstance(plan, Path) or (isinstance(plan, str) and plan.endswith(".json")):
        plan = load_plan(Path(plan))
        for sentence in catalog_differences(plan):
            warnings.warn(sentence, stacklevel=2)
    if isinstance(plan, Plan):
        place = 1 if device_mesh is not None else _place_without_pipeline(plan)
        return resolve(planned_step(plan, place=place), device_mesh, config, overlap, context, device)
    name = str(plan)
    if device_mesh is None:
        name, _, sizes = name.partition(":")
        strategy = STRATEGIES.named(name)
        if not re.fullmatch(r"[1-9][0-9]{0,6}(x[1-9][0-9]{0,6})*", sizes):
            raise LayoutError(f"plan '{plan}': give a device mesh, or sizes as in '{name}:4' or 'atp:2x2'")
        device_mesh = device_mesh_for(strategy, tuple(map(int, sizes.split("x"))), device)
    return ResolvedPlan(LayerStrategy.of(name, device_mesh, config, context=context))


def device_type_of(module: nn.Module) -> str:
    """Return the type of device on which a model trains: that of its first parameter.

    For one on the meta device, or without parameters, it is `device_type_here`.
    """
    own = next((parameter.device.type for parameter in module.parameters()), "meta")
    return own if own != "meta" else device_type_here()


def _place_without_pipeline(plan: Plan) -> int:
    """Return the place of the fastest configuration without pipeline ranks in a plan's ranking; 1 without any."""
    ranked = plan.step.ranked
    place = next((at for at, row in enumerate(ranked, 1) if row.degrees.pipeline == 1), 1)
    if place > 1:
        slower = ranked[place - 1].step_s / ranked[0].step_s - 1
        warnings.warn(
            f"the plan's best has {ranked[0].degrees.pipeline} pipeline ranks, which mw.pipeline runs; "
            f"parallelize takes place {place} of the ranking, without them, {slower:.1%} slower",
            stacklevel=2,
        )
    return place


def _check_overlap(step: Step, accepted: Overlap | None) -> None:
    """Raise PlanError where a plan counts on overlap between sites, which run one by one here."""
    if accepted == "sites" or step.problem.overlap == "sites":
        return
    lost_s = hidden_between_sites_s(step.problem, step.parallelism)
    if lost_s > _NOTHING_S:
        raise PlanError(
            f"the plan by {step.parallelism.strategy} hides {1e6 * lost_s:.3g} us more of each layer and "
            "micro-batch than parallelize does, whose products run one by one; plan without overlap='layers', or "
            "give parallelize overlap='sites' to do without"
        )


_NOTHING_S = 1e-9
"""Less than the rounding of prices to picoseconds, over the tasks of a layer."""


def _of_parallelism(
    parallelism: Parallelism,
    device_mesh: DeviceMesh | None,
    config: BlockConfig | None,
    context: TorchContext | None,
    device: str,
) -> ResolvedPlan:
    """Return the strategy of degrees: of data and of context around that of tensor parallelism."""
    p = parallelism
    if p.pipeline > 1 and device_mesh is None:
        raise UnsupportedError(
            f"this plan has {p.pipeline} pipeline ranks: give each stage its mesh, with the other degrees"
        )
    if p.zero_group not in (None, p.replicas):
        raise UnsupportedError(f"zero_group is {p.zero_group}; ranks that shard weights are all or none here")
    if p.recompute == "selective":
        warnings.warn(
            "the plan computes attention again, and parallelize keeps what it makes: a step takes less time and "
            "more memory than planned",
            stacklevel=2,
        )
    around = [role for role, size in ((DATA_ROLES[p.zero], p.data), (RING, p.context)) if size > 1]
    axes = [(name, p.size(name), p.stride(name)) for name in _AROUND if p.size(name) > 1]
    around = [around[0]] * (_num_data_axes(p) - 1) + around if around else around
    if p.tensor_size == 1 and len(around) == 1:
        entry = _alone(around[0])
    else:
        entry = STRATEGIES.named(p.strategy)
        rows, columns = p.tensor_mesh
        axes.append(("tensor", rows, p.stride("tensor") * columns))
        if columns > 1 or entry.roles[1] is not IDLE:
            axes.append(("tensor", columns, p.stride("tensor")))
        entry = StrategyAround(entry, tuple(around)) if around else entry
    axes, experts = with_experts(p, axes)
    if device_mesh is not None:
        _check_order(p, device_mesh, axes)
    _, sizes, strides = zip(*axes, strict=True)
    mesh = device_mesh or device_mesh_for(entry, sizes, device, strides)
    equal: AxisDims = tuple("" for _ in range(len(entry.roles) - len(experts)))
    experts = (*experts, *equal)
    strategy = LayerStrategy.of(entry.name, mesh, config, entry, context, experts)
    return ResolvedPlan(strategy, p.recompute == "full")


def _num_data_axes(p: Parallelism) -> int:
    """Return how many axes the ranks of data parallelism are, of which experts may divide a part."""
    if p.data == 1:
        return 1
    axes, _ = with_experts(p, [(name, p.size(name), p.stride(name)) for name in (*_AROUND, "tensor")])
    count = sum(degree == "data" for degree, _, _ in axes)
    if count > 1 and p.context > 1:
        raise UnsupportedError(
            f"expert={p.expert} x expert_tensor={p.expert_tensor} divides data={p.data} beside a ring: give "
            "context=1"
        )
    return count


_AROUND: tuple[Degree, ...] = ("data", "context")
"""The degrees whose axes come before those of tensor parallelism in a mesh."""


def _check_order(p: Parallelism, device_mesh: DeviceMesh, axes: list[tuple[Degree, int, int]]) -> None:
    """Raise LayoutError where the dims of a given mesh lie on ranks in another order than that of the plan."""
    mesh = device_mesh.mesh
    if mesh.shape != tuple(size for _, size, _ in axes):
        return  # the strategy says what fits
    wide = [
        (stride, int((mesh.select(dim, 1) - mesh.select(dim, 0)).abs().min()), name)
        for dim, (name, size, stride) in enumerate(axes)
        if size > 1
    ]
    planned = [name for _, _, name in sorted(wide)]
    given = [name for _, _, name in sorted(wide, key=lambda each: each[1])]
    if planned != given:
        raise LayoutError(
            f"the plan's order is {'-'.join(p.order)}, the innermost first; in the device mesh of ranks "
            f"{mesh.tolist()} it is {'-'.join(dict.fromkeys(given))}: give a mesh whose dims "
            f"{', '.join(name for name, _, _ in axes)} step by {', '.join(str(each[2]) for each in axes)} ranks, "
            "or none"
        )


def _alone(role: AxisRole) -> BlockAlgorithm:
    """Return the strategy in which one axis has this role, and nothing else is shared."""
    return next(entry for entry in STRATEGIES.values() if entry.roles == (role, IDLE))
