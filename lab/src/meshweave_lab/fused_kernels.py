"""What torch's fused kernels compute, as the works that `call` ops of a program name: for one pace of both.

A kernel that gives the gradients by input and by weight does the work of both calls. Causal attention counts all
pairs of queries and keys, as calls do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

from meshweave.ir.work import Compute

WorksOf = Callable[[tuple[Any, ...]], list[Compute]]
"""Takes the arguments of a kernel by position, and returns what it computes."""

_Part = Literal["", "input_grad", "weight_grad"]


def _compute(work: str, part: _Part, shape: tuple[int, ...], *tensors: Any) -> Compute:
    """Return work of a shape that reads and writes these tensors."""
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)
    dtype = str(tensors[0].dtype).removeprefix("torch.")
    return Compute("call", 0, num_bytes, dtype=dtype, call=work, shape=shape, part=part)


def _rows(x: Any, num_features: int) -> tuple[int, int]:
    return x.numel() // max(num_features, 1), num_features


def _norm(args: tuple[Any, ...]) -> list[Compute]:
    x, features = args[0], math.prod(args[1])
    return [_compute("norm", "", _rows(x, features), x, x)]


def _norm_gradient(args: tuple[Any, ...]) -> list[Compute]:
    dy, x, features, of_input, of_weight = args[0], args[1], math.prod(args[2]), args[7][0], any(args[7][1:])
    works = []
    if of_input:
        works.append(_compute("norm", "input_grad", _rows(x, features), dy, x, x))
    if of_weight:
        works.append(_compute("norm", "weight_grad", _rows(x, features), dy, x))
    return works


def _activation(args: tuple[Any, ...]) -> list[Compute]:
    return [_compute("elementwise", "", (args[0].numel(),), args[0], args[0])]


def _activation_gradient(args: tuple[Any, ...]) -> list[Compute]:
    return [_compute("elementwise", "input_grad", (args[1].numel(),), args[0], args[1], args[1])]


def _pairs(queries: Any, keys: Any) -> tuple[int, ...]:
    """Return batch, heads, queries, keys and width of (batch, heads, sequence, width)."""
    return *queries.shape[:3], keys.shape[2], queries.shape[3]


def _attention(args: tuple[Any, ...]) -> list[Compute]:
    queries, keys, values = args[:3]
    return [_compute("attention", "", _pairs(queries, keys), queries, keys, values, queries)]


def _attention_gradient(args: tuple[Any, ...]) -> list[Compute]:
    dout, queries, keys, values, out = args[:5]
    tensors = dout, queries, keys, values, out, queries, keys, values
    return [_compute("attention", "input_grad", _pairs(queries, keys), *tensors)]


_FLASH = "_scaled_dot_product_flash_attention_for_cpu"

FUSED_KERNELS: Mapping[str, WorksOf] = {
    "native_layer_norm": _norm,
    "native_layer_norm_backward": _norm_gradient,
    "gelu": _activation,
    "gelu_backward": _activation_gradient,
    "silu": _activation,
    "silu_backward": _activation_gradient,
    _FLASH: _attention,
    f"{_FLASH}_backward": _attention_gradient,
}
"""By name of the kernel, what it computes."""
