"""What the functions of nodes are written with, on numpy, torch or jax arrays.

Models compute real functions. Those of integers depend on the same elements and sum over the same dims, but give
small integers: results are the same in any order of sums, in every dtype. Their "gradients" are no derivatives.
A program that gives the right integers has moved the right elements to the right places.

Shapes: a residual or its gradient (batch, sequence, features); parameters of a norm (rows, features); statistics
(batch, sequence, rows); inner tensors (batch, sequence, units x columns per unit), of any number of whole units.
Batch and sequence may be one dim.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Values = Any
"""A numpy array, a torch tensor or a jax array."""


def array_module(x: Any) -> Any:
    """Return the module whose functions take `x`: numpy, torch or jax.numpy."""
    package = type(x).__module__.partition(".")[0]
    return sys.modules["jax.numpy" if package in ("jax", "jaxlib") else package]


Functions = Mapping[str, Callable[..., Any]]
"""What the calls of programs compute, by name."""


def over_rows(x: Values) -> Values:
    """Return the sum over all dims but the last: (batch, sequence, features) -> (features,)."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).sum(0)


def like(values: Any, x: Values) -> Values:
    """Return the numpy array `values` converted to the library, dtype and device of `x`."""
    if hasattr(x, "new_tensor"):
        return x.new_tensor(values)
    return array_module(x).asarray(values, dtype=x.dtype)


def as_numbers(truth: Values, x: Values) -> Values:
    """Return an array of booleans as 0 and 1 in the dtype of `x`."""
    return truth * like(np.array(1), x)


def small(x: Values) -> Values:
    """Return the integers from -3 to 3 that equal `x` modulo 7: 5 -> -2."""
    return (x + 3) % 7 - 3


def sigmoid(x: Values) -> Values:
    """Return 1 / (1 + exp(-x)) for each element."""
    return 0.5 * (1 + array_module(x).tanh(0.5 * x))


def widened(functions: Functions) -> dict[str, Callable[..., Any]]:
    """Return functions that convert 16-bit arguments to single precision and then call the given ones.

    Results stay in single precision. Other arguments are not converted.
    """

    def wide(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *ins: function(*map(_wide, ins))

    return {name: wide(function) for name, function in functions.items()}


def _wide(x: Values) -> Values:
    """Return an array of halves in single precision, any other as it is."""
    if x.dtype.itemsize != 2:
        return x
    return x.float() if hasattr(x, "float") else x.astype(np.float32)
