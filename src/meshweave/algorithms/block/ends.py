"""Writes both ends of a model around its layers: the embedding, and the loss with its gradient.

The roles of the mesh axes say how these lie as well: E lies as a weight that leaves the inner features, W_v as one
that enters them, and the vocabulary as the inner features.
"""

from __future__ import annotations

from dataclasses import replace

from meshweave.algorithms.block.end_equations import (
    GREATEST,
    IDS_IN,
    IDS_OUT,
    LOGITS,
    LOSS,
    SUMS,
    TABLE,
    TARGETS,
    TOKENS_IN,
)
from meshweave.algorithms.block.layer import LayerWriter
from meshweave.algorithms.block.nodes import record_of
from meshweave.algorithms.block.place import LayerPlace, head_of
from meshweave.algorithms.block.roles import TOKENS, AxisDims, Side, Sides, gradient_dims, product
from meshweave.algorithms.block.tensors import WeightSpec
from meshweave.algorithms.block.writer import Stored


def _of_tokens(dims: AxisDims) -> AxisDims:
    """Return how a tensor without features lies beside one that lies as `dims`."""
    return tuple(dim if dim in TOKENS else "" for dim in dims)


def _of_units(dims: AxisDims) -> AxisDims:
    """Return how a list of the vocabulary lies beside a tensor that lies as `dims`."""
    return tuple("inner" if dim == "inner" else "" for dim in dims)


class EndsWriter(LayerWriter):
    """Writes layers with an embedding before and a loss after them, and the gradients of both ends."""

    @property
    def _head(self) -> LayerPlace:
        return head_of(self.problem, self.roles.is_flat)

    def _weights(self) -> list[WeightSpec]:
        hidden, words = Side("hidden", self.problem.hidden), Side("inner", self.problem.vocabulary)
        table = TABLE, (words, hidden), self.roles.weight(False)
        return [table, *super()._weights(), *self._weights_of(self._head)]

    def _declare_inputs(self) -> None:
        self._declare_tokens()
        self._declare_targets()

    def _declare_tokens(self) -> None:
        operand = self.roles.operand(False)
        self._declare_real(TOKENS_IN, self._token_sides, _of_tokens(operand))
        self._declare_real(IDS_IN, self._words, _of_units(self.roles.weight(False)))

    def _declare_targets(self) -> None:
        logits = self.roles.core(False)
        self._declare_real(TARGETS, self._token_sides, _of_tokens(logits))
        self._declare_real(IDS_OUT, self._words, _of_units(logits))

    @property
    def _words(self) -> Sides:
        return (Side("inner", self.problem.vocabulary),)

    def _declare_real(self, name: str, sides: Sides, dims: AxisDims) -> None:
        real = self.problem.statistics_dtype
        self.stored[name] = self.writer.new(name.lower(), name, sides, dims, real, "input")

    def _declare_outputs(self) -> None:
        real, one = self.problem.statistics_dtype, (Side("", 1),)
        self.stored[LOSS] = self.writer.new(LOSS.lower(), LOSS, one, self.roles.replicated, real, "output")

    def _before(self) -> None:
        """Write the embedding: each rank looks up the rows that it has, and they are summed."""
        writer = self.writer
        table = self._gathered(TABLE, self._head, self.roles.weight(False))
        natural = product(self.roles.operand(False), table.dims, ("inner",))
        landed, out = self.result_buffers("X", self._residual_sides(), natural, self.roles.residual)
        ins = (self.stored[TOKENS_IN], self.stored[IDS_IN], table)
        writer.call("embed", (landed,), ins, "elementwise", (writer.elements(landed),))
        writer.move(landed, out.dims, "moved", into=out)

    def _after(self) -> None:
        """Write the last norm, logits and the loss."""
        writer, stored, real = self.writer, self.stored, self.problem.statistics_dtype
        for at in self._head.nodes:
            record_of(at.node).write(at, self)
        logits = stored[LOGITS]
        tokens, shape = _of_tokens(logits.dims), self.rows_and_features(logits)
        greatest = self.new(GREATEST, self._token_sides, tokens, real)
        sums = self.new(SUMS, (*self._token_sides, Side("", 2)), tokens, real)
        partial: AxisDims = tuple("partial" if dim == "inner" else dim for dim in logits.dims)
        writer.call("row_max", (greatest,), (logits,), "reduction", (writer.elements(logits),))
        writer.move(replace(greatest, dims=partial), tokens, "moved", op="max")
        ins = (logits, greatest, stored[TARGETS], stored[IDS_OUT])
        writer.call("softmax_sums", (sums,), ins, "loss", shape)
        writer.move(replace(sums, dims=partial), tokens, "moved")
        loss = stored[LOSS]
        writer.zero(loss)
        writer.call("loss", (loss,), (sums, greatest, loss), "reduction", (writer.elements(greatest),))
        writer.cut()
        of_tokens: AxisDims = tuple("partial" if dim in TOKENS else "" for dim in tokens)
        self._sum_loss(replace(loss, dims=of_tokens), loss)

    def _sum_loss(self, landed: Stored, out: Stored) -> None:
        """Write the sum of the losses of all tokens."""
        self.writer.move_once(landed, out.dims, "")

    def _before_backward(self) -> None:
        """Write the gradients of logits, of W_v, and of the last norm."""
        stored, logits = self.stored, self.stored[LOGITS]
        out = self.new(f"D{LOGITS}", logits.sides, logits.dims)
        ins = (logits, stored[GREATEST], stored[SUMS], stored[TARGETS], stored[IDS_OUT])
        self.writer.call("loss_grad", (out,), ins, "loss", self.rows_and_features(logits), "input_grad")
        self._backward(self._head)

    def _after_backward(self) -> None:
        """Write the gradient of E."""
        stored, writer = self.stored, self.writer
        arriving: Stored = writer.move(stored["DX"], gradient_dims(self.roles.product(False)), "all")
        out = stored[f"D{TABLE}"]
        natural = product(self.roles.operand(False), arriving.dims, TOKENS)
        landed, _ = self.result_buffers(out.tensor, out.sides, natural, out.dims)
        writer.cut()
        writer.zero(landed)
        ins = (stored[TOKENS_IN], stored[IDS_IN], arriving, landed)
        shape = (writer.elements(arriving),)
        writer.call("embed_grad", (landed,), ins, "elementwise", shape, "weight_grad")
        self.reduce(landed, out)
