"""Plans for the machine at hand: those that the planner ranks first, with constants that are measured before."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from meshweave.algorithms.block.data_parallel import DataParallel
from meshweave.algorithms.block.megatron import Megatron, MegatronSequence
from meshweave.algorithms.step import Parallelism, StepProblem
from meshweave.base.errors import DeadlineError, LayoutError, MeshweaveError, RankLostError, UnsupportedError
from meshweave.describe.model.model_file import load_model
from meshweave.describe.model.transformer import Transformer
from meshweave.execute.torch.context import TorchContext
from meshweave.nn.parallel.all_ranks import AllRanks
from meshweave.nn.parallel.machine_here import (
    STACK,
    MeasuredStep,
    measure_step,
    measured_problem,
    step_here_s,
)
from meshweave.tune.step_search import plan

_LOG = logging.getLogger(__name__)
NUM_PLANNED = 2
"""The most plans with ranks that share layers."""
STRATEGIES = (Megatron.name, MegatronSequence.name)
"""Strategies for the ranks of a layer that are chosen among."""


def plans_here(
    module: nn.Module,
    tokens: Tensor,
    targets: Tensor,
    make: Callable[..., Any],
    free_bytes: float,
    context: TorchContext | None = None,
) -> list[tuple[Parallelism, float]]:
    """Return [(plan, predicted seconds of a step)] for a model on all ranks. Collective over the world.

    First come data parallelism and ZeRO-3, where the batch is a multiple of the ranks, then the fastest plans in
    which ranks share layers, `NUM_PLANNED` at most. The list is empty if the sizes of the model are not known, it
    is not in fp32 on CPUs, not all of it is trained, a rank refuses to run it, or its step cannot be priced; the
    log says why.

    Args:
        module: the model, of which copies are run.
        tokens, targets: a batch as `ParallelModel.step` takes it.
        make: called as `make(module, plan, device_mesh, check=False)`, returns the module's `ParallelModel`.
        free_bytes: the memory that a rank has free; the same number on all.
        context: deadline and liveness of waits; None for that of the default process group.

    Raises:
        RankLostError, DeadlineError: other ranks are missing or late.
        BindError: another rank is in another call.
    """
    among = AllRanks.of(context)
    model = _agreed(among, lambda: _described(module, tokens))
    if model is None:
        return []
    num_ranks, (batch, sequence) = len(among.ranks), tokens.shape
    most = max(batch // num_ranks, 1)
    rows = sorted({max(most // 2, 1), most})
    started = _agreed(among, lambda: _started(module, among, make, tokens[: rows[0]], targets[: rows[0]]))
    if started is None:
        return []
    alone, optimizer = started

    def compute(count: int) -> None:
        optimizer.zero_grad()
        alone.step(tokens[:count], targets[:count])

    measured = measure_step(compute, optimizer.step, rows, model, sequence, context)
    try:
        problem = measured_problem(measured, model, batch, sequence, int(min(free_bytes, 1e15)))
    except MeshweaveError as error:  # on all ranks, which have the same numbers
        _LOG.info("no plans beside data parallelism and ZeRO-3 are tried: %s", error)
        return []
    listed = among.of_first(lambda: _planned(problem, measured), "the first rank to plan")
    return [(Parallelism(**_tuples(degrees)), seconds) for degrees, seconds in listed]


_Made = TypeVar("_Made")


def _agreed(among: AllRanks, make: Callable[[], _Made]) -> _Made | None:
    """Return what `make` returns; None on all ranks where it is refused on one, as the log says. Collective.

    Raises RankLostError or DeadlineError where ranks are missing or late.
    """
    made, refused = None, ""
    try:
        made = make()
    except (RankLostError, DeadlineError):
        raise
    except MeshweaveError as error:
        refused = str(error)
    if among.least(float(not refused)):
        return made
    _LOG.info("no plans beside data parallelism and ZeRO-3 are tried: %s", refused or "another rank refuses")
    return None


def _described(module: nn.Module, tokens: Tensor) -> Transformer:
    """Return a model's sizes.

    Raises DescriptionError, LayoutError or UnsupportedError where it has none that are known, rates of it are not
    measured, or tokens are not (batch, sequence).
    """
    if tokens.ndim != 2:
        raise LayoutError(f"tokens are of shape {tuple(tokens.shape)}; give (batch, sequence)")
    kinds = {(each.dtype, each.device.type, each.requires_grad) for each in module.parameters()}
    if kinds != {(torch.float32, "cpu", True)}:
        raise UnsupportedError(
            "rates are measured of models in fp32 on CPUs, of which all parameters are trained; give plans="
        )
    return load_model(module)


def _started(
    module: nn.Module, among: AllRanks, make: Callable[..., Any], tokens: Tensor, targets: Tensor
) -> tuple[Any, torch.optim.Optimizer]:
    """Return a copy of a model on this rank by itself, after a step, and an optimizer that changes nothing."""
    shape = (len(among.ranks), 1)
    mesh = init_device_mesh(among.context.device.type, shape, mesh_dim_names=("ranks", "alone"))
    alone = make(copy.deepcopy(module), DataParallel.name, mesh["alone"], check=False)
    trained = [each for each in alone.module.parameters() if each.requires_grad]
    alone.step(tokens, targets)
    return alone, torch.optim.AdamW(trained, lr=0.0)


def _planned(problem: StepProblem, measured: MeasuredStep) -> list[tuple[dict[str, Any], float]]:
    """Return degrees and predicted seconds: data parallelism, ZeRO-3, and the fastest that share layers."""
    num_ranks = measured.num_ranks
    replicas = Parallelism(data=num_ranks, micro_batch=max(problem.batch // num_ranks, 1))
    waits = replace(problem, stack=STACK)  # for weights: nothing runs beside their gathers
    plain = [("data parallelism", problem, replicas), ("ZeRO-3", waits, replace(replicas, zero=3))]
    listed: list[tuple[dict[str, Any], float]] = []
    for name, priced, chosen in plain:
        try:
            listed.append((asdict(chosen), step_here_s(priced, chosen, measured)))
        except MeshweaveError as error:  # a batch that is no multiple of the ranks
            _LOG.info("%s is not predicted: %s", name, error)
    try:
        ranked = fastest_here(problem, measured, pp=1)
    except MeshweaveError as error:
        _LOG.info("no plan in which ranks share layers is tried: %s", error)
        return listed
    shared = [(asdict(each), seconds) for each, seconds in ranked if each.data != num_ranks]
    return listed + shared[:NUM_PLANNED]


def fastest_here(
    problem: StepProblem, measured: MeasuredStep, **fixed: Any
) -> list[tuple[Parallelism, float]]:
    """Return [(plan, predicted seconds of a step)], for each set of degrees its fastest plan, fastest first.

    Plans with ZeRO, recomputation or context parallelism are left out.

    Args:
        problem: made by `measured_problem` of `measured`.
        measured: the parts of a step, measured on this machine.
        fixed: what else is fixed, as options of `meshweave.plan`: `pp=1` for no pipelines.

    Raises:
        DescriptionError: a size or option is wrong.
        UnsupportedError: nothing fits, or nothing can be laid out.
    """
    answer = plan(
        problem.model, problem.cluster, batch=problem.batch, sequence=problem.sequence, dtype=problem.dtype,
        stack=problem.stack, cp=1, zero=0, recompute="none", strategy=list(STRATEGIES),
        order=("tensor", "context", "data", "pipeline"), **fixed,
    )  # fmt: skip
    assert answer.step is not None
    layouts = [Parallelism(**row.degrees.model_dump()) for row in answer.step.ranked]
    priced = [(each, step_here_s(problem, each, measured)) for each in layouts]
    return sorted(priced, key=lambda pair: pair[1])


def _tuples(degrees: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in degrees.items()}
