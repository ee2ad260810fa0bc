"""What of a model's parameters `parallelize` cannot take over, said before anything is replaced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor, nn
from torch.nn.utils import parametrize

from meshweave.base.errors import UnsupportedError

_EMBEDDING_OPTIONS = ("max_norm", "scale_grad_by_freq", "sparse")


def check_takeable(module: nn.Module, embedding: str, head: str, positions: str = "") -> None:
    """Raise UnsupportedError, naming it, for what replaced layers would not keep of the parameters of a model.

    These are parameters with several names or with memory in common, but for one of embedding and head; those
    that are computed from others; hooks and gradients of parameters; options of embeddings.
    """
    weights = f"{embedding}.weight", f"{head}.weight"
    _check_names(module, weights)
    _check_memory(module)
    for name, child in module.named_modules():
        if parametrize.is_parametrized(child):
            raise UnsupportedError(
                f"{name}: {next(iter(child.parametrizations))} is computed by a parametrization, which would "
                "be lost; call torch.nn.utils.parametrize.remove_parametrizations first"
            )
    for name, parameter in module.named_parameters():
        hooks = (
            getattr(parameter, kind, None) for kind in ("_backward_hooks", "_post_accumulate_grad_hooks")
        )
        if any(hooks):
            raise UnsupportedError(f"{name} has hooks, which would be lost; register them after parallelize")
        if parameter.grad is not None and bool(parameter.grad.any()):
            raise UnsupportedError(
                f"{name} has a gradient, which would be lost; call zero_grad() before parallelize"
            )
    for path in filter(None, (embedding, positions)):
        _check_embedding(path, module.get_submodule(path))
    if positions and getattr(module.get_submodule(positions), "padding_idx", None) is not None:
        raise UnsupportedError(f"{positions} has a padding_idx, which tables of positions do not have here")
    bias = getattr(module.get_submodule(head), "bias", None)
    if bias is not None and module.get_submodule(head).weight is module.get_submodule(embedding).weight:
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
