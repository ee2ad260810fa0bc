"""What calls of a layer of experts do, on arrays of numpy or tensors of torch alike.

Rows of a rank's tokens are packed by expert, and for one expert in the order of tokens. `choices` (tokens,
top_k) have -1 where an expert is dropped. Integers come out as integers, so tests with activation "relu" are
exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = Any
"""An array of numpy or a tensor of torch."""


def numbers_like(array: Array, like: Array) -> Array:
    """Convert a numpy array to the library, dtype and device of `like`."""
    return like.new_tensor(array) if hasattr(like, "new_tensor") else np.asarray(array, like.dtype)


def _packing(choices: Array) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return the token of each packed row, the row of each choice (0 if dropped), and 1 for kept choices."""
    table = np.asarray(choices)
    flat = table.reshape(-1).astype(np.int64)
    kept = flat >= 0
    order = np.argsort(np.where(kept, flat, np.iinfo(np.int64).max), kind="stable")[: int(kept.sum())]
    rows = np.zeros(flat.shape, np.int64)
    rows[order] = np.arange(len(order))
    return order // table.shape[1], rows.reshape(table.shape), kept.reshape(table.shape)


def pack(x: Array, choices: Array) -> Array:
    """Return packed rows (1, rows, hidden): for each choice its token's row of `x`, by expert, then token.

    `x` is (tokens, hidden), `choices` (tokens, top_k) numbers of experts. A choice of -1 is dropped and has no
    row.
    """
    tokens, _, _ = _packing(choices)
    return x[tokens][None]


def pack_weighted(dy: Array, gates: Array, choices: Array) -> Array:
    """Return packed rows (1, rows, hidden): for each choice its token's row of `dy` times the choice's gate.

    They are ordered by expert, then token. `dy` is (tokens, hidden), `gates` and `choices` are (tokens, top_k). A
    choice of -1 is dropped and has no row.
    """
    tokens, rows, kept = _packing(choices)
    weights = np.zeros(len(tokens), np.int64)
    weights[rows[kept]] = np.flatnonzero(kept.reshape(-1))
    return (dy[tokens] * gates.reshape(-1)[weights][:, None])[None]


def _taken(b: Array, choices: Array) -> tuple[Array, NDArray[Any]]:
    """Return the row of each choice, (tokens, top_k, features), 0 where it is dropped, and which are kept."""
    _, rows, kept = _packing(choices)
    b = b.reshape(-1, b.shape[-1])
    if not b.shape[0]:
        return numbers_like(np.zeros((*rows.shape, b.shape[-1])), b), kept
    return only(b[rows], kept), kept


def only(values: Array, kept: NDArray[Any]) -> Array:
    """Set `values` to 0 in place where `kept` is false, also where they are NaN or infinite; return `values`.

    `kept` is an array of booleans with the shape of the first dims of `values`.
    """
    if not kept.all():
        values[~kept] = 0
    return values


def weigh(b: Array, gates: Array, choices: Array) -> Array:
    """Return for each token the sum of its experts' outputs, each times its gate: (tokens, hidden).

    `b` (..., hidden) has the outputs of experts as packed rows, ordered by expert, then token. `gates` and
    `choices` are (tokens, top_k); a choice of -1 adds nothing.
    """
    taken, kept = _taken(b, choices)
    return (taken * only(gates * 1, kept)[..., None]).sum(1)


def add_rows(b: Array, choices: Array) -> Array:
    """Return for each token the sum of its rows in `b`, one per expert of the token: (tokens, hidden).

    `b` (..., hidden) has packed rows, ordered by expert, then token; `choices` are (tokens, top_k). A choice of -1
    adds nothing.
    """
    return _taken(b, choices)[0].sum(1)


def gate_gradient(b: Array, dy: Array, choices: Array) -> Array:
    """Return the gradient of the loss with respect to the gates, (tokens, top_k), 0 for a dropped choice (-1).

    For each choice it is the dot product of its row of `b` and its token's row of `dy`.

    Args:
        b: the outputs of experts as packed rows (..., hidden), ordered by expert, then token.
        dy: the gradient of the loss with respect to the layer's output, (tokens, hidden).
        choices: experts of each token, (tokens, top_k).
    """
    taken, kept = _taken(b, choices)
    return only((taken * dy[:, None, :]).sum(-1), kept)


def sigmoid(x: Array) -> Array:
    """Return 1 / (1 + exp(-x)) for each element of a numpy array or torch tensor."""
    return x.sigmoid() if hasattr(x, "sigmoid") else 1 / (1 + np.exp(-x))


def _relu(x: Array) -> tuple[Array, Array]:
    slope = numbers_like(np.asarray(x > 0), x)
    return x * slope, slope


def _silu(x: Array) -> tuple[Array, Array]:
    at = sigmoid(x)
    return x * at, at * (1 + x * (1 - at))


_ACTIVATIONS: dict[str, Callable[[Array], tuple[Array, Array]]] = {"relu": _relu, "silu": _silu}


def _activate(kind: str) -> Callable[[Array], Array]:
    def activate(h: Array) -> Array:
        inner = h.shape[-1] // 2
        return _ACTIVATIONS[kind](h[..., :inner])[0] * h[..., inner:]

    return activate


def _activate_gradient(kind: str) -> Callable[[Array, Array, Array], None]:
    def activate_gradient(h: Array, da: Array) -> Array:
        inner = h.shape[-1] // 2
        value, slope = _ACTIVATIONS[kind](h[..., :inner])
        out = h * 0
        out[..., :inner] = da * h[..., inner:] * slope
        out[..., inner:] = da * value
        return out

    return activate_gradient  # type: ignore[return-value]


def layer_functions(activation: str) -> Mapping[str, Callable[..., Any]]:
    """Return the functions that programs of a layer of experts call, by name.

    They are "pack", "pack_weighted", "weigh", "add_rows", "gate_gradient", "activate" and "activate_gradient".
    activate(h) of h (..., 2 inner) returns (..., inner): `activation` ("relu" or "silu") of the first half of the
    columns, times the second half. activate_gradient(h, da), where `da` is the gradient of the loss with respect
    to that result, returns the gradient with respect to h.
    """
    return {
        "pack": pack,
        "pack_weighted": pack_weighted,
        "weigh": weigh,
        "add_rows": add_rows,
        "gate_gradient": gate_gradient,
        "activate": _activate(activation),
        "activate_gradient": _activate_gradient(activation),
    }
