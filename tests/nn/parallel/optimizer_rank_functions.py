"""What ranks do in tests of optimizers: train a small Llama by each class beside the same on one process."""

from __future__ import annotations

import copy
import importlib
import inspect
import warnings
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import reference_models
import torch
import torch.distributed as dist
from plain_models import WORDS
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import register_parametrization

import meshweave as mw
from meshweave.base.errors import MeshweaveError

STEPS, TOLERANCE = 3, 1e-9
_ROUNDING = 1e-13
"""Gradients are changed by so much, relative, to see how far an optimizer carries rounding."""
_GIVEN: Mapping[str, Callable[[list[Tensor], nn.Module], Any]] = {
    "base_optimizer": lambda params, module: torch.optim.SGD,
    "optimizer": lambda params, module: torch.optim.SGD(params, lr=0.01),
    "model": lambda params, module: module,
    "num_iterations": lambda params, module: 100,
    "num_training_steps": lambda params, module: 100,
    "lr": lambda params, module: 0.01,
    "max_iter": lambda params, module: 4,
}
"""What classes are given by name where they ask for it, and settings that they all get."""


def sweep(context: Any, payload: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return per case, (module, class), what each strategy gave on this rank: its outcome, and why.

    Where values are asked for as well, they come last.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    start = reference_models.make("plain llama", layers=2)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("stage", "own"))
    rows: list[Any] = [
        _outcomes(getattr(importlib.import_module(module), name), start, payload["strategies"], mesh)
        for module, name in payload["cases"]
    ]
    return [*rows, values_beside(start, mesh)] if payload.get("values") else rows


def _outcomes(kind: Any, start: nn.Module, strategies: list[str], mesh: Any) -> dict[str, tuple[str, str]]:
    way, whole, rounded = _alone(kind, start)
    found = {}
    for strategy in strategies:
        dist.barrier()
        if whole is None or (way == "closure" and strategy == "pipeline"):
            found[strategy] = ("not run", way)
        else:
            found[strategy] = _tried(kind, copy.deepcopy(start), strategy, mesh, way, whole, rounded)
    return found


def _alone(kind: Any, start: nn.Module) -> tuple[str, nn.Module | None, float]:
    """Return how a class steps on one process, what it makes of the model, and how far rounding takes that."""
    said = ""
    for way in ("plain", "closure"):
        whole, control = copy.deepcopy(start), copy.deepcopy(start)
        try:
            _train(kind, whole, lambda number, of=whole: _loss(of, number), way)
            _train(kind, control, lambda number, of=control: _loss(of, number), way, _ROUNDING)
        except Exception as error:
            said = said or _line(error)
            continue
        if all(bool(each.isfinite().all()) for each in whole.parameters()):
            return way, whole, _off(control, whole)
    return said or "its result is not finite", None, 0.0


def _loss(module: nn.Module, number: int) -> Tensor:
    tokens, targets = batch(number)
    return nn.functional.cross_entropy(module(tokens).flatten(0, 1), targets.flatten())


def batch(number: int) -> tuple[Tensor, Tensor]:
    """Return tokens and targets of a step."""
    tokens = torch.randint(0, WORDS, (4, 9), generator=torch.Generator().manual_seed(100 + number))
    return tokens[:, :-1], tokens[:, 1:]


def _train(kind: Any, module: nn.Module, loss: Callable[[int], Any], way: str, noise: float = 0.0) -> None:
    """Train a module for some steps; `way` says whether a step is given a closure."""
    optimizer = _made(kind, module)
    if callable(train := getattr(optimizer, "train", None)):
        train()
    for number in range(STEPS):
        torch.manual_seed(number)

        def closure(number: int = number) -> Any:
            optimizer.zero_grad()
            with torch.enable_grad():
                value = loss(number)
                value.backward()
            for each in module.parameters() if noise else ():
                if each.grad is not None:
                    each.grad.mul_(
                        1 + noise * torch.linspace(-1, 1, each.numel(), dtype=each.dtype).view_as(each)
                    )
            return value

        if way == "plain":
            closure()
        optimizer.step(*[closure] * (way == "closure"))


def _made(kind: Any, module: nn.Module) -> Any:
    params: Any = list(module.parameters())
    if kind is torch.optim.Muon:  # takes matrices alone
        params = [each for each in params if each.ndim == 2]
    first, *others = inspect.signature(kind).parameters.values()
    asked = [each for each in others if each.default is each.empty or each.name in ("lr", "max_iter")]
    given = {each.name: _GIVEN[each.name](params, module) for each in asked if each.name in _GIVEN}
    return kind(_GIVEN[first.name](params, module) if first.name in _GIVEN else params, **given)


def _tried(
    kind: Any, own: Any, strategy: str, mesh: Any, way: str, whole: nn.Module, rounded: float
) -> tuple[str, str]:
    try:
        loss = _staged(own, mesh) if strategy == "pipeline" else _parallel(own, strategy)
        _train(kind, own, loss, way)
        off = _off(own, whole)
    except MeshweaveError as error:
        return "refused", _line(error)
    except Exception as error:
        return "error", _line(error)
    allowed = max(TOLERANCE, 1e3 * rounded)
    return "exact" if off <= allowed else "wrong", f"off by {off:.2g}; rounding makes {rounded:.2g}"


