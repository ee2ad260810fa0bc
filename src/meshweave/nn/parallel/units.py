"""Units that ranks do not share evenly, such as 6 heads on 4 ranks, or 2 heads of keys and values on 4.

DTensor has placements for even shards of heads alone. A parameter with heads that ranks do not share evenly is
kept whole along the axes that split them; a rank takes the rows of its heads, and gradients are summed over these
axes. Activations and products are split as in any layer: some ranks have a head more. Where heads of keys and
values are fewer than ranks, several ranks have copies of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshweave.algorithms.block.roles import AxisDims, Side, Sides
from meshweave.algorithms.block.sides import layout_of
from meshweave.base.errors import LayoutError
from meshweave.describe.layout import Tile
from meshweave.nn.parallel.strategy import LayerStrategy


@dataclass(frozen=True)
class FeatureUnits:
    """The units into which the inner features of a linear layer fall, which are never divided: heads, or features.

    Attributes:
        count: how many units there are in each of the `parts`; None for one per feature, or per entry of the
            table.
        weight_count: how many units the weight stores, each for count / weight_count consecutive ones: heads of
            keys and values that several ranks have copies of. None for `count`.
        parts: how many weights are fused side by side: 3 of queries, keys and values in one.
        table: for each unit the columns of the weight that it takes, where these are not one after the other, as
            in a fused weight with fewer keys than queries; such a weight is kept whole. None where they are.

    Raises:
        LayoutError: there is a table, and several parts.
    """

    count: int | None = None
    weight_count: int | None = None
    parts: int = 1
    table: Sequence[tuple[int, ...]] | None = None

    def __post_init__(self) -> None:
        if self.table is not None and self.parts > 1:
            raise LayoutError(
                "units have a table, or parts side by side: a table lists the columns of all parts"
            )


class UnitChoice:
    """Chooses the rows of a parameter that a rank multiplies by, also where ranks cannot share its units evenly.

    Args:
        strategy: the strategy on its ranks.
        sides: the dims of one of the matrices that are fused in the parameter, in units as they are multiplied.
        dims: for each mesh axis the dim of these that it splits in the product, or where they are stored for it.
        real_units: the number of units that the parameter stores, each for equally many consecutive units of
            `sides`.
        parts: how many matrices are fused.
        table: for each unit the rows of the parameter that it takes, where units do not lie one after the other;
            None where they do.

    Attributes:
        sides: the dims of one of the matrices, in units as they are stored.
        kept: for each mesh axis the dim of these that it splits where the parameter is kept.
        is_needed: whether the parameter is kept whole along the axes that split inner features, so that a rank
            must choose its rows.
    """

    def __init__(
        self,
        strategy: LayerStrategy,
        sides: Sides,
        dims: AxisDims,
        real_units: int,
        parts: int,
        table: Sequence[tuple[int, ...]] | None = None,
    ) -> None:
        self.parts = parts
        self.dim = next((at for at, side in enumerate(sides) if side.dim == "inner"), -1)
        inner = sides[self.dim]
        has_tiles = any(
            isinstance(placement, Tile) and dim == "inner"
            for placement, dim in zip(layout_of(strategy.mesh, sides, dims).placements, dims, strict=True)
        )
        self.is_needed = self.dim >= 0 and (has_tiles or inner.count != real_units or table is not None)
        self.sides, self.kept = sides, dims
        if not self.is_needed:
            return
        unit = inner.unit
        if table is not None:
            real_units, unit = len({row for rows in table for row in rows}), 1
        self.sides = tuple(Side("inner", real_units, unit) if side is inner else side for side in sides)
        self.kept = tuple("" if dim == "inner" else dim for dim in dims)
        start, stop = (end // inner.unit for end in strategy.span(inner, dims))
        if table is not None:
            self.rows = torch.tensor([row for rows in table[start:stop] for row in rows], dtype=torch.int64)
            return
        units = torch.arange(start, stop) * real_units // inner.count
        self.rows = (units[:, None] * inner.unit + torch.arange(inner.unit)).flatten()

    def terms(self, dims: AxisDims) -> AxisDims:
        """Return the layout of the parameter's gradient, from `dims`, that of the gradient of the chosen rows.

        Both have for each mesh axis the dim that it splits. Where the parameter is kept whole, axes that split
        inner features become "partial": ranks along them have terms of a sum.
        """
        return tuple("partial" if dim == "inner" else dim for dim in dims) if self.is_needed else dims

    def __call__(self, local: Tensor) -> list[Tensor]:
        """Return, for each of the fused matrices, the part that this rank multiplies by.

        `local` is this rank's shard of the parameter, gathered along axes that shard weights.
        """
        if not self.is_needed:
            return list(local.chunk(self.parts, self.dim)) if self.parts > 1 else [local]
        rows = self.rows.to(local.device)
        return [part.index_select(self.dim, rows) for part in local.chunk(self.parts, self.dim)]
