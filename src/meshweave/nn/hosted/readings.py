"""What single modules and calls of a trace show: kinds of norms, numbers of heads, scales, labels, buffers."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshweave.base.errors import UnsupportedError
from meshweave.nn.hosted.trace import ModuleCall, is_norm
from meshweave.nn.parallel.norm import EPSILON, NormKind
from meshweave.nn.prove.state import WideCasts

_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "attention_heads")


def buffers_of(
    module: nn.Module, copied: nn.Module, layers: str, numbers: Sequence[int]
) -> dict[tuple[str, str], Tensor]:
    """Return values for those buffers of a model that are on the meta device, by (name of module, name of buffer).

    Args:
        module: the model.
        copied: a copy of it, with memory and fewer layers, from which the values are taken.
        layers: the name of the list of layers.
        numbers: for each layer of the model the index of the copy's layer that stands for it.
    """
    filled = {}
    for path, child in module.named_modules():
        for name, buffer in child._buffers.items():
            if buffer is None or not buffer.is_meta:
                continue
            within = path.removeprefix(f"{layers}.").partition(".") if path.startswith(f"{layers}.") else None
            there = path if within is None else f"{layers}.{numbers[int(within[0])]}{within[1]}{within[2]}"
            value = copied.get_submodule(there)._buffers.get(name)
            if value is not None and value.shape == buffer.shape:
                filled[path, name] = value.to(buffer.dtype)
    return filled


def shifts_labels(model: nn.Module, tokens: Tensor) -> bool:
    """Return whether a model shifts labels: False if its loss compares each position with its own label.

    Run one forward pass on `tokens` (batch, sequence), which are the labels too, without gradients. True as well
    for a model that takes no labels.

    Raises UnsupportedError where the model does not run with labels.
    """
    if "labels" not in inspect.signature(type(model).forward).parameters:
        return True
    try:
        with torch.no_grad(), WideCasts():
            out: Any = model(input_ids=tokens, labels=tokens, use_cache=False)
            own = nn.functional.cross_entropy(out.logits.flatten(0, 1), tokens.flatten())
            return not bool(torch.isclose(out.loss, own, rtol=1e-6))
    except Exception as error:
        raise UnsupportedError(
            f"{type(model).__name__} does not run with labels, by which its loss is read: a copy with few words, "
            f"called with input_ids and labels, raises {type(error).__name__}: {error}; take the number of words "
            "from the shape of logits, and return an output with loss and logits"
        ) from error


def is_matrix(module: nn.Module) -> bool:
    """Return whether a module has a weight with two dims, as a linear layer has, and is no norm."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 2 and not is_norm(module)


def norm_kind(call: ModuleCall) -> NormKind | str:
    """Return the `NormKind` that computes what the norm returned in `call`; if there is none, the reason as
    text.
    """
    module, rows = call.module, call.operand
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    stated = (getattr(module, name, None) for name in EPSILON)
    choices = [own for own in stated if isinstance(own, float)] or [1e-5, 1e-6, 1e-12]
    assert rows is not None and call.made is not None
    for is_layer, offset, eps in itertools.product((False, True), (0.0, 1.0), choices):
        gain = weight if weight is None else weight + offset
        if gain is not None and gain.shape != rows.shape[-1:]:
            break
        with torch.no_grad():
            if is_layer:
                made = nn.functional.layer_norm(rows, rows.shape[-1:], gain, bias, eps)
            else:
                made = nn.functional.rms_norm(rows, rows.shape[-1:], gain, eps)
        if made.shape == call.made.shape and torch.allclose(made, call.made, rtol=1e-9, atol=1e-10):
            return NormKind(is_layer, eps, offset)
    return f"{call.path}: {type(module).__name__} is neither layer norm nor root-mean-square norm of its rows"


def is_norm_before(inner: ModuleCall, leaving: ModuleCall) -> bool:
    """Return whether `inner` is a call of a norm of all features whose result the linear layer `leaving` gets.

    That is so where `leaving` reads its result, and its weight has one element for each feature of the operand of
    `leaving`.
    """
    weight = getattr(inner.module, "weight", None)
    return (
        isinstance(weight, Tensor)
        and leaving.operand is not None
        and weight.numel() == leaving.operand.shape[-1]
        and inner.path in leaving.sources
    )


def wide_linear(
    calls: dict[str, ModuleCall], name: str, into: Sequence[str], prefix: str, residual: set[str]
) -> str | None:
    """Return the linear layer of `into` whose whole output rows the norm `name` normalises, as those of queries.

    None where `name` is no norm, is one over fewer features (such as one head), or does not read the output of
    exactly one of these layers.

    Args:
        calls: the calls of the layer, by the path of a module in it; `name` and `into` are such paths.
        prefix: the path of the layer in the model, with its last dot.
        residual: paths in the model of modules that return the residual; what comes of them does not count.
    """
    call = calls[name]
    own = [path[len(prefix) :] for path in call.sources if path not in residual]
    if len(own) != 1 or own[0] not in into or call.operand is None:
        return None
    features = calls[own[0]].result.shape[-1]  # type: ignore[union-attr]
    return own[0] if call.operand.shape[-1] == features and is_norm(call.module) else None


def heads_in(attention: nn.Module, model: nn.Module, operand: Tensor) -> int:
    """Return how many heads are in `operand` (..., features), the operand of the linear layer after attention.

    The number of heads, or the width of a head, is an attribute of `attention`, of its configuration or of that of
    `model`. Raises UnsupportedError where none of them has one that divides the features.
    """
    features = int(operand.shape[-1])
    owners: tuple[Any, ...] = (attention, getattr(attention, "config", None), getattr(model, "config", None))
    for owner in owners:
        for name in ("v_head_dim", "head_dim"):
            width = getattr(owner, name, None)
            if isinstance(width, int) and width and features % width == 0:
                return features // width
        for name in _HEADS:
            heads = getattr(owner, name, None)
            if isinstance(heads, int) and heads and features % heads == 0:
                return heads
    raise UnsupportedError(f"{type(attention).__name__} does not say how many heads it has")


def scale_of(call: ModuleCall, weight: Tensor) -> float:
    """Return the factor by which an embedding multiplies the rows of its table, 1.0 for none.

    Args:
        call: a call of the embedding.
        weight: the table (words, features).

    Raises UnsupportedError where its result is not rows of the table times one factor.
    """
    assert call.made is not None
    rows, squares = call.made.flatten(0, -2), weight.square().sum(1).clamp_min(torch.finfo(weight.dtype).tiny)
    scales: list[float] = []
    for row in rows[rows.norm(dim=1) > 0]:  # a row of zeros, as of padding, has any factor
        factors = (weight @ row) / squares
        off = (factors[:, None] * weight - row).norm(dim=1) / row.norm()
        at = int(off.argmin())
        scales.append(float(factors[at]) if off[at] <= 1e-5 else math.nan)
    if not scales or not max(scales) - min(scales) <= 1e-5 * abs(scales[0]) or math.isnan(sum(scales)):
        raise UnsupportedError(
            f"{call.path}: {type(call.module).__name__} computes more than rows of its table times one factor"
        )
    return 1.0 if abs(scales[-1] - 1) < 1e-9 else scales[-1]
