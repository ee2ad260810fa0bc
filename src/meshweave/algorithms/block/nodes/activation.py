"""H = activation(Y) of each feature: GELU (tanh form) of one column, or SiLU of a gate column times the next."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from meshweave.algorithms.block.functions import Functions, Values, array_module, sigmoid, small, widened
from meshweave.algorithms.block.node_writer import NodeWriter
from meshweave.algorithms.block.nodes.kernel import PARTS, Kernel, RankSizes
from meshweave.algorithms.block.nodes.record import Known, NodeRecord
from meshweave.algorithms.block.place import NodePlace
from meshweave.algorithms.block.problem import BlockProblem
from meshweave.algorithms.block.roles import Roles
from meshweave.describe.model.layer import Activation
from meshweave.ir.program import Tensor
from meshweave.ir.program.meanings import Function, Meaning, Same, TensorPart

_GELU = math.sqrt(2 / math.pi)


class ActivationRecord(NodeRecord[Activation]):
    """An activation of features one by one."""

    node_type = Activation

    def tensors(self, at: NodePlace[Activation], roles: Roles) -> Iterator[Tensor]:
        """Yield its columns by features, and their gradient."""
        for prefix in ("", "D"):
            yield at.units(f"{prefix}{at.operand}", at.node.takes[0])

    def meanings(self, at: NodePlace[Activation], roles: Roles) -> Iterator[Meaning]:
        """Yield the activation."""
        columns = f"{at.operand}_units"
        yield Same(columns, at.operand)
        yield Function(TensorPart(at.out, at.element), at.fn("activation"), (TensorPart(columns, at.unit),))

    def gradient_meanings(self, at: NodePlace[Activation], roles: Roles) -> Iterator[Meaning]:
        """Yield the gradient by the columns."""
        ins = TensorPart(at.arriving, at.element), TensorPart(f"{at.operand}_units", at.unit)
        out = f"D{at.operand}_units"
        yield Function(TensorPart(out, at.unit), at.fn("activation_grad"), ins)
        yield Same(at.contribution(at.node.ins[0]), out)

    def functions(self, node: Activation, problem: BlockProblem) -> Mapping[str, Callable[..., Any]]:
        """Return the activation and its gradient."""
        kind = "gated" if node.gated else "plain"
        activation, gradient = (_INTEGER if problem.exact else _REAL)[kind]
        functions: Functions = {"activation": activation, "activation_grad": gradient}
        return functions if problem.exact else widened(functions)

    def compute(self, at: NodePlace[Activation], known: Known, functions: Functions) -> None:
        """Add the activation."""
        known[at.out] = functions[at.fn("activation")](known[at.operand])

    def compute_gradient(self, at: NodePlace[Activation], known: Known, functions: Functions) -> None:
        """Add the gradient by the columns."""
        gradient = functions[at.fn("activation_grad")](known[at.arriving], known[at.operand])
        known[at.contribution(at.node.ins[0])] = gradient

    def kernels(self, at: NodePlace[Activation], roles: Roles, sizes: RankSizes) -> Iterator[Kernel]:
        """Yield the activation and its gradient."""
        core = roles.core(at.node.group == "attention")
        elements = sizes.tokens(core) * sizes.features(at.node.makes, core)
        for (part, name), passes in zip(PARTS, (1 + at.node.columns, 1 + 2 * at.node.columns), strict=True):
            yield sizes.streamed("elementwise", (elements,), passes, part, name)

    def write(self, at: NodePlace[Activation], writer: NodeWriter) -> None:
        """Write the activation."""
        out = writer.out(at)
        elements = (writer.writer.elements(out),)
        writer.writer.call(at.fn("activation"), (out,), (writer.edge(at),), "elementwise", elements)

    def write_gradient(self, at: NodePlace[Activation], writer: NodeWriter) -> None:
        """Write its gradient."""
        edge, arriving = at.node.ins[0], writer.arriving(at)
        out = writer.contribution(at, edge)
        shape = (writer.writer.elements(arriving),)
        ins = arriving, writer.edge(at)
        writer.writer.call(at.fn("activation_grad"), (out,), ins, "elementwise", shape, "input_grad")
        writer.contributed(at, edge)


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
