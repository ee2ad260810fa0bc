"""Modules as a proof runs them: in another precision, without dropout or recomputation, and restored."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from meshweave.execute.torch import compat

WIDE = torch.float64
_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_CASTS = (Tensor.float, Tensor.half, Tensor.bfloat16)


class WideCasts(TorchFunctionMode):  # type: ignore[misc]
    """A context in which casts to float32, float16 and bfloat16 go to float64, so that a model rounds nowhere."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch with `WIDE` for narrow types."""
        if func in _CASTS:
            return Tensor.double(args[0])
        if func is Tensor.view:  # of the same bits
            return func(*args, **(kwargs or {}))
        args = tuple([WIDE if isinstance(arg, torch.dtype) and arg in _NARROW else arg for arg in args])
        named = {
            key: WIDE if isinstance(value, torch.dtype) and value in _NARROW else value
            for key, value in (kwargs or {}).items()
        }
        return func(*args, **named)


def has_external_sync(module: nn.Module) -> bool:
    """Return whether FSDP2, DDP or hooks of other code act on the gradients of a module.

    True if it or one of its submodules is an `FSDPModule` or `DistributedDataParallel`, or if one of its
    parameters has a gradient hook from outside this library. Wrappers around the module are not looked for.
    """
    from torch.distributed.fsdp import FSDPModule

    wrappers = (FSDPModule, nn.parallel.DistributedDataParallel)
    hooks = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return any(isinstance(child, wrappers) for child in module.modules()) or any(
        not getattr(hook, "__module__", "").startswith("meshweave.")
        for parameter in module.parameters()
        for name in hooks
        for hook in (getattr(parameter, name, None) or {}).values()
    )


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy of a tensor in new memory: in `dtype` if it is of floating point, else in its own dtype.

    A floating DTensor keeps its placements.
    """
    if not tensor.is_floating_point():
        return tensor.detach().clone()
    if not isinstance(tensor, DTensor):
        return tensor.detach().to(dtype, copy=True)
    local = compat.local_tensor(tensor).to(dtype, copy=True)
    spec = compat.spec_of(tensor)
    own = compat.make_spec(
        spec.mesh, spec.placements, tuple(tensor.shape), dtype, compat.explicit_shard_order(spec)
    )
    return compat.from_spec(local, own)


@contextmanager
def prepared(
    module: nn.Module,
    dtype: torch.dtype | None = None,
    owner: Any = None,
    training: bool = True,
    casts_buffers: bool = True,
    drops: bool = False,
) -> Iterator[None]:
    """Run the block with a module prepared for a proof, then restore it: no dropout, no gradients at first.

    Gradients are computed in it, also under `torch.no_grad()`. Random numbers are drawn from a fixed seed.

    Args:
        module: the module, changed in place for the time of the block.
        dtype: of parameters, buffers and computation; None as they are. Must be None for modules under FSDP2 and
            DDP, which keep parameters elsewhere.
        owner: the object that runs the module, which may have `recompute` or a dropout of its own; None for none.
        training: whether modules are in training mode.
        casts_buffers: whether buffers and tensors that are attributes are cast to `dtype`, too.
        drops: whether dropout stays.
    """
    modules = list(module.modules())
    states = [(child, dict(vars(child)), dict(child._parameters), dict(child._buffers)) for child in modules]
    grads = {parameter: parameter.grad for parameter in module.parameters()}
    changed: list[tuple[Any, str, Any]] = []
    cuda = sorted({p.device.index or 0 for p in module.parameters() if p.device.type == "cuda"})
    wide: Any = WideCasts() if dtype == WIDE else nullcontext()
    kind = next((p.device.type for p in module.parameters()), "cpu")
    keeps = nullcontext() if dtype is None else torch.autocast(kind, enabled=False)
    try:
        for parameter in grads:
            parameter.grad = None
        made: dict[int, Tensor] = {}
        for child in modules:
            child.training = training
            if getattr(child, "gradient_checkpointing", False):
                vars(child)["gradient_checkpointing"] = False  # what is computed again would be rounded
            _lay(child, dtype, made, casts_buffers)
        if not drops:
            changed += without_dropout([*modules, owner])
        if dtype == WIDE:
            changed += with_loops_over_experts(modules)
        if getattr(owner, "recompute", False):
            changed.append((owner, "recompute", True))
            owner.recompute = False
        with torch.random.fork_rng(cuda), wide, keeps, torch.enable_grad():
            torch.manual_seed(20)
            yield
    finally:
        managed = dtype is None and has_external_sync(module)
        for child, attributes, parameters, buffers in states:
            vars(child).clear()
            vars(child).update(attributes)
            child._buffers.clear()
            child._buffers.update(buffers)
            if not managed:
                child._parameters.clear()
                child._parameters.update(parameters)
        for owner, name, value in reversed(changed):
            object.__setattr__(owner, name, value)
        for parameter, grad in grads.items():
            parameter.grad = grad


def _lay(child: nn.Module, dtype: torch.dtype | None, made: dict[int, Tensor], casts_buffers: bool) -> None:
    """Put copies of buffers into a module, and parameters of another type; what is tied stays tied."""
    for name, parameter in child._parameters.items():
        if parameter is None or dtype in (None, parameter.dtype) or not parameter.is_floating_point():
            continue
        if id(parameter) not in made:
            made[id(parameter)] = nn.Parameter(cast(parameter, dtype), parameter.requires_grad)
        child._parameters[name] = made[id(parameter)]
    for name, buffer in child._buffers.items():
        if buffer is not None and not isinstance(buffer, DTensor):
            if id(buffer) not in made:
                made[id(buffer)] = cast(buffer, dtype if dtype and casts_buffers else buffer.dtype)
            child._buffers[name] = made[id(buffer)]
    for name, value in list(vars(child).items()):
        if dtype is not None and casts_buffers and isinstance(value, Tensor) and value.is_floating_point():
            vars(child)[name] = cast(value, dtype)


def without_dropout(owners: Iterable[Any]) -> list[tuple[Any, str, Any]]:
    """Set dropout probabilities of modules and configurations to 0; return [(object, attribute, old value)]."""
    changed: list[tuple[Any, str, Any]] = []
    for owner in owners:
        for each in _dropouts(owner):
            _drop_nothing(each, changed)
    return changed


def with_loops_over_experts(modules: Iterable[Any]) -> list[tuple[Any, str, Any]]:
    """Make models of transformers multiply expert by expert, since grouped products lack double precision.

    Return [(configuration, attribute, old value)] for what was changed.
    """
    changed: list[tuple[Any, str, Any]] = []
    name = "_experts_implementation"
    for child in modules:
        config = getattr(child, "__dict__", {}).get("config")
        if getattr(config, name, None) not in (None, "eager"):
            changed.append((config, name, getattr(config, name)))
            object.__setattr__(config, name, "eager")
    return changed


def _dropouts(child: Any) -> Iterator[Any]:
    """Yield what may say a probability of dropout: a module, its configuration, and parts that are no modules."""
    yield child
    for name, value in getattr(child, "__dict__", {}).items():
        if name == "config" or type(value).__module__.startswith("meshweave.nn"):
            if isinstance(value, nn.Module) or not hasattr(value, "__dict__"):
                continue
            yield value
            yield from (part for part in vars(value).values() if "Dropout" in type(part).__name__)


def _drop_nothing(owner: Any, changed: list[tuple[Any, str, Any]]) -> None:
    """Set the probabilities of dropout of an object to 0, and list what they were."""
    is_dropout = "drop" in type(owner).__name__.lower()
    for name, value in list(getattr(owner, "__dict__", {}).items()):
        is_one = isinstance(value, float) and value != 0
        if is_one and ("drop" in name.lower() or (is_dropout and name == "p")):
            changed.append((owner, name, value))
            object.__setattr__(owner, name, 0.0)


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return a module's parameters under all of their names, without the prefixes that wrappers of torch add."""
    named = module.named_parameters(remove_duplicate=False)
    return {plain_name(name): parameter for name, parameter in named}


def plain_name(name: str) -> str:
    """Return a tensor's or module's name without the prefixes of torch's wrappers (DDP, FSDP, compile, ...).

    "module.0._orig_mod.weight" -> "0.weight".
    """
    parts = name.split(".")
    while parts[:1] in (["module"], ["_orig_mod"]):
        parts = parts[1:]
    return ".".join(part for part in parts if part not in _WRAPPERS)


def takes(call: Callable[..., Any], name: str) -> bool:
    """Return whether a function has a parameter `name`."""
    return name in inspect.signature(call).parameters
