"""What must not have been done to a model before `parallelize`, for it would be dropped in silence."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshweave.base.errors import UnsupportedError

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_WRAPPERS = {
    "peft": "adapters are not computed; merge them (merge_and_unload()), or train all weights",
    "accelerate": "accelerate moves weights of its own; load the model without device_map",
    "bitsandbytes": "quantised weights are not computed; load the model without quantization_config",
    "torch.nn.parallel": "give its .module; data parallelism is an axis of the mesh, or goes around the result",
    "torch.distributed.fsdp": "shard it after parallelize, over other dims of the mesh",
}
"""Packages whose modules stand around or in place of a model's own, and what to do instead."""


def check_unaltered(module: nn.Module) -> None:
    """Raise UnsupportedError where hooks, adapters, wrappers or quantised weights would be dropped."""
    for name, child in module.named_modules():
        where = name or type(module).__name__
        for base in type(child).__mro__:
            for package, remedy in _WRAPPERS.items():
                if f"{base.__module__}.".startswith(f"{package}."):
                    raise UnsupportedError(f"{where}: {type(child).__name__} of {package}: {remedy}")
        if "forward" in vars(child):
            raise UnsupportedError(
                f"{where} has a forward of its own, set on the object (by parallelize, accelerate or a patch of "
                "kernels), which would be dropped; give a model as its class makes it"
            )
        if name:
            _check_hooks(child, name)
    for name, parameter in module.named_parameters():
        _check_parameter(parameter, name)


def _check_hooks(child: nn.Module, name: str) -> None:
    for kind in _HOOKS:
        hooks = getattr(child, kind, None) or {}
        # transformers' own, for checkpoints that enter anew: it does nothing where these do not.
        kept = [
            hook
            for hook in hooks.values()
            if "make_inputs_require_grads" not in getattr(hook, "__qualname__", "")
        ]
        if kept:
            raise UnsupportedError(
                f"{name} has {kind.strip('_').replace('_', ' ')}, which would be dropped; add them after "
                "parallelize"
            )


def _check_parameter(parameter: Tensor, name: str) -> None:
    if isinstance(parameter, DTensor):
        raise UnsupportedError(f"{name} is a DTensor: the model is sharded already; parallelize comes first")
    if type(parameter.data) is not Tensor or not parameter.is_floating_point():
        raise UnsupportedError(
            f"{name} is a {type(parameter.data).__name__} of {parameter.dtype}: quantised weights are not computed"
        )
