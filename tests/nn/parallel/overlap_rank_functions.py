"""What ranks do in tests of sums beside the backward pass: gradients by many ways of asking for them."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import reference_models
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from meshweave.execute.ranks.job import RankContext
from meshweave.nn.parallel import uses
from meshweave.nn.parallel.buckets import ParameterBucket
from meshweave.nn.parallel.parallelize import parallelize
from meshweave.nn.parallel.put_gradients import put_gradients

Losses = Callable[[int], Tensor]
"""The loss of a batch by its number."""


def once(loss: Losses, parameters: list[Tensor]) -> None:
    """Compute the gradients of one batch."""
    loss(0).backward()


def two_in_one(loss: Losses, parameters: list[Tensor]) -> None:
    """Run two forward passes before one backward pass, in which each bucket is summed twice."""
    (loss(0) + 2 * loss(1)).backward()


def added_up(loss: Losses, parameters: list[Tensor]) -> None:
    """Add gradients of batches up."""
    for number in range(3):
        loss(number).backward()


def twice_through(loss: Losses, parameters: list[Tensor]) -> None:
    """Run one graph backward twice."""
    value = loss(0)
    value.backward(retain_graph=True)
    value.backward()


def asked_for(loss: Losses, parameters: list[Tensor]) -> None:
    """Ask autograd for gradients, which it does not add to those of parameters."""
    for parameter, grad in zip(parameters, torch.autograd.grad(loss(0), parameters), strict=True):
        parameter.grad = grad


def changed_by_hooks(loss: Losses, parameters: list[Tensor]) -> None:
    """Change gradients by hooks of parameters, which see whole sums."""
    hooks = [parameter.register_hook(lambda grad: grad * grad) for parameter in parameters]
    loss(0).backward()
    for hook in hooks:
        hook.remove()


def changed_once_they_are_there(loss: Losses, parameters: list[Tensor]) -> None:
    """Change gradients by hooks that are called once parameters have them."""

    def triple(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(3)

    hooks = [parameter.register_post_accumulate_grad_hook(triple) for parameter in parameters[::2]]
    for number in range(2):
        loss(number).backward()
    for hook in hooks:
        hook.remove()


def for_some_alone(loss: Losses, parameters: list[Tensor]) -> None:
    """Let a backward pass give gradients to some parameters, and another one to all."""
    loss(0).backward(inputs=parameters[::2])
    assert all(parameter.grad is None for parameter in parameters[1::2])
    loss(1).backward()


def changed_at_the_last_nodes(loss: Losses, parameters: list[Tensor]) -> None:
    """Have hooks of the last nodes of autograd, as other libraries do: they change gradients and see them come."""
    nodes = [torch.autograd.graph.get_gradient_edge(parameter).node for parameter in parameters[::2]]
    seen: list[bool] = []
    hooks = []
    for node, parameter in zip(nodes, parameters[::2], strict=True):
        hooks.append(node.register_prehook(lambda grads: (5 * grads[0],)))
        hooks.append(
            node.register_hook(lambda *_, parameter=parameter: seen.append(parameter.grad is not None))
        )
    loss(0).backward()
    assert seen == [True] * len(nodes)
    for hook in hooks:
        hook.remove()


def frozen_before_the_backward_pass(loss: Losses, parameters: list[Tensor]) -> None:
    """Freeze parameters between the passes: they get no gradients."""
    value = loss(0)
    for parameter in parameters[::2]:
        parameter.requires_grad_(False)
    value.backward()
    assert all((parameter.grad is None) == (not at % 2) for at, parameter in enumerate(parameters))
    for parameter in parameters[::2]:
        parameter.requires_grad_(True)
        parameter.grad = torch.zeros_like(parameter)


def seen_between(loss: Losses, parameters: list[Tensor]) -> None:
    """Compute with gradients between two backward passes: autograd notices that they have changed since."""
    loss(0).backward()
    assert parameters[0].grad is not None
    penalty = (parameters[0] * parameters[0].grad).sum()
    loss(1).backward()
    try:
        penalty.backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        raise AssertionError("a gradient that was added to is taken for what it was")


def stepped_between(loss: Losses, parameters: list[Tensor]) -> None:
    """Change parameters between the passes: gradients would be of others than the loss."""
    value = loss(0)
    _scale(parameters, 2.0)
    try:
        value.backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        raise AssertionError("parameters that have changed are taken for what they were")
    _scale(parameters, 0.5)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)


@torch.no_grad()
def _scale(parameters: list[Tensor], factor: float) -> None:
    for parameter in parameters:
        parameter.mul_(factor)


WAYS = (
    once, two_in_one, added_up, twice_through, asked_for, changed_by_hooks, changed_once_they_are_there,
    for_some_alone, changed_at_the_last_nodes, frozen_before_the_backward_pass, seen_between, stepped_between,
)  # fmt: skip


def gradients(context: RankContext, payload: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return for each case what `_gradients` does."""
    torch.set_num_threads(1)
    uses.BUCKET_BYTES = 1  # a bucket for each layer
    return [_gradients(context, case) for case in payload["cases"]]