def _parallel(own: Any, strategy: str) -> Callable[[int], Any]:
    made = mw.parallelize(own, f"{strategy}:2", check=False)
    return lambda number: made.loss(*batch(number))


def _staged(own: Any, mesh: Any) -> Callable[[int], Any]:
    """Return what makes a step of a pipeline, each rank one layer of the model, and has a `backward`."""
    number = mesh.get_local_rank("stage")
    stage = mw.nn.ParallelStage(
        mw.parallelize(own, "megatron", mesh["own"], check=False), number, number + 1, 8
    )
    pipeline = mw.pipeline(
        {number: stage},
        "1f1b",
        micro_batches=2,
        meshes=mesh,
        outputs={number: [stage.example(2)]},
        loss_fn=stage.loss if number else None,
    )

    def step(of: int) -> Any:
        pipeline.step(*batch(of))
        return SimpleNamespace(backward=lambda: None)

    return step


def _off(module: nn.Module, whole: nn.Module) -> float:
    """Return the largest difference of a parameter from that of one process, by its largest element."""
    right, worst = dict(whole.named_parameters()), 0.0
    for name, each in module.named_parameters():
        own = each.detach().full_tensor() if isinstance(each, DTensor) else each.detach()
        wanted = right[name].detach()
        off = float((own - wanted).abs().max() / wanted.abs().max().clamp_min(1e-3))
        worst = off if not off <= worst else worst
    return worst


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


class Together(torch.optim.SGD):
    """SGD by gradients that are divided by the norm of all of them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        grads = [each.grad for group in self.param_groups for each in group["params"]]
        norm = sum(grad.norm().item() ** 2 for grad in grads) ** 0.5
        for grad in grads:
            grad.div_(norm)
        return super().step(closure)


def _norms(module: Any, loss: Callable[[int], Any]) -> list[Tensor]:
    loss(0).backward()
    return [
        torch.tensor([each.grad.norm().item(), float(each.grad.abs().max())]) for each in module.parameters()
    ]


def _means(module: Any, loss: Callable[[int], Any]) -> list[Tensor]:
    return [torch.tensor(each.mean().item()) for each in module.parameters()]


def _stepped_together(module: Any, loss: Callable[[int], Any]) -> list[Tensor]:
    _train(Together, module, loss, "plain")
    return list(module.parameters())


def _noisy(module: Any, loss: Callable[[int], Any]) -> list[Tensor]:
    torch.manual_seed(3)
    return [torch.randn_like(each) for each in module.parameters()]


def _drawn(module: Any, loss: Callable[[int], Any]) -> list[Tensor]:
    torch.manual_seed(3)
    for each in module.parameters():
        nn.init.trunc_normal_(each, std=0.1)
    return [*module.parameters(), torch.rand(1)]


def _penalized(module: Any, loss: Callable[[int], Any]) -> list[Tensor]:
    (loss(0) + 0.1 * sum(each.square().sum() for each in module.parameters())).backward()
    return [each.grad for each in module.parameters()]


class _Shares(nn.Module):
    """Makes elements along a dim sum up to 1."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(self.dim)


def _computed(module: Any, loss: Callable[[int], Any]) -> list[Tensor]:
    for dim, name in enumerate(("up_proj", "down_proj")):
        register_parametrization(module.model.layers[0].mlp.get_submodule(name), "weight", _Shares(dim))
    value = loss(0)
    value.backward()
    return [value, *(each.grad for each in module.parameters())]


def values_beside(start: Any, mesh: Any) -> dict[str, Any]:
    """Return how far values of DTensors are from those of one process, and what is said of those that differ."""
    off = {}
    for strategy in ("zero3", "megatron"):
        for get in (_norms, _means, _stepped_together, _noisy, _drawn, _penalized, _computed):
            whole, own = copy.deepcopy(start), copy.deepcopy(start)
            right = get(whole, lambda number, of=whole: _loss(of, number))
            pairs = zip(get(own, _parallel(own, strategy)), right, strict=True)
            off[f"{get.__name__} {strategy}"] = max(
                float((_plain(one) - two.detach()).abs().max()) for one, two in pairs
            )
    _, said = _tried(Together, copy.deepcopy(start), "pipeline", mesh, "plain", start, 0.0)
    return {"off": off, "said": {"a norm over stages": said, "one rank reads": _read_by_one(start)}}


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def _read_by_one(start: Any) -> str:
    """Return what is said where one rank reads the norm of a gradient, and the other goes on."""
    loss = _parallel(own := copy.deepcopy(start), "zero3")
    loss(0).backward()
    try:
        if dist.get_rank():
            loss(1)
        else:
            own.lm_head.weight.grad.norm().item()
    except MeshweaveError as error:
        return _line(error)
    return "nothing"
