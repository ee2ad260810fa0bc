"""Copies of a model with some of its layers, few words, random weights, and windows shorter than short inputs."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshweave.base.errors import UnsupportedError
from meshweave.nn.parallel.structure import ModelMap
from meshweave.nn.prove.state import WIDE, with_loops_over_experts

_OF_MODULE = frozenset(vars(nn.Module()))
_WINDOW = re.compile(r"window|attention_chunk|local_attention|attention_span")
_POSITIONS = re.compile(r"original_max|max_seq_len|max_position")
_PLAIN = (int, float, str, bool, type(None), torch.dtype, torch.device)
_DEPTH = 4
_RANK = 16


def kinds_of(module: nn.Module, names: ModelMap) -> list[int]:
    """Return for each layer the index of the first layer of the same kind: layers A, B, A -> [0, 1, 0].

    Layers of a kind have equal classes, shapes, attributes and entries in lists of the configuration, except for
    attributes that count the layers.
    """
    layers = list(module.get_submodule(names.layers))
    shared: set[int] = {id(value) for layer in layers[:1] for value in _objects(layer)}
    for layer in layers[1:]:
        shared &= {id(value) for value in _objects(layer)}
    told = [dict(_told(layer, "", shared)) for layer in layers]
    for config in _configs(module):
        for name, value in vars(config).items():
            if isinstance(value, list | tuple) and len(value) == len(layers):
                for own, each in zip(told, value, strict=True):
                    own[f"config.{name}"] = repr(each)
    counting = set(_counting(told))
    keys = [repr(sorted((path, v) for path, v in own.items() if path not in counting)) for own in told]
    return [keys.index(key) for key in keys]


def _objects(layer: nn.Module) -> Iterator[Any]:
    for child in layer.modules():
        yield from (value for name, value in vars(child).items() if name not in _OF_MODULE)


def _told(value: Any, path: str, shared: set[int], depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yield what says how a layer computes, by path: classes, shapes, and attributes that are no tensors."""
    if isinstance(value, nn.Module):
        yield path, _class(value)
        own = {name: each for name, each in vars(value).items() if name not in _OF_MODULE}
        for name, each in [*own.items(), *value._parameters.items(), *value._buffers.items()]:
            yield from _told(each, f"{path}.{name}", shared, depth)
        for name, child in value._modules.items():
            yield from _told(child, f"{path}.{name}", shared, depth)
    elif isinstance(value, Tensor):
        says_all = not isinstance(value, nn.Parameter) and not value.is_meta and value.numel() <= 1 << 16
        yield path, repr((tuple(value.shape), value.detach().cpu().tolist() if says_all else ""))
    elif isinstance(value, _PLAIN):
        yield path, repr(value)
    elif isinstance(value, list | tuple | set | frozenset):
        ordered = value if isinstance(value, list | tuple) else sorted(value, key=repr)
        for number, each in enumerate(ordered):
            yield from _told(each, f"{path}.{number}", shared, depth + 1)
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _told(each, f"{path}.{key}", shared, depth + 1)
    elif id(value) in shared or depth > _DEPTH:
        yield path, _class(value)
    else:
        yield path, getattr(value, "__qualname__", _class(value))
        for name, each in getattr(value, "__dict__", {}).items():
            yield from _told(each, f"{path}.{name}", shared, depth + 1)


