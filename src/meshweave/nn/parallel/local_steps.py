"""Steps of optimizers on plain tensors: on what a rank has of parameters, or on one whole parameter after another.

An op on a DTensor costs some 100 us of Python, and a step of AdamW has a dozen for each parameter. Most optimizers
compute each element from those at the same place alone. Whether one does is tried: on a matrix, and on its halves.
Of these a step runs on the local parts. Others, as Adafactor and Muon, compute a matrix from all of it, by ops
that DTensors lack in part. Where each parameter is stepped on by itself, which is tried too, every rank gathers it
and steps on the whole. Parameters, gradients and states of their shape stay DTensors, to be read and saved.

On CPUs torch steps by a dozen calls for each parameter unless it is told otherwise. It has one kernel for all
parameters of the usual optimizers, which is taken where a user leaves the choice open: the same but for rounding,
which is tried as well.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter, is_
from typing import Any, TypeAlias, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.optim import Optimizer

from meshweave.execute.torch import compat
from meshweave.nn.dtensor import ascending_dims
from meshweave.nn.reshard import reshard

_STEPS, _LR = 4, 0.125
_STEPPED_ON_WHOLE = ("torch.optim.", "transformers.optimization")
"""Where classes are from that are tried on whole parameters."""
_DTYPE, _IS_ON_CPU, _IS_SPARSE = attrgetter("dtype"), attrgetter("is_cpu"), attrgetter("is_sparse")
_Step: TypeAlias = Callable[[Optimizer], None]
_known: WeakKeyDictionary[Optimizer, _Step | None] = WeakKeyDictionary()
_set_aside: WeakKeyDictionary[Optimizer, list[dict[str, Any]]] = WeakKeyDictionary()


def step_locally(optimizer: Optimizer, has_arguments: bool) -> None:
    """Do the step of an optimizer on plain tensors, just before its own, where that has the same result.

    The optimizer's own step then sees no parameters, until `restore_parameter_groups`. Nothing is done where there
    are other hooks on steps, while a compiler traces, where gradients have other placements than their parameters,
    and for classes that are not known to step alike on plain tensors. Collective for optimizers that step on whole
    parameters, which ranks then gather.

    Args:
        optimizer: the optimizer, whose state is updated.
        has_arguments: whether the step is given arguments, such as a closure; then nothing is done either.
    """
    if has_arguments or torch.compiler.is_compiling() or compat.other_step_hooks(optimizer):
        return
    if optimizer not in _known:
        _known[optimizer] = _way(optimizer)
    step = _known[optimizer]
    if step is None or not _lies_alike(optimizer):
        return
    step(optimizer)
    _set_aside[optimizer] = optimizer.param_groups
    optimizer.param_groups = []


def restore_parameter_groups(optimizer: Optimizer) -> None:
    """Give an optimizer back the parameter groups that `step_locally` took away; nothing if it took none."""
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
    if not isinstance(grad, DTensor):
        return False
    own, of_grad = compat.spec_of(parameter), compat.spec_of(grad)
    return own is of_grad or own.placements == of_grad.placements


def _step_on_parts(optimizer: Optimizer, *, has_kernel: bool) -> None:
    """Make a step on local parts, and put states that it has made into the optimizer, as DTensors.

    Nothing is kept from one step to the next: parameters and states are the optimizer's alone, to be moved or
    freed.

    Args:
        has_kernel: whether one kernel of torch makes the same step of all parameters on a CPU.
    """
    of_optimizer = optimizer.state
    state: defaultdict[Tensor, Any] = defaultdict(dict)
    groups, steps = [], []
    num_kept = 0
    for group in optimizer.param_groups:
        parameters = group["params"]
        own = compat.local_tensors(parameters)
        stepped = {**group, "params": own}
        groups.append(stepped)
        grads = compat.local_tensors([parameter.grad for parameter in parameters])
        is_open = has_kernel and _leaves_open(group)
        if is_open or group.get("fused"):  # a kernel takes data as if they had no gaps
            grads = [grad if grad is None or grad.is_sparse else grad.contiguous() for grad in grads]
        used = []
        for parameter, local, grad in zip(parameters, own, grads, strict=True):
            kept, values = of_optimizer.get(parameter), None
            if local is not parameter:
                local.grad = grad
            if kept is not None:
                num_kept += 1
                values = compat.local_tensors(kept.values())
                state[local] = kept if local is parameter else dict(zip(kept, values, strict=True))
            steps.append((parameter, local, values))
            if is_open and grad is not None:
                used.append((local, local.grad, *(values or ())))
        if is_open and _suit_kernel(used):
            stepped["fused"] = True
    if num_kept < len(of_optimizer):  # what is of no parameter
        own_ids = {id(parameter) for parameter, *_ in steps}
        state.update((key, value) for key, value in of_optimizer.items() if id(key) not in own_ids)
    try:
        _run(optimizer, groups, state)
    finally:
        for parameter, local, _ in steps:
            if local is not parameter:
                local.grad = None
    for group, stepped in zip(optimizer.param_groups, groups, strict=True):
        group.update((key, value) for key, value in stepped.items() if key not in ("params", "fused"))
    for parameter, local, values in steps:
        made = state.pop(local, None)
        if made is None:
            continue
        if local is parameter:
            of_optimizer[parameter] = made
        elif values is None or len(made) != len(values) or not all(map(is_, made.values(), values)):
            kept = of_optimizer[parameter]
            for key, value in made.items():
                if key not in kept or _local(kept[key]) is not value:
                    kept[key] = _like(value, parameter, local)
    of_optimizer.update(state)


@torch.no_grad()  # type: ignore[untyped-decorator]
def _step_on_whole(optimizer: Optimizer) -> None:
    """Make a step on one whole parameter after another, of which this rank keeps its part; all ranks call it."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            whole = _whole(parameter)
            whole.grad = _whole(parameter.grad)
            state: defaultdict[Tensor, Any] = defaultdict(dict)
            if parameter in optimizer.state:
                state[whole] = {key: _whole(value) for key, value in optimizer.state[parameter].items()}
            stepped = {**group, "params": [whole]}
            _run(optimizer, [stepped], state)
            group.update((key, value) for key, value in stepped.items() if key != "params")
            kept = {key: _kept(value, parameter) for key, value in state[whole].items()}
            optimizer.state[parameter] = kept
            if isinstance(parameter, DTensor):
                compat.local_tensor(parameter).copy_(compat.local_tensor(_kept(whole, parameter)))


