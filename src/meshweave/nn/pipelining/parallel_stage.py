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
from meshweave.execute.torch.context import TorchContext
from meshweave.execute.torch.counted import gathered
from meshweave.nn.parallel.loss import IGNORED
from meshweave.nn.parallel.model import ParallelModel


class ParallelStage(nn.Module):  # type: ignore[misc]
    """Layers `first` to `end` - 1 of a model, with the embedding at the first stage and the head at the last.

    The head is run by `loss`, not by `forward`. Modules of other stages are taken out of the model:
    `model.module` has the parameters of this stage under the names that they have in the whole. A model on the
    meta device costs nothing until then.

    Args:
        model: what `parallelize` returned for the whole model, on the mesh of this stage; each stage needs one
            of its own, which is changed in place.
        first: the number of the stage's first layer, from 0.
        end: the number after that of its last layer.
        sequence: tokens of a row.

    Attributes:
        num_items: by what `loss` divides, during a step of `pipeline`; None outside of one, for the mean.

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
        self.num_items: float | None = None
        model.prune(first, end)
        model.agreement.is_stage = not (self.is_first and self.is_last)
        self.module = model.module

    @property
    def tied(self) -> nn.Parameter | None:
        """Return the table shared by embedding and head where another stage has a copy of it, too; else None.

        This rank's copy is a DTensor parameter (words, features).
        """
        model = self._model
        if model.tied is None or self.is_first == self.is_last:
            return None
        table: nn.Parameter = model.tied.keeper.weight
        return table

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's shard of the residual after the stage's layers, as (rows, elements). Collective.

        The shard is flattened, padded with zeros to the size of the largest shard of a rank, and cut into as many
        equal parts as there are rows; a part need not be the data of one row.

        Args:
            x: at the first stage all tokens (rows, sequence) of a micro-batch, else what the stage before returns.

        Raises:
            LayoutError: at the first stage, tokens are outside the model's vocabulary or positions.
        """
        rows = len(x)
        if self.is_first:
            self.check(x)
        residual = self._model.embed(x) if self.is_first else self._taken_apart(x)
        blocks = self._model.blocks[self._first : self._end]
        residual = self._model.run_blocks(residual, rows, self._sequence, blocks)
        return self._flat(residual, rows)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Run the head, and return the loss of a micro-batch, a tensor (): a `loss_fn` for `pipeline`.

        It is the mean of the cross entropy over tokens with a target. In a step of `pipeline`, after
        `count_targets`, it is the sum over these tokens divided by the mean number of them in a micro-batch.

        Collective among the ranks of the last stage.

        Args:
            x: what `forward` returned at the last stage.
            targets: all of them (rows, sequence); -100 where there is no loss.

        Raises:
            LayoutError: targets are outside the model's vocabulary.
        """
        self.check(targets=targets)
        loss: Tensor = self._model.head_loss(self._taken_apart(x), targets, self.num_items)
        return loss

    def count_targets(
        self, targets: Tensor, parts: int, shares: int, ranks: tuple[int, ...], context: TorchContext
    ) -> None:
        """Check the targets of a step, and let `loss` weigh all tokens alike, however many a micro-batch has.

        The mean of the losses of `parts` micro-batches, over all data-parallel ranks, is then the mean over
        tokens. Collective where `shares` is more than 1.

        Args:
            targets: (rows, sequence) of a step; -100 where there is no loss.
            parts: the number by which the sum of losses is divided: micro-batches times data-parallel ranks; 0
                where it is not divided, and each loss is a mean by itself.
            shares: the number of data-parallel ranks that have rows of their own; 1 where targets are all rows.
            ranks: those of the last stage.
            context: communicates between them.

        Raises:
            LayoutError: targets are outside the model's vocabulary.
            BindError, RankLostError, DeadlineError: other ranks refuse, are missing or late.
        """
        self.check(targets=targets)
        count = (targets != IGNORED).sum()
        if parts and shares > 1:
            told = gathered(
                count[None].to(context.device), context, ranks, "the numbers of targets of all ranks"
            )
            count = told.sum() * shares / len(ranks)
        self.num_items = float(count) / parts if parts else None

    def check(self, tokens: Tensor | None = None, targets: Tensor | None = None) -> None:
        """Raise LayoutError where the model does not take tokens or targets (rows, sequence); None passes."""
        self._model.agreement.limits.check(tokens, targets)

    @property
    def draws(self) -> bool:
        """Return whether the stage's ranks must have torch's generator in the same state for a step.

        True in training where the whole model has dropout that ranks must draw alike, even if none of it is
        in this stage; False in evaluation.
        """
        return self._model.agreement.draws and self.training

    def example(self, rows: int) -> Tensor:
        """Return zeros in the shape and dtype that `forward` returns, as an example for `outputs` of `pipeline`.

        They are (rows, elements), with rows * elements at least the elements of the largest shard of a rank, in
        the dtype of the first parameter.

        Args:
            rows: sequences of a micro-batch, over all ranks of the mesh of this stage.
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
