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
    """Return a token's row of `x` for each of its choices, by expert, then token: (1, rows, hidden).

    `x` is (tokens, hidden), `choices` (tokens, top_k) numbers of experts. A choice of -1 is dropped and has no
    row.
    """
    tokens, _, _ = _packing(choices)
    return x[tokens][None]


def pack_weighted(dy: Array, gates: Array, choices: Array) -> Array:
    """Return a token's row of `dy` times its gate for each choice, by expert, then token: (1, rows, hidden).

    `dy` is (tokens, hidden), `gates` and `choices` are (tokens, top_k). A choice of -1 is dropped and has no
    row.
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
    """Set `values` to 0 where booleans `kept`, its first dims, are false, also NaN and infinity; return them."""
    if not kept.all():
        values[~kept] = 0
    return values


def weigh(b: Array, gates: Array, choices: Array) -> Array:
    """Return for each token the sum of its experts' rows in `b`, each times its gate, (tokens, hidden).

    `b` is (..., hidden), the outputs of experts with the rows packed by expert, then token. `gates` and
    `choices` are (tokens, top_k); a choice of -1 adds nothing.
    """
    taken, kept = _taken(b, choices)
    return (taken * only(gates * 1, kept)[..., None]).sum(1)


def add_rows(b: Array, choices: Array) -> Array:
    """Return for each token the sum of its experts' rows in `b`, (tokens, hidden).

    `b` is (..., hidden), packed by expert, then token; `choices` are (tokens, top_k). A choice of -1 adds
    nothing.
    """
    return _taken(b, choices)[0].sum(1)


def gate_gradient(b: Array, dy: Array, choices: Array) -> Array:
    """Return the gradient of the gates, (tokens, top_k), 0 where a choice is dropped (-1).

    It is the dot product of the choice's row of `b` (outputs of experts, (..., hidden), packed by expert, then
    token) and its token's row of `dy` (tokens, hidden).
    """
    taken, kept = _taken(b, choices)
    return only((taken * dy[:, None, :]).sum(-1), kept)


def sigmoid(x: Array) -> Array:
    """Return 1 / (1 + exp(-x))."""
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

    They are "pack", "pack_weighted", "weigh", "add_rows", "gate_gradient", and for `activation` ("relu" or
    "silu") "activate" of (h) and "activate_gradient" of (h, gradient of the result). `h` is (..., 2 inner), the
    columns of the gate first; the result is (..., inner), the activated gate times the other columns.
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