def _class(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _counting(told: Sequence[dict[str, str]]) -> Iterator[str]:
    """Yield the paths of whole numbers that rise by one from layer to layer."""
    for path, first in told[0].items():
        values = [own.get(path, "") for own in told]
        are_numbers = len(told) > 1 and all(re.fullmatch(r"\d+", value) for value in values)
        if are_numbers and all(int(value) == int(first) + at for at, value in enumerate(values)):
            yield path


def _configs(module: nn.Module) -> list[Any]:
    """Return the configurations that the modules of a model have, those within others too."""
    configs: dict[int, Any] = {}
    pending = [own for child in module.modules() if (own := vars(child).get("config")) is not None]
    while pending:
        config = pending.pop()
        if id(config) in configs or not hasattr(config, "__dict__"):
            continue
        configs[id(config)] = config
        pending += [each for name, each in vars(config).items() if name.endswith("config")]
    return list(configs.values())


# --- copies -----------------------------------------------------------------------------------------------------


def reduced(
    module: nn.Module,
    names: ModelMap,
    chosen: Sequence[int],
    *,
    words: int,
    sequence: int,
    binds: Collection[str],
    device: torch.device,
    dtype: torch.dtype,
    shares: bool = False,
) -> nn.Module:
    """Return a copy of a model with some of its layers and random weights, without memory for the rest.

    The copy is in training mode, with the model's dropout.

    Args:
        module: the model.
        names: the names of its modules.
        chosen: the indices of the layers, in order.
        words: the size of the copy's vocabulary; the model's own where that is smaller.
        sequence: the number of tokens of a row that the copy will be given.
        binds: which of "window" (of attention) and "positions" (the original context length) are made shorter than
            `sequence`.
        device, dtype: of the copy.
        shares: whether layers of the same shapes have the same weights, and equal buffers once. On a CPU the
            matrix of an `nn.Linear` is then the product of two thin matrices, its attribute `factors`.

    Raises UnsupportedError where it cannot be copied.
    """
    layers = module.get_submodule(names.layers)
    assert isinstance(layers, nn.ModuleList)
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        empty = torch.empty_like(parameter, device="meta", requires_grad=False)
        memo[id(parameter)] = nn.Parameter(empty, parameter.requires_grad and parameter.is_floating_point())
    try:
        if shares:
            _share(layers, memo)
        kept = [copy.deepcopy(layers[number], memo) for number in chosen]
        memo[id(layers)] = nn.ModuleList(kept)
        made = copy.deepcopy(module, memo)
    except Exception as error:
        raise UnsupportedError(
            f"{type(module).__name__} cannot be copied to prove it ({type(error).__name__}: {error}); parallelize "
            "with check=False trains it unproved"
        ) from error
    _shorten(made, module, names, chosen)
    before = int(module.get_submodule(names.embedding).weight.shape[0])
    _fewer_words(made, names, before, min(words, before))
    _materialise(made, device, dtype, module, is_thin=shares and device.type == "cpu")
    _bind(made, sequence, binds)
    if dtype == WIDE:
        with_loops_over_experts(made.modules())
    for config in _configs(made):
        for name in ("output_router_logits", "output_hidden_states", "output_attentions"):
            if getattr(config, name, False):
                setattr(config, name, False)  # hooks for them stay where the first call has put them
    return made.train()


def _share(layers: nn.ModuleList, memo: dict[int, Any]) -> None:
    """Let copies by `memo` of layers have the weights of the first of the same shapes, and equal buffers of it."""
    first: dict[Any, nn.Module] = {}
    for layer in layers:
        shapes = tuple((name, parameter.shape) for name, parameter in layer.named_parameters())
        same = first.setdefault(shapes, layer)
        pairs = zip(layer.parameters(), same.parameters(), strict=True)
        memo |= {id(own): memo[id(other)] for own, other in pairs}
        theirs = dict(same.named_buffers())
        for name, own in layer.named_buffers():
            other = theirs.get(name, own)
            kind = own.dtype, own.device
            if not own.is_meta and kind == (other.dtype, other.device) and torch.equal(own, other):
                memo[id(own)] = memo.setdefault(id(other), other.clone())


def _shorten(made: nn.Module, module: nn.Module, names: ModelMap, chosen: Sequence[int]) -> None:
    """Let a copy know how many layers it has, and each of them its number."""
    layers = list(module.get_submodule(names.layers))
    count = len(layers)
    told = [dict(_told(layer, "", set())) for layer in layers]
    for path in _counting(told):
        for at, layer in enumerate(made.get_submodule(names.layers)):
            owner, _, name = path.lstrip(".").rpartition(".")
            _set_at(layer, owner, name, int(told[at][path]))
    inner = set(made.get_submodule(names.layers).modules())
    for config in (*_configs(made), *(child for child in made.modules() if child not in inner)):
        for name, value in list(vars(config).items()):
            if name not in _OF_MODULE and isinstance(value, list | tuple) and len(value) == count:
                object.__setattr__(config, name, type(value)(value[number] for number in chosen))
            elif isinstance(value, int) and value == count and "layer" in name:
                object.__setattr__(config, name, len(chosen))
            elif name == "use_cache":
                object.__setattr__(config, name, False)
            elif name.startswith("_attn_implementation") and "flash" in str(value):
                object.__setattr__(config, name, "sdpa")


def _set_at(layer: nn.Module, owner: str, name: str, value: int) -> None:
    try:
        at: Any = layer.get_submodule(owner)
    except AttributeError:
        return
    if isinstance(vars(at).get(name), int):
        setattr(at, name, value)


def _fewer_words(made: nn.Module, names: ModelMap, before: int, words: int) -> None:
    for path in (names.embedding, names.head):
        owner = made.get_submodule(path)
        for parameter in owner._parameters.values():
            if parameter is not None and parameter.shape[0] == before:
                parameter.data = torch.empty(
                    (words, *parameter.shape[1:]), dtype=parameter.dtype, device="meta"
                )
        for name, value in list(vars(owner).items()):
            if name in ("num_embeddings", "out_features") and value == before:
                setattr(owner, name, words)
            elif name == "padding_idx" and isinstance(value, int):
                owner.padding_idx = min(value, words - 1)
    for holder in (*made.modules(), *_configs(made)):
        for name, value in list(vars(holder).items()):
            if name in ("vocab_size", "n_vocab") and value == before:
                object.__setattr__(holder, name, words)


def _bind(made: nn.Module, sequence: int, binds: Collection[str]) -> None:
    """Shorten windows to a few tokens, and original positions to half of a sequence."""
    short = {"window": sequence // 4 + 1, "positions": sequence // 2}
    short = {what: size for what, size in short.items() if what in binds}
    for holder in (*made.modules(), *_configs(made)):
        for name, value in list(vars(holder).items()):
            if (shorter := _shorter(name, value, short)) is not value:
                object.__setattr__(holder, name, shorter)


def _shorter(name: str, value: Any, short: dict[str, int]) -> Any:
    if isinstance(value, dict):
        made = {key: _shorter(str(key), each, short) for key, each in value.items()}
        return made if any(made[key] is not value[key] for key in value) else value
    if isinstance(value, bool) or not isinstance(value, int) or "layer" in name:
        return value
    for what, pattern in (("window", _WINDOW), ("positions", _POSITIONS)):
        if pattern.search(name) and value > short.get(what, value):
            return short[what]
    return value


def _materialise(
    made: nn.Module, device: torch.device, dtype: torch.dtype, module: nn.Module, is_thin: bool
) -> None:
    """Give a copy random weights, the same on all ranks, and buffers in its type."""
    generator = torch.Generator().manual_seed(47)
    done: dict[int, nn.Parameter] = {}
    buffers: dict[int, tuple[Tensor, Tensor]] = {}
    for owner in made.modules():
        for name, parameter in owner._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in done:
                kind = dtype if parameter.is_floating_point() else parameter.dtype
                of = owner, name, tuple(parameter.shape), generator, kind
                factors = _factors(*of) if is_thin else ()
                values = torch.mm(*factors) if factors else _drawn(*of)
                done[id(parameter)] = nn.Parameter(values.to(device), parameter.requires_grad)
                done[id(parameter)].factors = factors
            owner._parameters[name] = done[id(parameter)]
    for path, owner in made.named_modules():
        if any(buffer is not None and buffer.is_meta for buffer in owner._buffers.values()):
            _rebuild(made, path, owner, device, module)
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                kind = dtype if buffer.is_floating_point() else buffer.dtype
                laid = buffers.setdefault(id(buffer), (buffer, buffer.to(device, kind)))
                owner._buffers[name] = laid[1]


def _drawn(
    owner: nn.Module, name: str, shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype
) -> Tensor:
    values = torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)
    if isinstance(owner, nn.Embedding):
        return values * 0.5
    if len(shape) > 1:
        return values * (shape[0] if type(owner).__name__ == "Conv1D" else shape[-1]) ** -0.5
    return values * 0.3 if "bias" in name else 1 + values * 0.3


def _factors(
    owner: nn.Module, name: str, shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Return two thin matrices whose product is as large as what is drawn for a linear layer; () for others."""
    if not isinstance(owner, nn.Linear) or len(shape) != 2 or not dtype.is_floating_point:
        return ()
    rank = max(min(_RANK, *(size // 2 for size in shape)), 1)
    sizes = (shape[0], rank), (rank, shape[1])
    left, right = (_drawn(owner, name, size, generator, dtype) for size in sizes)
    return left, right


def _rebuild(made: nn.Module, path: str, owner: nn.Module, device: torch.device, module: nn.Module) -> None:
    """Compute the buffers of a module that was made without memory, as its class does, or that of the model."""
    config, whole = vars(owner).get("config"), dict(module.named_modules()).get(path, module)
    said = ""
    makes: tuple[Callable[[], Any], ...] = (
        lambda: type(owner)(config or made.config),
        lambda: type(owner)(whole.config),  # of a copy with some of the layers some buffers may be lacking
        lambda: type(made)(made.config).get_submodule(path),
    )
    for make in makes:
        lacking = [name for name, buffer in owner._buffers.items() if buffer is not None and buffer.is_meta]
        if not lacking:
            return
        try:
            with torch.device(device):
                fresh = make()
            for name in lacking:
                if fresh._buffers[name].shape == owner._buffers[name].shape:
                    owner._buffers[name] = fresh._buffers[name].to(device)
        except Exception as error:
            said = said or f"{type(error).__name__}: {error}"
    lacking = [name for name, buffer in owner._buffers.items() if buffer is not None and buffer.is_meta]
    if lacking:
        raise UnsupportedError(
            f"{path}: {type(owner).__name__} has buffers without memory that cannot be computed anew to prove the "
            f"model ({said}); make it with memory, or give check=False"
        )
