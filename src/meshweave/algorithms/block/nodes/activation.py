"""H = activation(Y) of each feature: GELU (tanh form) of one column, or SiLU of a gate column times the next."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from meshweave.algorithms.block.functions import Values, array_module, sigmoid, small
from meshweave.algorithms.block.nodes.call import CallRecord
from meshweave.describe.model.nodes import Activation

_GELU = math.sqrt(2 / math.pi)


class ActivationRecord(CallRecord[Activation]):
    """An activation of features one by one."""

    node_type = Activation
    fn = "activation"

    def calls(self, node: Activation, is_exact: bool) -> tuple[Callable[..., Any], ...]:
        """Return two functions of arrays: activation(y), and its gradient(dout, y) with respect to y.

        `y` is (..., features), for a gated activation (..., 2 features) with a gate and an input column by turns.
        If `is_exact` the functions give small integers instead.
        """
        return (_INTEGER if is_exact else _REAL)["gated" if node.gated else "plain"]


def _gate_and_input(y: Values) -> tuple[Values, Values]:
    return y[..., 0::2], y[..., 1::2]


def _interleaved(gate: Values, value: Values) -> Values:
    *leading, columns = gate.shape
    return array_module(gate).stack((gate, value), -1).reshape(*leading, 2 * columns)


def _swiglu(y: Values) -> Values:
    gate, value = _gate_and_input(y)
    return gate * sigmoid(gate) * value


def _swiglu_grad(dout: Values, y: Values) -> Values:
    gate, value = _gate_and_input(y)
    share = sigmoid(gate)
    return _interleaved(dout * value * share * (1 + gate * (1 - share)), dout * gate * share)


def _tanh(y: Values) -> Values:
    return array_module(y).tanh(_GELU * (y + 0.044715 * y**3))


def _gelu(y: Values) -> Values:
    return 0.5 * y * (1 + _tanh(y))


def _gelu_grad(dout: Values, y: Values) -> Values:
    tanh = _tanh(y)
    return dout * (0.5 * (1 + tanh) + 0.5 * y * (1 - tanh * tanh) * _GELU * (1 + 3 * 0.044715 * y * y))


def _small_gated(y: Values) -> Values:
    gate, value = _gate_and_input(small(y))
    return small(gate * value)


def _small_gated_grad(dout: Values, y: Values) -> Values:
    gate, value = _gate_and_input(small(y))
    return small(_interleaved(small(dout) * value, small(dout) * gate))


def _small_square(y: Values) -> Values:
    return small(small(y) ** 2)


def _small_square_grad(dout: Values, y: Values) -> Values:
    return small(2 * small(dout) * small(y))


_REAL = {"gated": (_swiglu, _swiglu_grad), "plain": (_gelu, _gelu_grad)}
_INTEGER = {"gated": (_small_gated, _small_gated_grad), "plain": (_small_square, _small_square_grad)}