def _whole(value: Any) -> Any:
    if not isinstance(value, DTensor):
        return value
    if all(ascending_dims(value.device_mesh)):
        return value.detach().full_tensor()
    return reshard(value.detach(), value.device_mesh, [Replicate()] * value.device_mesh.ndim).to_local()


def _kept(value: Any, parameter: Tensor) -> Any:
    """Return what a rank keeps of a state: a DTensor where it has the shape of a parameter, else all of it."""
    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    own = distribute_tensor(value.detach(), parameter.device_mesh, parameter.placements, src_data_rank=None)
    return compat.from_spec(compat.local_tensor(own), compat.spec_of(parameter))


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


def _leaves_open(group: dict[str, Any]) -> bool:
    """Return whether the settings of a group leave it to torch by which kernels it steps."""
    left = all(name in group and group[name] is None for name in ("fused", "foreach"))
    return left and not group.get("differentiable") and not isinstance(group.get("lr"), Tensor)


def _suit_kernel(used: Sequence[tuple[Any, ...]]) -> bool:
    """Return whether one kernel steps on these parameters, gradients and states: all lie without gaps on a CPU.

    It takes data as if they lay so, and counts steps in single precision. Of SGD it takes no parameter that has a
    momentum beside one that has none yet.

    Args:
        used: of each parameter that has a gradient the parameter, the gradient and what its state has.
    """
    if len({tuple([each is None for each in of_one]) for of_one in used}) > 1:
        return False
    tensors = [each for of_one in used for each in of_one if isinstance(each, Tensor)]
    kinds = set(map(_DTYPE, tensors))
    if kinds != {torch.float32}:
        counts_in_single = all(each.dtype == torch.float32 for each in tensors if not each.ndim)
        if not counts_in_single or not kinds <= {torch.float32, torch.float64}:
            return False
    is_on_cpu = all(map(_IS_ON_CPU, tensors)) and not any(map(_IS_SPARSE, tensors))
    return is_on_cpu and all(map(Tensor.is_contiguous, tensors))


