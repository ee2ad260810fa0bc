"""What ranks do in tests of ranks that differ: train for three steps, one of them in its own way."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import reference_models
import torch
import torch.distributed as dist
from differing_pipeline_rank_functions import said_of
from plain_models import WORDS
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from ways_in_steps import WAYS
from ways_to_differ import HARMLESS, Way

from meshweave.base.errors import MeshweaveError
from meshweave.execute.ranks.job import RankContext
from meshweave.execute.torch import context as contexts
from meshweave.nn.parallel.parallelize import parallelize

STEPS = 4
LATER = 2
ODD = 1


def differ(context: RankContext, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return for each way of the payload, by name, what came of it on this rank."""
    torch.set_num_threads(1)
    known = {each.name: each for each in WAYS}
    answers = {name: _try(known[name]) for name in payload["ways"]}
    return {**answers, "stages": said_of(payload["stages"])}


def _try(way: Way) -> dict[str, Any]:
    """Return the error of a run, or the largest difference of a weight from those of one process."""
    before = torch.get_float32_matmul_precision(), torch.get_default_dtype()
    contexts._defaults["cpu"] = dist.group.WORLD, contexts.TorchContext(deadline_s=60)
    dist.barrier()
    with contextlib.ExitStack() as stack:
        state = _state(way, stack)
        try:
            answer = _run(way, state)
        except (MeshweaveError, RuntimeError) as error:
            answer = {"error": type(error).__name__, "text": str(error)}
    torch.set_float32_matmul_precision(before[0])
    torch.set_default_dtype(before[1])
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(1)
    made = getattr(state, "made", None)
    answer["replaced"] = (
        type(state.model.transformer.wte).__name__ if hasattr(state.model, "transformer") else ""
    )
    answer["is_made"] = made is not None
    contexts.TorchContext.default("cpu").close()
    return answer


def _make(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return reference_models.make("plain gpt", **{"layers": 2, **options})


def _state(way: Way, stack: contextlib.ExitStack) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(1)
    tokens, targets = (torch.randint(0, WORDS, (4, 8), generator=generator) for _ in range(2))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))

    def patch(owner: Any, name: str, value: Any) -> None:
        stack.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)

    def patch_item(owner: Any, name: str, value: str) -> None:
        before = owner.get(name)
        stack.callback(lambda: owner.pop(name) if before is None else owner.__setitem__(name, before))
        owner[name] = value

    model = _make(dropout=way.dropout)
    with torch.no_grad():
        model.transformer.ln_f.bias[0] = 0.0
    options = {"debug_every": way.every, "broadcast_weights": way.name == "weights_that_are_broadcast"}
    options["check"] = False  # which is about the model, the same on all ranks
    return SimpleNamespace(
        make=_make, stack=stack, patch=patch, patch_item=patch_item, model=model, mesh=mesh, plan=way.strategy,
        options=options, tokens=tokens, targets=targets, around=contextlib.nullcontext, clip=0.5, scale=1.0,
        skips_optimizer=False, skips_backward=False, clears=True, forwards=1, drops_a_gradient=False,
        given={},
    )  # fmt: skip


def _change(way: Way, state: SimpleNamespace, when: str) -> None:
    if way.when == when and dist.get_rank() == ODD:
        way.change(state)


def _run(way: Way, state: SimpleNamespace) -> dict[str, Any]:
    _change(way, state, "model")
    made = state.made = parallelize(state.model, state.plan, state.mesh, **state.options)
    state.optimizer = torch.optim.AdamW(made.module.parameters(), lr=0.01)
    _change(way, state, "step")
    for step in range(STEPS):
        if step == LATER:
            _change(way, state, "later")
        _step(state)
    if way.expected != HARMLESS:
        return {"worst": float("nan")}
    wanted = dict(_trained().named_parameters())
    return {
        "worst": max(
            float((p.full_tensor() - wanted[name]).detach().abs().max())
            for name, p in made.module.named_parameters()
        )
    }


def _step(state: SimpleNamespace) -> None:
    made = state.made
    for _ in range(state.forwards):
        with state.around():
            loss = made.forward(state.tokens, targets=state.targets, **state.given).loss
    if not state.skips_backward:
        loss.backward()
    parameters = list(made.module.parameters())
    if state.clip is not None:
        torch.nn.utils.clip_grad_norm_(parameters, state.clip)
    else:
        torch.nn.utils.clip_grad_norm_(parameters, float("inf"))
    for parameter in parameters:
        if state.scale != 1.0 and parameter.grad is not None:
            parameter.grad._local_tensor.mul_(state.scale)
    if state.drops_a_gradient:
        parameters[-1].grad = None
    if not state.skips_optimizer:
        state.optimizer.step()
    if state.clears:
        state.optimizer.zero_grad()


def _trained() -> nn.Module:
    """Return the weights of one process after as many steps."""
    state = _state(WAYS[0], contextlib.ExitStack())
    model = state.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        loss = nn.functional.cross_entropy(model(state.tokens).flatten(0, 1), state.targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    assert not any(isinstance(each, DTensor) for each in model.parameters())
    return model
