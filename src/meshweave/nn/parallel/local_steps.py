"""Steps of optimizers on what a rank has of parameters, where that is the same as on DTensors.

An op on a DTensor costs some 100 us of Python, and a step of AdamW has a dozen for each parameter. Most optimizers
compute each element from those at the same place alone. Whether one does is tried: on a matrix, and on its halves.
Of these a step runs on the local parts; parameters, gradients and states stay DTensors for whoever reads or saves
them.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import defaultdict
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from meshweave.execute.torch import compat

_STEPS, _LR = 2, 0.125
_known: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()
_set_aside: WeakKeyDictionary[Optimizer, list[dict[str, Any]]] = WeakKeyDictionary()


def step_locally(optimizer: Optimizer, has_arguments: bool) -> None:
    """Make the step that an optimizer is about to make on local parts, and leave it none, where that is the same.

    It is not where others look at the step too, it has a closure, or an optimizer is no elementwise one of torch.
    `restore` comes after the step.
    """
    if has_arguments or torch.compiler.is_compiling() or compat.other_step_hooks(optimizer):
        return
    if optimizer not in _known:
        _known[optimizer] = _is_elementwise(optimizer)
    if not _known[optimizer] or not _lies_alike(optimizer):
        return
    _step(optimizer)
    _set_aside[optimizer] = optimizer.param_groups
    optimizer.param_groups = []


def restore(optimizer: Optimizer) -> None:
    """Give an optimizer back what `step_locally` has set aside."""
    groups = _set_aside.pop(optimizer, None)
    if groups is not None:
        optimizer.param_groups = groups


def _lies_alike(optimizer: Optimizer) -> bool:
    """Return whether there are DTensors, and all gradients lie as their parameters do."""
    num_dtensors = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, DTensor):
                num_dtensors += 1
                if parameter.grad is not None and not _is_like(parameter.grad, parameter):
                    return False
    return num_dtensors > 0


def _is_like(grad: Tensor, parameter: DTensor) -> bool:
    places = compat.spec_of(parameter).placements
    return isinstance(grad, DTensor) and compat.spec_of(grad).placements == places


def _step(optimizer: Optimizer) -> None:
    """Make a step on local parts, and put states that it has made into the optimizer, as DTensors."""
    pairs: list[tuple[Tensor, Tensor]] = []
    state: defaultdict[Tensor, Any] = defaultdict(dict)
    groups = []
    for group in optimizer.param_groups:
        locals_ = []
        for parameter in group["params"]:
            local = _local(parameter)
            locals_.append(local)
            if local is not parameter:
                pairs.append((parameter, local))
                local.grad = None if parameter.grad is None else _local(parameter.grad)
            if parameter in optimizer.state:
                kept = optimizer.state[parameter]
                state[local] = (
                    kept if local is parameter else {key: _local(value) for key, value in kept.items()}
                )
        groups.append({**group, "params": locals_})
    try:
        _run(optimizer, groups, state)
    finally:
        for _, local in pairs:
            local.grad = None
    for group, stepped in zip(optimizer.param_groups, groups, strict=True):
        group.update((key, value) for key, value in stepped.items() if key != "params")
    for parameter, local in pairs:
        if local in state:
            kept = optimizer.state[parameter]
            for key, value in state[local].items():
                if key not in kept or _local(kept[key]) is not value:
                    kept[key] = _like(value, parameter, local)
    for parameter, values in state.items():
        if parameter not in optimizer.state and all(parameter is not local for _, local in pairs):
            optimizer.state[parameter] = values


def _run(optimizer: Optimizer, groups: list[dict[str, Any]], state: Any) -> None:
    """Run an optimizer's step on other groups and states."""
    stand_in = object.__new__(type(optimizer))
    stand_in.__dict__.update(optimizer.__dict__, param_groups=groups, state=state)
    compat.bare_step(type(optimizer))(stand_in)


def _local(value: Any) -> Any:
    return compat.local_tensor(value) if isinstance(value, DTensor) else value


def _like(value: Any, parameter: Tensor, local: Tensor) -> Any:
    """Return a state as it is kept: a DTensor where it has an element for each of the parameter."""
    if isinstance(value, Tensor) and value.shape == local.shape and local.ndim:
        return compat.from_spec(value, compat.spec_of(parameter))
    return value


def _is_elementwise(optimizer: Optimizer) -> bool:
    """Return whether an optimizer of torch steps on the halves of a matrix as on all of it."""
    if not compat.bare_step(type(optimizer)).__module__.startswith("torch.optim."):
        return False
    # Its states may be what it made when it was made, as Adagrad's are: those of a trial are made by another one.
    with contextlib.suppress(Exception):
        whole = torch.linspace(-1, 1, 24).view(4, 6)
        for dim in (0, 1):
            parts = [part.contiguous() for part in whole.chunk(2, dim)]
            stepped = _tried(optimizer, [whole.clone()], [whole])
            apart = _tried(optimizer, [part.clone() for part in parts], parts)
            if not torch.equal(stepped[0], torch.cat(apart, dim)):
                return False
        return True
    return False


def _tried(optimizer: Optimizer, parameters: list[Tensor], values: list[Tensor]) -> list[Tensor]:
    """Return parameters after steps by an optimizer of this kind and its settings, with gradients of `values`."""
    leaves = [parameter.requires_grad_() for parameter in parameters]
    taken = inspect.signature(type(optimizer)).parameters
    made = type(optimizer)(leaves, **{key: v for key, v in optimizer.defaults.items() if key in taken})
    group = made.param_groups[0]
    if isinstance(group.get("lr"), float):
        group["lr"] = _LR
    for number in range(_STEPS):
        for leaf, value in zip(leaves, values, strict=True):
            leaf.grad = (value * 7 + number).sin()
        _run(made, [group], made.state)
    return [leaf.detach() for leaf in leaves]
