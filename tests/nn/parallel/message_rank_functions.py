"""What ranks do in tests of messages: steps of a model by a strategy and by torch's own wrappers, counted."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import reference_models
import small_models
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from meshweave.execute.ranks.job import RankContext
from meshweave.nn.parallel import local_steps
from meshweave.nn.parallel.parallelize import parallelize

STEPS_BEFORE = 2  # DDP divides its buckets anew after its first step


def count_all(context: RankContext, payload: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return for each case the messages of a step, ours and theirs, and how far apart weights are after it."""
    torch.set_num_threads(1)
    return [_count(case, context.num_ranks) for case in payload["cases"]]


def _count(case: Mapping[str, Any], num_ranks: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = _made(case["model"], case.get("options", {})).float()
    tokens, targets = (torch.randint(0, reference_models.words(model), (2 * num_ranks, 8)) for _ in range(2))
    mesh = init_device_mesh("cpu", (num_ranks,))
    theirs, ours = copy.deepcopy(model), parallelize(model, case["strategy"], mesh, check=False)
    rank = mesh.get_rank()
    mine = slice(2 * rank, 2 * rank + 2)
    if case["strategy"] == "data_parallel":
        wrapped: nn.Module = DistributedDataParallel(theirs)
    else:
        for layer in theirs.get_submodule(ours.names.layers):
            fully_shard(layer, mesh=mesh, reshard_after_forward=case["strategy"] == "zero3")
        wrapped = fully_shard(theirs, mesh=mesh, reshard_after_forward=case["strategy"] == "zero3")

    def their_loss() -> Tensor:
        out = wrapped(tokens[mine])
        logits = getattr(out, "logits", out)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets[mine].flatten())

    answer: dict[str, Any] = {}
    for name, loss, module in (
        ("ours", lambda: ours.loss(tokens, targets), ours.module), ("theirs", their_loss, theirs)
    ):  # fmt: skip
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)

        def step(loss: Callable[[], Tensor] = loss, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()

        for _ in range(STEPS_BEFORE):
            step()
        answer[name] = _messages(step)
        states = [value for state in optimizer.state.values() for value in state.values()]
        answer[f"{name} kinds"] = sorted({type(value).__name__ for value in states if value.ndim})
    pairs = zip(ours.module.parameters(), theirs.parameters(), strict=True)
    answer["apart"] = max(float((_whole(a) - _whole(b)).abs().max()) for a, b in pairs)
    answer["copies"] = [
        p.to_local().flatten().view(torch.int32).sum().item()
        for p in ours.module.parameters()
        if all(placement.is_replicate() for placement in p.placements)
    ]
    return answer


def _made(kind: str, options: Mapping[str, Any]) -> Any:
    """Return a plain model, or one of transformers."""
    is_plain = kind.startswith("plain")
    return reference_models.make(kind, **options) if is_plain else small_models.make_model(kind, options)


def _whole(parameter: Tensor) -> Tensor:
    value = parameter.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value


def _messages(step: Callable[[], None]) -> dict[str, int]:
    """Return the collectives and messages that a step posts, by what torch calls them."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step()
    counts: dict[str, int] = {}
    for event in profiled.events():
        if event.name.startswith("c10d::") and "recv" not in event.name:
            counts[event.name] = counts.get(event.name, 0) + 1
    return counts


def step_optimizers(context: RankContext, payload: Mapping[str, Any]) -> list[tuple[int, int, float]]:
    """Return for each optimizer what `_stepped` returns."""
    torch.set_num_threads(1)
    return [_stepped(name, options, context.num_ranks) for name, options in payload["optimizers"]]


def _change(optimizer: torch.optim.Optimizer, number: int) -> None:
    """Change what an optimizer has, as users do between steps: states from a file, settings, states by hand.

    One parameter is frozen in the first step.
    """
    first, second = optimizer.param_groups[0]["params"][:2]
    second.requires_grad_(number > 0)
    if number == 2:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    if number == 3:
        optimizer.param_groups[0]["lr"] *= 0.5
        state = optimizer.state[first]
        state |= {key: value * 2 for key, value in state.items() if isinstance(value, DTensor)}
    if number == 4:
        for value in optimizer.state[first].values():
            if isinstance(value, DTensor):
                value.zero_()


def _stepped(name: str, options: Mapping[str, Any], num_ranks: int) -> tuple[int, int, float]:
    """Return the number of steps on local parts, of those by one kernel, and how far off DTensors are."""
    torch.manual_seed(0)
    model = reference_models.make("plain llama").float()
    tokens, targets = (torch.randint(0, reference_models.words(model), (2 * num_ranks, 8)) for _ in range(2))
    mesh = init_device_mesh("cpu", (num_ranks,))
    made = [parallelize(copy.deepcopy(model), "zero3", mesh, check=False) for _ in range(2)]
    plain, local = (getattr(torch.optim, name)(each.module.parameters(), **options) for each in made)
    plain.register_step_pre_hook(lambda *_: None)  # who looks at a step sees DTensors
    counted: list[bool] = []
    run = local_steps._run

    def counting(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], state: Any) -> None:
        if optimizer is local:  # and none that is tried
            counted.append(groups[0].get("fused") is True)
        run(optimizer, groups, state)

    local_steps._run = counting
    for number in range(5):
        for each, optimizer in zip(made, (plain, local), strict=True):
            _change(optimizer, number)
            optimizer.zero_grad()
            each.step(tokens, targets)
            norm = torch.nn.utils.clip_grad_norm_(each.module.parameters(), 0.5)
            assert float(norm.full_tensor()) > 0
            optimizer.step()
    local_steps._run = run
    assert all(group.get("fused") is options.get("fused") for group in local.param_groups)
    for one, other in zip(plain.state.values(), local.state.values(), strict=True):
        assert one.keys() == other.keys(), (one, other)
        assert [type(value) for value in one.values()] == [type(value) for value in other.values()]
    pairs = zip(*(each.module.parameters() for each in made), strict=True)
    return len(counted), sum(counted), max(float((_whole(a) - _whole(b)).abs().max()) for a, b in pairs)
