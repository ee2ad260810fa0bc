"""What ranks do in tests of what lies between two steps: states of optimizers, errors, models in another order."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import reference_models
import torch
from torch import Tensor, nn

import meshweave as mw


def between(context: Any, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return facts by name, each of a model of its own."""
    torch.set_num_threads(1)
    return {name: globals()[f"_{name}"](context.rank) for name in payload["names"]}


def _made(seed: int = 0) -> mw.nn.ParallelModel:
    torch.manual_seed(seed)
    return mw.parallelize(reference_models.make("plain llama").float(), "data_parallel:2", check=False)


def _rows() -> Tensor:
    return torch.randint(0, 24, (4, 8), generator=torch.Generator().manual_seed(1))


def _step(model: mw.nn.ParallelModel, optimizer: torch.optim.Optimizer) -> None:
    model.loss(_rows(), _rows()).backward()
    optimizer.step()
    optimizer.zero_grad()


def _said(call: Callable[[], object]) -> str:
    try:
        call()
    except mw.errors.MeshweaveError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _states_of_a_removed_parameter(rank: int) -> list[bool]:
    """Whether a plain parameter that was removed is among the states again, and how many states there are."""
    model, scale = _made(), nn.Parameter(torch.ones(3))
    own = list(model.module.parameters())
    optimizer = torch.optim.AdamW([{"params": own}, {"params": [scale]}])
    scale.grad = torch.ones(3)
    _step(model, optimizer)
    optimizer.param_groups.pop()
    del optimizer.state[scale]
    _step(model, optimizer)
    return [scale in optimizer.state, len(optimizer.state_dict()["state"]) == len(own)]


def _memory_between_steps(rank: int) -> list[bool]:
    """Whether weights and states live on that nobody has any more."""
    model = _made()
    optimizer = torch.optim.AdamW(model.module.parameters())
    _step(model, optimizer)
    first: Any = next(model.module.parameters())
    weight, state = (
        weakref.ref(first._local_tensor),
        weakref.ref(optimizer.state[first]["exp_avg"]._local_tensor),
    )
    optimizer.state.clear()
    model.module.to(torch.float64)
    del first
    gc.collect()
    return [weight() is None, state() is None]


def _states_after_a_failed_step(rank: int) -> int:
    """How many states are of no parameter."""
    model = _made()
    optimizer = torch.optim.AdamW(model.module.parameters())
    _step(model, optimizer)
    optimizer.state.clear()
    module: Any = sys.modules["torch.optim.adam"]
    adam = module.adam

    def fail(*given: Any, **named: Any) -> None:
        raise RuntimeError("in the middle of a step")

    module.adam = fail
    try:
        _step(model, optimizer)
    except RuntimeError:
        optimizer.zero_grad()
    finally:
        module.adam = adam
    model.module.to(torch.float64)
    _step(model, optimizer)
    own = {id(parameter) for parameter in model.module.parameters()}
    return sum(id(key) not in own for key in optimizer.state)


def _two_differences(rank: int) -> list[str]:
    """What is said of a rank that asks for logits, whose program it binds then, and of other tokens after that."""
    model, rows = _made(), _rows()
    model.loss(rows, rows)
    return [
        _said(lambda: model.loss(rows, rows).item() if rank else model.module(rows)),
        _said(lambda: model.loss(rows if rank else rows.flip(0), rows).item()),
        f"{float(model.loss(rows, rows).detach()):.6f}",
    ]


def _differences_that_nobody_looked_at(rank: int) -> list[str]:
    """What a backward pass says, and a next call, of tokens that differ, where nobody has looked at the loss."""
    model, rows = _made(), _rows()
    model.loss(rows, rows)
    other = rows if rank else rows.flip(0)
    loss = model.loss(other, rows)
    said = [_said(loss.backward), _said(loss.item)]
    model.loss(other, rows)
    said.append(_said(lambda: model.loss(rows, rows)))
    return [*said, f"{model.loss(rows, rows).item():.6f}"]


def _models_in_another_order(rank: int) -> list[str]:
    """What is said where ranks call two models of equal shapes, one each first."""
    models, rows = [_made(0), _made(5)], _rows()
    for model in models:
        model.loss(rows, rows)
    with torch.no_grad():
        return [_said(lambda: models[rank].loss(rows, rows)), _said(lambda: models[0].loss(rows, rows))]
