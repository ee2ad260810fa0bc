"""What ranks do in tests of pipelines whose ranks differ: two stages of two ranks each, one of which is odd."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import reference_models
import torch
import torch.distributed as dist
from plain_models import WORDS
from torch.distributed.device_mesh import init_device_mesh

import meshweave as mw
from meshweave.base.errors import MeshweaveError
from meshweave.execute.ranks.job import RankContext
from meshweave.execute.torch import context as contexts
from meshweave.nn.parallel.parallelize import parallelize

SEQUENCE = 8
Change = Callable[[SimpleNamespace], Any]


def _weight(s: SimpleNamespace) -> None:
    """Change a copy of a gain."""
    next(p for n, p in s.stage.module.named_parameters() if "ln_" in n).to_local().data[0] += 1e-9


def _head(s: SimpleNamespace) -> None:
    s.stage.module.transformer.ln_f.bias.to_local().data[0] += 1.0


def _freeze(s: SimpleNamespace) -> None:
    next(iter(s.stage.module.parameters())).requires_grad_(False)


def _precision(s: SimpleNamespace) -> None:
    s.stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
    torch.set_float32_matmul_precision("medium")


def _option(name: str, value: Any) -> Change:
    return lambda s: s.options.__setitem__(name, value)


def _given(name: str, change: Callable[[Any], Any]) -> Change:
    return lambda s: setattr(s, name, change(getattr(s, name)))


WAYS: dict[str, tuple[int, Change, str]] = {
    "a copy of a gain": (1, _weight, "other copies of stage 0"),
    "a copy of the last gain": (3, _head, "other copies of stage 1"),
    "a frozen weight": (1, _freeze, "stage 0 is another on rank 1"),
    "evaluation": (3, lambda s: s.stage.eval(), "other modules in training of stage"),
    "seed of dropout": (1, lambda s: torch.manual_seed(7), "other generator of stage 0"),
    "precision of products": (2, _precision, "other settings"),
    "tokens": (1, _given("tokens", lambda x: x.flip(0)), "other tokens"),
    "targets": (3, _given("targets", lambda x: x.flip(0)), "other targets"),
    "a token out of range": (0, _given("tokens", lambda x: x.clone().fill_(99)), "other tokens"),
    "rows": (1, _given("tokens", lambda x: x[:2]), "stage 0 is another on rank 1"),
    "micro-batches": (2, _option("micro_batches", 4), "rank 2 '1F1B: 2 stages, 4 micro-batches'"),
    "a schedule": (3, _option("plan", "gpipe"), "rank 3 'GPipe"),
    "division of gradients": (1, _option("scale_grads", False), "other arguments"),
}
"""Ways to differ: the odd rank, what it changes, and what all ranks say."""


FEW = ("", "evaluation", "seed of dropout")
"""Ways that run by default, on one stage of two ranks, of which the second is odd."""


def differ(context: RankContext, payload: Mapping[str, Any]) -> dict[str, str]:
    """Return what this rank says of each way, by name."""
    torch.set_num_threads(1)
    return said_of(payload["ways"])


def said_of(ways: Sequence[str]) -> dict[str, str]:
    """Return what this rank says of each way, by name; "" is none."""
    if not ways:  # a rank that ends at once would break off the groups that the others still form
        return {}
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("pp", "tp"))
    known = {"": (-1, lambda s: None, "")} | WAYS
    return {name: _said(*known[name][:2], mesh) for name in ways}


def _said(odd: int, change: Change, mesh: Any) -> str:
    contexts._defaults["cpu"] = dist.group.WORLD, contexts.TorchContext(deadline_s=60)
    with contextlib.ExitStack() as stack:
        stack.callback(contexts.TorchContext.default("cpu").close)
        state = _state(mesh, stack)
        if dist.get_rank() == odd % dist.get_world_size() and odd >= 0:
            change(state)
        try:
            plan = state.options.pop("plan")
            made = mw.pipeline(
                {state.number: state.stage}, plan, loss_fn=state.loss, meshes=mesh,
                outputs={state.number: [state.stage.example(2)]}, **state.options,
            )  # fmt: skip
            for _ in range(2):
                made.step(state.tokens, state.targets)
        except MeshweaveError as error:
            said = f"{type(error).__name__}: {error}"
        else:
            said = ""
        dist.barrier()
    return said


def _state(mesh: Any, stack: contextlib.ExitStack) -> SimpleNamespace:
    torch.manual_seed(0)
    model = reference_models.make("plain gpt", layers=2, is_tied=False, dropout=0.2)
    number, count = mesh.get_local_rank("pp"), mesh.size(0)
    layers = (number, number + 1) if count > 1 else (0, 2)
    stage = mw.nn.ParallelStage(parallelize(model, "megatron", mesh["tp"], check=False), *layers, SEQUENCE)
    generator = torch.Generator().manual_seed(1)
    tokens, targets = (torch.randint(0, WORDS, (4, SEQUENCE), generator=generator) for _ in range(2))
    options: dict[str, Any] = {"plan": "1f1b", "micro_batches": 2, "scale_grads": True}
    return SimpleNamespace(
        stage=stage, number=number, tokens=tokens, targets=targets, options=options, stack=stack,
        loss=stage.loss if number == count - 1 else None,
    )  # fmt: skip
