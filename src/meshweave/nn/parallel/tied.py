"""A head that shares its weight with the embedding, which a strategy may lay out otherwise."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from meshweave.algorithms.block.roles import AxisDims, Dim, Side
from meshweave.algorithms.block.sites import ProductSite
from meshweave.nn.autocast import autocast_operands
from meshweave.nn.parallel.embedding import ParallelEmbedding
from meshweave.nn.parallel.linear import LinearGroup, ParallelLinear
from meshweave.nn.parallel.moves import Mover, PlacedMove
from meshweave.nn.parallel.ops import multiply
from meshweave.nn.parallel.parameters import local_parts
from meshweave.nn.parallel.strategy import LayerStrategy
from meshweave.nn.parallel.uses import ParameterUse


class TiedWeight:
    """The table of an embedding that is also the weight of the head that makes logits.

    Where the head uses the table in the layout of the embedding, it is gathered once for both. Else it is moved to
    the layout that the head uses, and its gradient back.

    Attributes:
        keeper: the module that has it as a parameter: the embedding, or the head on a stage without the embedding.
    """

    def __init__(self, embedding: ParallelEmbedding, strategy: LayerStrategy) -> None:
        self.embedding, self.strategy = embedding, strategy
        self.keeper: Any = embedding
        self._use = embedding.use
        self.site = ProductSite(True, False, embedding.features, embedding.words)
        kept, self.wanted = embedding.kept["weight"], self.site.stored_dims(strategy.roles)
        shared = self.site.with_own_gathers(strategy.roles, strategy.mesh.shape)
        self.is_shared = kept.used == shared.stored_dims(strategy.roles)
        self.is_shared &= kept.terms == shared.gradient_terms(strategy.roles)
        self.movers: list[Mover] = []
        sides = Side("inner", embedding.words), Side("hidden", embedding.features)
        for before, after in [] if self.is_shared else _chain(embedding.stored, self.wanted):
            there = PlacedMove(strategy, sides, before, after, has_tokens=False)
            back = PlacedMove(strategy, sides, after, before, has_tokens=False)
            self.movers.append(Mover(there, back))

    def head(self, linear: nn.Module, name: str) -> ParallelLinear:
        """Return the parallel layer that replaces the head `linear`; its weight is the embedding's parameter.

        `name` is the head's name in the model, for errors.
        """
        stored = None if self.is_shared else self.wanted
        head = ParallelLinear(linear, self.strategy, place="in", name=name, stored=stored)
        head.weight, head.kept = self.embedding.weight, {}
        head.layouts["weight"] = self.embedding.layouts["weight"]
        return head

    def keep_in(self, head: ParallelLinear) -> None:
        """Make `head` the module that has the parameter, on a pipeline stage whose embedding is in another
        stage.
        """
        head.kept["weight"] = self.embedding.kept["weight"]
        self.keeper, self._use = head, ParameterUse([[(head, "weight")]])

    def logits(self, group: LinearGroup, x: Tensor, batch: int, sequence: int) -> Tensor:
        """Return this rank's shard (batch, sequence, words) of the logits. Collective.

        Args:
            group: the head alone.
            x: this rank's shard (batch, sequence, features) of the residual after the last norm.
            batch, sequence: global sizes: the number of sequences, and the tokens of each.
        """
        (weight,) = self._use() if self.is_shared else local_parts([self.keeper.weight])
        for mover in self.movers:
            weight = mover(weight, 1, 1)
        if group.is_local:
            return nn.functional.linear(x, weight)
        x, weight = autocast_operands(x.device.type, x, weight)
        return multiply(x.contiguous(), [weight], group.number, batch, sequence)[0]


def _chain(kept: AxisDims, wanted: AxisDims) -> list[tuple[AxisDims, AxisDims]]:
    """Return moves from one layout to another, in each of which what an axis splits is in order."""
    if kept == wanted:
        return []
    layouts = [kept]
    for axis in reversed(range(len(kept))):
        if kept[axis] and kept[axis] != wanted[axis]:
            layouts.append(_with(layouts[-1], axis, ""))
    for axis, dim in enumerate(wanted):
        if layouts[-1][axis] != dim:
            layouts.append(_with(layouts[-1], axis, dim))
    return list(pairwise(layouts))


def _with(dims: AxisDims, axis: int, dim: Dim) -> AxisDims:
    return (*dims[:axis], dim, *dims[axis + 1 :])
