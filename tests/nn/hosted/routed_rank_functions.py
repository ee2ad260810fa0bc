"""What ranks do in tests of routed models: losses and gradients, files, checkpoints, refusals."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import small_models
import torch
import torch.distributed as dist
from hosted_rank_functions import worst
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import meshweave as mw
from meshweave.base.errors import MeshweaveError
from meshweave.execute.ranks.job import RankContext
from meshweave.nn.hosted.experts import HostedExperts
from meshweave.nn.parallel.parallelize import parallelize


def tried(context: RankContext, payload: Mapping[str, Any]) -> list[Any]:
    """Return what each case gives: a function's name, the type of model, degrees, and options."""
    torch.set_num_threads(1)
    with small_models.quiet():
        return [one(*case, folder=Path(payload["folder"])) for case in payload["cases"]]


def one(name: str, kind: str, degrees: Mapping[str, Any], options: Mapping[str, Any], folder: Path) -> Any:
    """Return what a function gives of a type of model, or what is said."""
    plan = {word: tuple(value) if isinstance(value, list) else value for word, value in degrees.items()}
    try:
        return globals()[name](kind, mw.Parallelism(**plan), folder, **options)
    except MeshweaveError as error:
        return f"{type(error).__name__}: {error}"


def routed_to(model: nn.Module, routing: str) -> None:
    """Give the routers of a model weights by which all tokens take the same experts, all scores being equal."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if routing == "ties" and (".gate." in name or ".router." in name):
                parameter.zero_()


def _made(kind: str, changes: Mapping[str, Any], dtype: str, routing: str) -> Any:
    tried: Any = small_models.make_model(kind, changes)
    model: Any = type(tried)._from_config(tried.config)  # without hooks, which a call has left
    model.load_state_dict(tried.state_dict())
    model = model.to(getattr(torch, dtype))
    routed_to(model, routing)
    if dtype == "float32":
        model.set_experts_implementation("grouped_mm")  # as transformers' own default is
    return model


def compared(
    kind: str,
    p: mw.Parallelism,
    folder: Path,
    *,
    changes: Mapping[str, Any] | None = None,
    dtype: str = "float64",
    routing: str = "random",
    check: bool = False,
    shape: tuple[int, int] = (4, 16),
    clip: float = 0.0,
) -> dict[str, float]:
    """Return how far loss, gradients and their norm are from those of one process, and rows of experts."""
    wide = small_models.KeepDoubles() if dtype == "float64" else contextlib.nullcontext()
    whole = _made(kind, changes or {}, dtype, routing)
    own = copy.deepcopy(whole)
    generator = torch.Generator().manual_seed(3)
    tokens, targets = (torch.randint(0, small_models.WORDS, shape, generator=generator) for _ in range(2))
    with wide:
        made = parallelize(own, p, check=check)
        loss = made.loss(tokens, targets)
        loss.backward()
        out = whole(input_ids=tokens, use_cache=False)
        wanted = nn.functional.cross_entropy(out.logits.flatten(0, 1), targets.flatten())
        if getattr(out, "aux_loss", None) is not None:
            wanted = wanted + whole.router_aux_loss_coef * out.aux_loss
        wanted.backward()
    answer = {"loss": abs(float(loss.detach()) - float(wanted.detach())), "grads": worst(made.module, whole)}
    if clip:
        norms = [
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip, foreach=False)
            for module in (made.module, whole)
        ]
        norm = norms[0].full_tensor() if isinstance(norms[0], DTensor) else norms[0]
        answer |= {"norm": abs(float(norm) / float(norms[1]) - 1), "clipped": worst(made.module, whole)}
    return answer


def local_experts(kind: str, p: mw.Parallelism, folder: Path) -> list[str]:
    """Return what ranks say that they have of experts."""
    made = parallelize(small_models.make_model(kind), p, check=False)
    return [each.extra_repr() for each in made.module.modules() if isinstance(each, HostedExperts)]


def _full(values: Mapping[str, Any]) -> dict[str, Tensor]:
    return {
        name: each.full_tensor() if isinstance(each, DTensor) else each
        for name, each in values.items()
        if isinstance(each, Tensor)
    }


def exported(kind: str, p: mw.Parallelism, folder: Path) -> dict[str, bool]:
    """Return whether transformers reads the bits that ranks have saved."""
    whole = small_models.make_model(kind).float()
    path = folder / f"{kind}-{p.expert}-{p.tensor}-{p.data}"
    made = parallelize(copy.deepcopy(whole), p, check=False)
    made.module.save_pretrained(path)
    read = type(whole).from_pretrained(path, dtype=torch.float32)
    state, wanted = read.state_dict(), whole.state_dict()
    return {
        "names": sorted(state) == sorted(wanted),
        "bits": all(torch.equal(state[name], wanted[name]) for name in wanted),
    }


def resumed(kind: str, p: mw.Parallelism, folder: Path, *, then: Mapping[str, Any]) -> float:
    """Return how far losses are, of two steps after a checkpoint, from those of one process that went on."""
    whole = small_models.make_model(kind)
    tokens, targets = small_models.batch()
    losses: list[float] = []
    with small_models.KeepDoubles():
        plain = copy.deepcopy(whole)
        adam = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        wanted = [_step(plain, adam, tokens, targets) for _ in range(4)]
        checkpoints = mw.Checkpoints(folder / f"{kind}-{p.expert}-{p.data}-{p.tensor}")
        for degrees, first in ((p, 0), (mw.Parallelism(**then), 2)):
            made = parallelize(copy.deepcopy(whole), degrees, check=False)
            adam = torch.optim.AdamW(made.module.parameters(), lr=1e-2)
            state = mw.nn.TrainingState([made.module], adam, rank=dist.get_rank())
            if first:
                state.load(checkpoints, first)
            losses += [_step(made, adam, tokens, targets) for _ in range(2)]
            if not first:
                state.save(checkpoints, 2)
                checkpoints.wait()
    return max(abs(a - b) for a, b in zip(losses, wanted, strict=True))


def _step(model: Any, adam: torch.optim.Optimizer, tokens: Tensor, targets: Tensor) -> float:
    adam.zero_grad()
    if isinstance(model, nn.Module):
        logits = model(input_ids=tokens, use_cache=False).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    else:
        loss = model.loss(tokens, targets)
    loss.backward()
    adam.step()
    return float(loss.detach())


def recomputed(kind: str, p: mw.Parallelism, folder: Path) -> float:
    """Return how far gradients are from those of one process where layers are computed again."""
    whole: Any = small_models.make_model(kind).float()  # in backward passes no mode keeps doubles
    tokens, targets = small_models.batch()
    made = parallelize(copy.deepcopy(whole), p, check=False)
    made.loss(tokens, targets).backward()
    logits = whole(input_ids=tokens, use_cache=False).logits
    nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    return worst(made.module, whole)


def piped(kind: str, p: mw.Parallelism, folder: Path, *, stages: int = 2, frozen: str = "") -> float:
    """Return how far gradients of stages are from those of one process; `p` is that of a stage.

    Embedding and head are one table where `frozen` names it: none of the two stages trains it.
    """
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (stages, p.num_ranks), mesh_dim_names=("pp", "tp"))
    whole = small_models.make_model(kind, {"tie_word_embeddings": bool(frozen)})
    for name, parameter in whole.named_parameters():
        parameter.requires_grad_(not frozen or frozen not in name)
    number = mesh.get_local_rank("pp")
    with small_models.KeepDoubles():
        made = parallelize(copy.deepcopy(whole), p, mesh["tp"], check=False)
        stage = mw.nn.ParallelStage(made, number, number + 1, 16)
        tokens, targets = small_models.batch()
        pipeline = mw.pipeline(
            {number: stage}, "1f1b", micro_batches=2, meshes=mesh, outputs={number: [stage.example(2)]},
            loss_fn=stage.loss if number else None,
        )  # fmt: skip
        pipeline.step(tokens, targets)
    small_models.loss_of(whole, tokens, targets).backward()
    return worst(made.module, whole)