def _gradients(context: RankContext, case: Mapping[str, Any]) -> dict[str, Any]:
    """Return how far gradients are from those of one process, by way, and the order of sums and layers."""
    torch.manual_seed(0)
    model = reference_models.make(case["model"], **case.get("options", {})).double()
    if case.get("reentrant") is not None:
        given = {"use_reentrant": case["reentrant"]}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=given)
    words = reference_models.words(model)
    batches = [torch.randint(0, words, (2, 2 * context.num_ranks, 8)) for _ in range(3)]
    theirs = copy.deepcopy(model)
    made = parallelize(model, case["strategy"], init_device_mesh("cpu", (context.num_ranks,)), check=False)

    def their_loss(number: int) -> Tensor:
        out = theirs(batches[number][0])
        logits = getattr(out, "logits", out)
        return nn.functional.cross_entropy(logits.flatten(0, 1), batches[number][1].flatten())

    answer: dict[str, Any] = {}
    # What is computed again has to be what it was: torch refuses others, here and on one process.
    ways = [way for way in WAYS if "reentrant" not in case or way is not frozen_before_the_backward_pass]
    for way in ways:
        theirs.zero_grad()
        made.module.zero_grad()
        way(their_loss, list(theirs.parameters()))
        way(lambda number: made.loss(*batches[number]), list(made.module.parameters()))
        pairs = zip(made.module.parameters(), theirs.parameters(), strict=True)
        answer[way.__name__] = max(float((_whole(a.grad) - b.grad).abs().max()) for a, b in pairs)
    with _order_of(made) as events:
        made.loss(*batches[0]).backward()
    answer["order"] = events
    answer["left to autograd"] = _left(lambda: made.loss(*batches[0]).backward())
    return answer


def _left(run: Callable[[], None]) -> int:
    """Return how many gradients backward passes leave to autograd, all of which could be put."""
    left = []

    def counted(*given: Any) -> Any:
        made = put_gradients(*given)
        left.append(sum(grad is not None for grad in made))
        return made

    with mock.patch("meshweave.nn.parallel.parameter_nodes.put_gradients", counted):
        run()
    assert left
    return sum(left)


def kept_gradients(context: RankContext, payload: Mapping[str, Any]) -> list[Any]:
    """Return whether gradients that ranks hold on to stay as they are, and whether memory is used again.

    Of the first batch the first rank alone keeps them, of the second all do.
    """
    torch.manual_seed(0)
    model = reference_models.make("gpt2").double()
    words = reference_models.words(model)
    batches = torch.randint(0, words, (3, 2, 2 * context.num_ranks, 8))
    theirs = copy.deepcopy(model)
    made = parallelize(model, "data_parallel", init_device_mesh("cpu", (context.num_ranks,)), check=False)
    parameters = list(made.module.parameters())
    held: list[tuple[int, list[Any]]] = []
    places = []
    for number, batch in enumerate(batches):
        made.module.zero_grad()
        made.step(*batch)
        places.append(parameters[0].grad.to_local().data_ptr())
        if number == 1 or (number == 0 and context.rank == 0):
            held.append((number, [each.grad for each in parameters]))
    far = []
    for number, grads in held:
        theirs.zero_grad()
        tokens, targets = batches[number]
        logits = theirs(tokens).logits
        nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        pairs = zip(grads, theirs.parameters(), strict=True)
        far.append(max(float((_whole(own) - their.grad).abs().max()) for own, their in pairs))
    del held, grads, pairs
    made.module.zero_grad()
    made.step(*batches[0])
    places.append(parameters[0].grad.to_local().data_ptr())
    return [far, places, [_of_a_layer_in_vain(context, made, batches[0], ranks) for ranks in (1, 2)]]


def _of_a_layer_in_vain(context: RankContext, made: Any, batch: Tensor, num_ranks: int) -> list[bool]:
    """Return whether parameters of the last layer, whose result the first ranks drop, have gradients."""
    layer = made.module.get_submodule(made.names.layers)[-1]

    def passed_over(module: nn.Module, args: Any, out: Any) -> Any:
        return (args[0], *out[1:]) if isinstance(out, tuple) else args[0]

    made.module.zero_grad()
    hook = layer.register_forward_hook(passed_over) if context.rank < num_ranks else None
    made.loss(*batch).backward()
    if hook is not None:
        hook.remove()
    return sorted({parameter.grad is not None for parameter in layer.parameters()})


def late(context: RankContext, payload: Mapping[str, Any]) -> list[float]:
    """Return losses of steps in which the first rank keeps gradients, and the last comes a second late."""
    torch.manual_seed(0)
    model = reference_models.make("gpt2")
    words = reference_models.words(model)
    tokens = torch.randint(0, words, (2 * context.num_ranks, 8))
    made = parallelize(model, "data_parallel", init_device_mesh("cpu", (context.num_ranks,)), check=False)
    kept, losses = [], []
    for _ in range(3):
        made.module.zero_grad()
        loss = made.loss(tokens, tokens)
        if context.rank == context.num_ranks - 1:
            time.sleep(1.0)
        loss.backward()
        losses.append(float(loss.detach()))
        if context.rank == 0:
            kept.append([each.grad for each in made.module.parameters()])
    return losses


def _whole(grad: Any) -> Tensor:
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


@contextmanager
def _order_of(made: Any) -> Iterator[list[str]]:
    """Yield what happens in a backward pass: "sum" as one begins, and layers as their backward part is due."""
    events: list[str] = []
    begin = ParameterBucket.begin_sum

    def noted(*args: Any) -> Any:
        events.append("sum")
        return begin(*args)

    def watch(number: int) -> Callable[..., None]:
        def look(module: nn.Module, args: Any, out: Any) -> None:
            first = out[0] if isinstance(out, tuple) else out
            first.register_hook(lambda grad: events.append(f"layer {number}"))

        return look

    layers = made.module.get_submodule(made.names.layers)
    hooks = [layer.register_forward_hook(watch(number)) for number, layer in enumerate(layers)]
    ParameterBucket.begin_sum = noted  # type: ignore[method-assign]
    try:
        yield events
    finally:
        ParameterBucket.begin_sum = begin  # type: ignore[method-assign]
        for hook in hooks:
            hook.remove()
