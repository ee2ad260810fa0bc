"""What `parallelize` cannot take over of a model, said before anything is replaced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

from meshweave.base.errors import UnsupportedError

_EMBEDDING_OPTIONS = ("max_norm", "scale_grad_by_freq", "sparse")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_WRAPPERS = {
    "peft": "give get_base_model() of PEFT's model, with LoRA of linear layers; merge others (merge_and_unload())",
    "accelerate": "accelerate moves weights of its own; load the model without device_map",
    "bitsandbytes": "quantised weights are not computed; load the model without quantization_config",
    "torch.nn.parallel": "give its .module; data parallelism is an axis of the mesh, or goes around the result",
    "torch.distributed.algorithms": "wrap the layers after parallelize",
    "torch.distributed.fsdp": "shard it after parallelize, over other dims of the mesh",
}
"""Packages whose modules stand around or in place of a model's own, and what to do instead."""


def check_unaltered(module: nn.Module) -> None:
    """Raise UnsupportedError where a model has something that would be lost as its layers are replaced.

    These are hooks on modules in it and on parameters, gradients other than 0, parametrizations, forward passes
    set on objects, compiled modules, adapters other than LoRA of PEFT, wrappers, quantised weights and DTensors.
    """
    for name, child in module.named_modules():
        where = name or type(module).__name__
        if hasattr(child, "_orig_mod") or child._compiled_call_impl is not None:
            raise UnsupportedError(f"{where} is compiled; compile the blocks after parallelize")
        for base in type(child).__mro__:
            for package, remedy in _WRAPPERS.items():
                if not is_adapter(child) and f"{base.__module__}.".startswith(f"{package}."):
                    raise UnsupportedError(f"{where}: {type(child).__name__} of {package}: {remedy}")
        if "forward" in vars(child):
            raise UnsupportedError(
                f"{where} has a forward of its own, set on the object (by parallelize, accelerate or a patch of "
                "kernels), which would be dropped; give a model as its class makes it"
            )
        if parametrize.is_parametrized(child):
            raise UnsupportedError(
                f"{name}: {next(iter(child.parametrizations))} is computed by a parametrization, which would "
                "be lost; call torch.nn.utils.parametrize.remove_parametrizations first"
            )
        if name:
            _check_hooks(child, name)
    for name, parameter in module.named_parameters():
        _check_parameter(parameter, name)


def forget_recorders(module: nn.Module) -> None:
    """Remove the hooks by which transformers records outputs, such as hidden states, left from an earlier call.

    The next call that records puts them on again, on the modules that are there by then.
    """
    for child in module.modules():
        vars(child).pop("_output_capturing_hooks_installed", None)
        for key, hook in list(child._forward_hooks.items()):
            if getattr(hook, "__module__", "") == "transformers.utils.output_capturing":
                del child._forward_hooks[key]


def _check_hooks(child: nn.Module, name: str) -> None:
    for kind in HOOKS:
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
    if any(getattr(parameter, kind, None) for kind in ("_backward_hooks", "_post_accumulate_grad_hooks")):
        raise UnsupportedError(f"{name} has hooks, which would be lost; register them after parallelize")
    if parameter.grad is not None and bool(parameter.grad.any()):
        raise UnsupportedError(
            f"{name} has a gradient, which would be lost; call zero_grad() before parallelize"
        )


def is_adapter(module: nn.Module) -> bool:
    """Return whether a module is PEFT's linear layer with LoRA."""
    return f"{type(module).__module__}." == "peft.tuners.lora.layer." and type(module).__name__ == "Linear"


def check_takeable(
    module: nn.Module, embedding: str, head: str, positions: str = "", adds_bias: bool = False
) -> None:
    """Raise UnsupportedError, naming a parameter, where a model shares it or has an option not taken over.

    Shared is a parameter with several names, except the weight of embedding and head, or two that overlap in
    memory. Options are those of embeddings (`max_norm`, `scale_grad_by_freq`, `sparse`, `padding_idx` of
    positions), and the bias of a head with the embedding's weight.

    Args:
        module: the model.
        embedding, head, positions: names of modules; "" for no positions.
        adds_bias: whether a head with the embedding's weight may have a bias.
    """
    weights = f"{embedding}.weight", f"{head}.weight"
    _check_names(module, weights)
    _check_memory(module)
    for path in filter(None, (embedding, positions)):
        _check_embedding(path, module.get_submodule(path))
    if positions and getattr(module.get_submodule(positions), "padding_idx", None) is not None:
        raise UnsupportedError(f"{positions} has a padding_idx, which tables of positions do not have here")
    bias = getattr(module.get_submodule(head), "bias", None)
    if (
        not adds_bias
        and bias is not None
        and module.get_submodule(head).weight is module.get_submodule(embedding).weight
    ):
        raise UnsupportedError(
            f"{head} has a bias and the weight of {embedding}; untie them, or drop the bias"
        )


def _check_embedding(path: str, table: nn.Module) -> None:
    for option in _EMBEDDING_OPTIONS:
        if value := getattr(table, option, None):
            raise UnsupportedError(f"{path} has {option}={value}, which tables that ranks share do not have")


def _check_names(module: nn.Module, tied: tuple[str, str]) -> None:
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for of_it in names.values():
        if len(of_it) > 1 and sorted(of_it) != sorted(tied):
            raise UnsupportedError(
                f"{_and(of_it)} are one parameter, which would be untied; only embedding and head may share one: "
                "give each its own"
            )


def _check_memory(module: nn.Module) -> None:
    """Raise UnsupportedError where two parameters overlap in memory."""
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for name, parameter in module.named_parameters():
        if type(parameter.data) is Tensor and parameter.numel():
            storage = parameter.untyped_storage()._cdata
            spans.setdefault(storage, []).append((*_span(parameter), name))
    for of_it in spans.values():
        for first, second in _overlapping(sorted(of_it)):
            raise UnsupportedError(
                f"{first} and {second} overlap in memory, and would be untied; give each parameter its own"
            )


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage and that after its last."""
    size = tensor.element_size()
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.storage_offset() * size
    return start, start + (last + 1) * size


def _overlapping(spans: Iterable[tuple[int, int, str]]) -> Iterator[tuple[str, str]]:
    end, owner = -1, ""
    for start, stop, name in spans:
        if start < end:
            yield owner, name
        if stop > end:
            end, owner = stop, name


def _and(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"
