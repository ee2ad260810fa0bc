"""Writes the layers of a block for the roles of a strategy: one node after another, forward and then backward."""

from __future__ import annotations

from dataclasses import dataclass

from meshweave.algorithms.block.node_writer import GRADIENTS, NodeWriter
from meshweave.algorithms.block.nodes import record_of
from meshweave.algorithms.block.place import LayerPlace


@dataclass
class LayerWriter(NodeWriter):
    """Writes all layers of a problem with the ops of a writer."""

    def write(self) -> None:
        """Declare inputs and outputs; write the forward part, and for training the backward part.

        Reductions of gradients that the roles make last come at the end.
        """
        self._declare()
        self.write_forward()
        if self.problem.training:
            self.write_backward()
        self.writer.cut()
        for landed, out in self._reductions:
            self.writer.move_once(landed, out.dims, GRADIENTS, out)

    def write_forward(self) -> None:
        """Write the forward part: the layers, and what a subclass adds before and after them, such as the loss.

        Inputs and outputs must have been declared.
        """
        self._before()
        self.end_site()
        for layer in self.layers:
            self._forward(layer)
        self._after()
        self.end_site()

    def write_backward(self) -> None:
        """Write the backward part, from the last layer to the first; the forward part must be written.

        If a subclass adds loss, head and embedding, their gradients come before and after.
        """
        self._before_backward()
        self.end_site()
        for layer in reversed(self.layers):
            self._backward(layer)
        self._after_backward()
        self.end_site()

    def _forward(self, layer: LayerPlace) -> None:
        for at in layer.nodes:
            record_of(at.node).write(at, self)

    def _backward(self, layer: LayerPlace) -> None:
        """Write the backward part of a layer, with what nothing waits for before each part that ends in a sum."""
        nodes = layer.nodes
        for at, before in zip(reversed(nodes), [*reversed(nodes[:-1]), None], strict=True):
            record_of(at.node).write_gradient(at, self)
            if before is None or before.node.is_sum:
                self.write_postponed()
                self._write_later()

    def _before(self) -> None:
        """Write what is before the first layer."""

    def _after(self) -> None:
        """Write what is after the last layer."""

    def _before_backward(self) -> None:
        """Write what is before the backward part of the last layer."""

    def _after_backward(self) -> None:
        """Write what is after the backward part of the first layer."""