def _way(optimizer: Optimizer) -> _Step | None:
    """Return by which way an optimizer makes the same step on plain tensors; None where it is to have DTensors."""
    if not compat.bare_step(type(optimizer)).__module__.startswith(_STEPPED_ON_WHOLE):
        return None
    # Its states may be what it made when it was made, as Adagrad's are: those of a trial are made by another one.
    with contextlib.suppress(Exception):
        whole = _matrix()
        if all(_is_same_apart(optimizer, whole, whole.chunk(2, dim), dim) for dim in (0, 1)):
            return partial(_step_on_parts, has_kernel=_is_same_by_kernel(optimizer, whole))
        if _is_by_itself(optimizer, whole):
            return cast(_Step, _step_on_whole)
    return None


def mixes_parameters(optimizer: Optimizer) -> bool:
    """Return whether the update of one parameter depends on which others an optimizer steps at the same time.

    It is tried with an optimizer of this class and settings; False where that fails.
    """
    with contextlib.suppress(Exception), torch.random.fork_rng(devices=[]):
        return not _is_by_itself(optimizer, _matrix())
    return False


def _matrix() -> Tensor:
    return torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)


def _is_by_itself(optimizer: Optimizer, whole: Tensor) -> bool:
    """Return whether an optimizer steps on each of two parameters as on it alone."""
    values = whole, whole.t() / 2
    return all(map(torch.equal, _tried(optimizer, values), [_tried(optimizer, [each])[0] for each in values]))


def _is_same_apart(optimizer: Optimizer, whole: Tensor, parts: Sequence[Tensor], dim: int) -> bool:
    """Return whether an optimizer steps on parts of a matrix as on all of it, but for how a kernel rounds."""
    (stepped,) = _tried(optimizer, [whole])
    apart = torch.cat(_tried(optimizer, parts), dim)
    return bool(torch.allclose(stepped, apart, rtol=1e-12, atol=1e-15))


def _is_same_by_kernel(optimizer: Optimizer, whole: Tensor) -> bool:
    """Return whether an optimizer has one kernel for all parameters, which steps on a matrix as others do."""
    with contextlib.suppress(Exception):
        by_kernel = _tried(optimizer, [whole], fused=True)
        return bool(torch.allclose(*_tried(optimizer, [whole]), *by_kernel, rtol=1e-12, atol=1e-15))
    return False


def _tried(optimizer: Optimizer, values: Sequence[Tensor], **settings: Any) -> list[Tensor]:
    """Return parameters of some values after steps by an optimizer of this kind and its settings, or others."""
    leaves = [value.contiguous().clone().requires_grad_() for value in values]
    taken = inspect.signature(type(optimizer)).parameters
    own = {key: value for key, value in optimizer.defaults.items() if key in taken}
    made = type(optimizer)(leaves, **{**own, **settings})
    group = made.param_groups[0]
    if isinstance(group.get("lr"), float):
        group["lr"] = _LR
    for number in range(_STEPS):
        for leaf, value in zip(leaves, values, strict=True):
            leaf.grad = (value * 7 + number).sin()
        _run(made, [group], made.state)
    return [leaf.detach() for leaf in leaves]
