"""What ranks do in the sweep over architectures: compare losses and gradients of small models with their own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import small_models
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import meshweave as mw
from meshweave.base.errors import BindError, DeadlineError, MeshweaveError, RankLostError
from meshweave.execute.ranks.job import RankContext
from meshweave.nn.parallel.parallelize import parallelize

NAMES = {1: ("tp",), 2: ("row", "col")}
TOLERANCE = 1e-9
PROVED = ("megatron",)
"""Strategies with the proof of `parallelize`; others have it where they are not exact, for what is said then."""


def sweep(context: RankContext, payload: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return per case what parallelizing a model gave: exact, refused, wrong or crash, and why."""
    torch.set_num_threads(1)
    shapes = sorted({tuple(shape) for case in payload["cases"] for _, shape in case["strategies"]})
    meshes = {shape: init_device_mesh("cpu", shape, mesh_dim_names=NAMES[len(shape)]) for shape in shapes}
    with small_models.quiet():
        return [outcome(case, meshes) for case in payload["cases"]]


def outcome(case: Mapping[str, Any], meshes: Mapping[tuple[int, ...], Any]) -> dict[str, Any]:
    """Return what a case gave: {"kind", "changes", "strategies": {strategy: (outcome, why)}}."""
    out = {"kind": case["kind"], "changes": case.get("changes", {}), "strategies": {}}
    try:
        model = small_models.make_model(case["kind"], case.get("changes"))
    except Exception as error:
        return {**out, "error": line(error)}
    tokens, targets = small_models.batch()
    try:
        copies = [copy.deepcopy(model) for _ in case["strategies"]]
        loss = small_models.loss_of(model, tokens, targets)
        loss.backward()
    except Exception as error:
        return {**out, "error": line(error)}
    for (strategy, shape), own in zip(case["strategies"], copies, strict=True):
        again, mesh = copy.deepcopy(own), meshes[tuple(shape)]
        options = {"check": strategy in PROVED, **case.get("options", {})}
        found = _tried(own, strategy, mesh, options, model, loss)
        if found[0] in ("wrong", "crash") and not options["check"]:  # what one is told by default
            told = _tried(again, strategy, mesh, {**options, "check": True}, model, loss)
            found = told if told[0] == "refused" else found
        out["strategies"][f"{strategy}:{'x'.join(map(str, shape))}"] = found
    return {**out, "class": type(model).__name__}


def _tried(
    own: nn.Module, strategy: str, mesh: Any, options: Mapping[str, Any], whole: nn.Module, loss: Tensor
) -> tuple[str, str]:
    """Return one of exact, refused, wrong and crash, and why.

    A refusal is one line that `parallelize` raises and that leaves the model as it was, or that the making of a
    stage or a pipeline raises. What comes in a step is a crash, and so are lost ranks and what cannot be bound.
    """
    before = _state(own)
    try:
        with small_models.KeepDoubles():
            module, step = (_piped if strategy == "pipeline" else _made)(own, strategy, mesh, options)
    except MeshweaveError as error:
        return _judged_refusal(error, strategy == "pipeline" or _state(own) == before)
    except Exception as error:
        return "crash", line(error)
    try:
        with small_models.KeepDoubles():
            value = step()
        worst, where = _difference(module, whole, is_stage=strategy == "pipeline")
    except Exception as error:
        return "crash", f"in a step: {line(error)}"
    off = abs(float(value) - float(loss))
    if off > TOLERANCE or worst > TOLERANCE:
        return "wrong", f"loss off by {off:.2g}, gradient of {where} by {worst:.2g} of its largest element"
    return "exact", f"{max(off, worst):.2g}"


def _judged_refusal(error: MeshweaveError, is_as_before: bool) -> tuple[str, str]:
    if isinstance(error, BindError | DeadlineError | RankLostError):
        return "crash", line(error)
    if not is_as_before:
        return "crash", f"the model has changed: {line(error)}"
    if not str(error).strip() or len(str(error).splitlines()) > 1:
        return "crash", f"not one line: {line(error)}"
    return "refused", line(error)


def _state(module: nn.Module) -> dict[str, Any]:
    """Return what a refusal must leave alone: modules, tensors and their values, flags and hooks."""
    tensors = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    out: dict[str, Any] = {
        name: (id(each), type(each), each.training, len(each._forward_hooks), len(each._forward_pre_hooks))
        for name, each in module.named_modules(remove_duplicate=False)
    }
    for name, tensor in tensors:
        summed = float(tensor.detach().double().nan_to_num().sum())
        out[f"tensor {name}"] = id(tensor), tensor.shape, tensor.dtype, tensor.requires_grad, summed
    return out


Step = Callable[[], Tensor]
"""Computes gradients, and returns the loss."""


def _made(own: nn.Module, strategy: str, mesh: Any, options: Mapping[str, Any]) -> tuple[nn.Module, Step]:
    """Return a parallelised model and its step."""
    made = parallelize(own, strategy, mesh, **options)

    def step() -> Tensor:
        value = made.loss(*small_models.batch())
        value.backward()
        return value.detach()

    return made.module, step


def _piped(own: nn.Module, strategy: str, mesh: Any, options: Mapping[str, Any]) -> tuple[nn.Module, Step]:
    """Return one of two stages of a model, each with Megatron's tensor parallelism, and the step of both."""
    made = parallelize(own, "megatron", mesh["col"], **options)
    number, count = mesh.get_local_rank("row"), len(made.blocks)
    ends = (0, count // 2, count)
    stage = mw.nn.ParallelStage(made, ends[number], ends[number + 1], 16)
    pipeline = mw.pipeline(
        {number: stage},
        "1f1b",
        micro_batches=2,
        meshes=mesh,
        outputs={number: [stage.example(2)]},
        loss_fn=stage.loss if number else None,
    )

    def step() -> Tensor:
        loss = pipeline.step(*small_models.batch())
        value = torch.zeros(1, dtype=torch.float64) if loss is None else loss.detach().double().reshape(1)
        dist.all_reduce(value)
        return value[0] / mesh.size(1)

    return made.module, step


def _difference(own: nn.Module, whole: nn.Module, is_stage: bool) -> tuple[float, str]:
    """Return the largest difference of a gradient, by the largest element of the original's, and its name.

    A gradient that is rounding alone, as that of a bias of keys, is compared by the largest one of the model.
    """
    worst, where = 0.0, ""
    least = 1e-6 * max(float(p.grad.abs().max()) for p in whole.parameters() if p.grad is not None)
    given = dict(own.named_parameters())
    for name, parameter in whole.named_parameters():
        wanted = parameter.grad
        if name not in given and is_stage:
            continue
        if name not in given:
            return float("inf"), name
        got = given[name].grad
        if got is None and wanted is None:
            continue
        if got is None or wanted is None:
            return float("inf"), name
        got = got.full_tensor() if isinstance(got, DTensor) else got
        off = float((got - wanted).abs().max() / wanted.abs().max().clamp_min(least))
        if not off <= worst:
            worst, where = off, name
    return worst, where


def line(error: Exception) -> str:
    """Return an error as one line."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
