"""Writers of one piece of a model each: layers, the embedding before them, or norm, logits and loss after them.

They leave all-reduces of gradients of weights, and of losses, to whoever runs them: a step makes them once, not
for each micro-batch. Reduce-scatters of gradients are written here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from meshweave.algorithms.block.ends import EndsWriter
from meshweave.algorithms.block.layer import LayerWriter
from meshweave.algorithms.block.place import LayerPlace
from meshweave.algorithms.block.tensors import WeightSpec
from meshweave.algorithms.block.writer import Stored

Piece = Literal["layers", "embedding", "head"]


@dataclass
class LayersPiece(LayerWriter):
    """Writes layers, and leaves the reduction of gradients of weights over ranks to the caller.

    Attributes:
        unsummed: by tensor name, the buffer and layout of each weight's gradient and of the loss. The layout is
            "partial" along the mesh axes over which the caller has to reduce it.
    """

    unsummed: dict[str, Stored] = field(default_factory=dict)

    def declare(self) -> None:
        """Declare the buffers of inputs and outputs; call it once, before anything is written."""
        self._declare()

    def reduce(self, landed: Stored, out: Stored) -> None:
        """Record partial sums `landed` of a weight's gradient `out`, for the caller to all-reduce.

        If they are in another buffer than `out`, a reduce-scatter into `out` is written first, or at the end of
        the program if the roles reduce last.
        """
        if landed.buffer != out.buffer:
            super().reduce(landed, out)
            landed = out
        self.writer.cut()
        self.unsummed[out.tensor] = landed

    def leave_partial_sums(self, landed: Stored, out: Stored) -> None:
        """Record that buffer `landed` has partial sums of a weight's gradient `out`, for the caller to reduce."""
        self.unsummed[out.tensor] = landed


@dataclass
class _EndPiece(LayersPiece, EndsWriter):
    """An end without layers."""

    @property
    def layers(self) -> Sequence[LayerPlace]:
        """Return an empty list: an end has no layers."""
        return []


@dataclass
class EmbeddingPiece(_EndPiece):
    """Writes the embedding alone: from TOKENS to X, and backward from DX to the gradient of the table E."""

    def _weights(self) -> list[WeightSpec]:
        return super()._weights()[:1]

    def _declare_inputs(self) -> None:
        self._declare_tokens()
        self._declare_residual("DX", "input")

    def _declare_outputs(self) -> None:
        self._declare_residual("X", "output")

    def _after(self) -> None:
        """Write nothing after it."""

    def _before_backward(self) -> None:
        """Write nothing before its gradient."""


@dataclass
class HeadPiece(_EndPiece):
    """Writes the last norm, logits and loss alone: from Z to LOSS; backward, DZ and the gradients of weights."""

    def _weights(self) -> list[WeightSpec]:
        return super()._weights()[1:]

    def _declare_inputs(self) -> None:
        self._declare_targets()
        self._declare_residual("Z", "input")

    def _declare_outputs(self) -> None:
        super()._declare_outputs()
        self._declare_residual("DZ", "output")

    def _before(self) -> None:
        """Write nothing before it."""

    def _sum_loss(self, landed: Stored, out: Stored) -> None:
        """Leave the losses of the tokens of each rank."""
        self.unsummed[out.tensor] = landed

    def _after_backward(self) -> None:
        """Write nothing after its gradients."""


WRITERS: dict[Piece, type[LayersPiece]] = {
    "layers": LayersPiece,
    "embedding": EmbeddingPiece,
    "head": HeadPiece,
}
