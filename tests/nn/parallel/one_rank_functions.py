"""What a rank that is alone does in tests: layers that are computed again, and the order of gradients."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import peft
import reference_models
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from meshweave.execute.ranks.job import RankContext
from meshweave.nn.parallel.parallelize import ParallelModel, parallelize

LORA = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "down_proj"], lora_dropout=0.0)


def answers(context: RankContext, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return how far gradients are from those of the plain model, by case, and in which order they come."""
    torch.set_num_threads(1)
    return {
        "compiled, computed again": compiled_again(),
        "adapted, computed again": adapted_again(),
        "order": order(),
        "is told of gradients": is_told_of_gradients(),
        "ascends": ascends(),
    }


def _made(model: nn.Module) -> ParallelModel:
    return parallelize(model, "megatron", init_device_mesh("cpu", (1,)), check=False)


def _batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    words = reference_models.words(model)
    return torch.randint(0, words, (2, 8)), torch.randint(0, words, (2, 8))


def _off(own: nn.Module, whole: nn.Module, tokens: Tensor, targets: Tensor) -> float:
    logits = whole(tokens)
    logits = getattr(logits, "logits", logits)
    nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    right = {name: each.grad for name, each in whole.named_parameters() if each.grad is not None}
    made = {name: each.grad for name, each in own.named_parameters() if each.grad is not None}
    assert sorted(made) == sorted(right)
    return max(float((made[name].full_tensor() - grad).abs().max()) for name, grad in right.items())


def compiled_again() -> float:
    """Compile layers that are computed again."""
    torch.manual_seed(0)
    model = reference_models.make("plain llama", layers=2).double()
    tokens, targets = _batch(model)
    made = _made(copy.deepcopy(model))
    made.recompute = True
    for layer in made.module.model.layers:
        layer.compile(backend="aot_eager")
    made.loss(tokens, targets).backward()
    return _off(made.module, model, tokens, targets)


def _adapted() -> tuple[nn.Module, nn.Module, ParallelModel]:
    torch.manual_seed(0)
    whole = peft.get_peft_model(reference_models.make("llama"), LORA).double()
    with torch.no_grad():
        for parameter in whole.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
    own = copy.deepcopy(whole)
    return whole.get_base_model(), own.get_base_model(), _made(own.get_base_model())


def adapted_again() -> float:
    """Train adapters of layers that are computed again."""
    whole, own, made = _adapted()
    tokens, targets = _batch(own)
    own.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    made.loss(tokens, targets).backward()
    return _off(own, whole, tokens, targets)


def order() -> list[str]:
    """Return in which order the layers of a model go backward, and the gradients of their parameters come."""
    made = _made(reference_models.make("plain llama", layers=3))
    events: list[str] = []
    for number, layer in enumerate(made.module.model.layers):

        def watch(module: nn.Module, given: Any, out: Tensor, number: int = number) -> None:
            out.register_hook(lambda grad: events.append(f"layer {number}"))

        layer.register_forward_hook(watch)
        weight = layer.mlp.down_proj.weight
        weight.register_post_accumulate_grad_hook(lambda _, number=number: events.append(f"weight {number}"))
    made.loss(*_batch(made.module)).backward()
    return events


def is_told_of_gradients() -> list[bool]:
    """Return whether ranks compare that gradients are kept, before and after adapters have some."""
    _, own, made = _adapted()
    said = [made.agreement._has_gradients()]
    made.loss(*_batch(own)).backward()
    return [*said, made.agreement._has_gradients()]


def ascends() -> list[float]:
    """Return the losses before and after a step along gradients whose signs were changed by hand."""
    made = _made(reference_models.make("plain llama").double())
    tokens, targets = _batch(made.module)
    optimizer = torch.optim.SGD(made.module.parameters(), lr=1e-3)
    before = made.step(tokens, targets)
    for parameter in made.module.parameters():
        if parameter.grad is not None:
            parameter.grad.neg_()
    optimizer.step()
    return [float(before), float(made.loss(tokens, targets).detach())]
