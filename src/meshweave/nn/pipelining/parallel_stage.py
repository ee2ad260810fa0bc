"""`meshweave.nn.ParallelStage`: some layers of a parallelised model as a stage of a pipeline.

Between stages each rank of a layer's mesh sends what it has of the residual, and no more: its part of the sequence
or of the features, where the strategy splits them. The rank of the next stage that has the same coordinates
receives it, so the stages of a pipeline have one strategy on meshes of one shape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from meshweave.algorithms.block.roles import AxisDims, Side
from meshweave.base.errors import LayoutError
from meshweave.nn.parallel.model import ParallelModel


class ParallelStage(nn.Module):  # type: ignore[misc]
    """Layers `first` to `end` - 1 of a model, with the embedding at the first stage and the head at the last.

    Modules of other stages are taken out of the model: `model.module` has the parameters of this stage under the
    names that they have in the whole. A model on the meta device costs nothing until then.

    Args:
        model: what `parallelize` returned for the whole model, on the mesh of this stage; each stage needs one of
            its own, which is changed in place.
        first: the number of the stage's first layer, from 0.
        end: the number after that of its last layer.
        sequence: tokens of a row.

    Raises:
        LayoutError: there are no such layers.
    """

    def __init__(self, model: ParallelModel, first: int, end: int, sequence: int) -> None:
        super().__init__()
        count = len(model.blocks)
        if not 0 <= first <= end <= count:
            raise LayoutError(f"a stage of layers {first} to {end}: the model has {count}")
        self.is_first, self.is_last = first == 0, end == count
        self._model, self._first, self._end, self._sequence = model, first, end, sequence
        self._features = model.embedding.features
        model.prune(first, end)
        self.module = model.module

    @property
    def tied(self) -> nn.Parameter | None:
        """Return the table shared by embedding and head where another stage has a copy of it, too; else None."""
        model = self._model
        if model.tied is None or self.is_first == self.is_last:
            return None
        table: nn.Parameter = model.tied.keeper.weight
        return table

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's shard of the residual after the stage, flattened to (rows, elements). Collective.

        It ends with zeros where another rank has a larger shard.

        Args:
            x: tokens (rows, sequence) at the first stage, else what the stage before returns.
        """
        rows = len(x)
        if self.is_first:
            self.check(x)
        residual = self._model.embed(x) if self.is_first else self._taken_apart(x)
        blocks = self._model.blocks[self._first : self._end]
        residual = self._model.run_blocks(residual, rows, self._sequence, blocks)
        return self._flat(residual, rows)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss over all tokens of x, the last stage's output: a `loss_fn` for
        `meshweave.pipeline`. Raises as `check`.
        """
        self.check(targets=targets)
        loss: Tensor = self._model.head_loss(self._taken_apart(x), targets)
        return loss

    def check(self, tokens: Tensor | None = None, targets: Tensor | None = None) -> None:
        """Raise LayoutError where tokens or targets (rows, sequence) are outside the model's vocabulary or
        positions.
        """
        self._model.agreement.limits.check(tokens, targets)

    @property
    def draws(self) -> bool:
        """Return whether the stage draws random numbers, for which ranks must have torch's generator in the
        same state.
        """
        return self._model.agreement.draws and self.training

    def example(self, rows: int) -> Tensor:
        """Return zeros of the shape that the stage returns for `rows` rows: for `outputs` of
        `meshweave.pipeline`.
        """
        dtype = next(self.module.parameters()).dtype
        return torch.zeros(rows, self._width(rows), dtype=dtype)

    # --- the residual between stages ---------------------------------------------------------------------------

    @property
    def _dims(self) -> AxisDims:
        return self._model.strategy.roles.residual

    def _sides(self, rows: int) -> tuple[Side, ...]:
        tokens = self._model.strategy.tokens(rows, self._sequence)
        return (*tokens, Side("hidden", self._features))

    def _width(self, rows: int) -> int:
        """Return the elements of each row that the rank with most has: all send as many."""
        most = [_most(side, self._dims, self._model.strategy.mesh.shape) for side in self._sides(rows)]
        return -(-math.prod(most) // rows)

    def _flat(self, residual: Tensor, rows: int) -> Tensor:
        width = self._width(rows)
        return nn.functional.pad(residual.flatten(), (0, rows * width - residual.numel())).view(rows, width)

    def _taken_apart(self, x: Tensor) -> Tensor:
        shape = self._model.strategy.local_shape(self._sides(len(x)), self._dims)
        return x.flatten()[: math.prod(shape)].view(shape)


def _most(side: Side, dims: AxisDims, sizes: Sequence[int]) -> int:
    """Return the elements of a side that the rank with most has."""
    count = side.count
    for dim, parts in zip(dims, sizes, strict=True):
        if dim and dim == side.dim:
            count = -(-count // parts)
    return count * side.unit
