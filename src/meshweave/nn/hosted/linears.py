"""Linear layers of a model whose code calls them one by one: those with an operand in common are one product."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshweave.algorithms.block.roles import Side, num_parts
from meshweave.base.errors import LayoutError, UnsupportedError
from meshweave.nn.hosted.columns import HeadColumns
from meshweave.nn.hosted.residual import Tokens, as_plain
from meshweave.nn.parallel.linear import LinearGroup, ParallelLinear
from meshweave.nn.parallel.strategy import LayerStrategy
from meshweave.nn.parallel.units import FeatureUnits
from meshweave.nn.parallel.uses import ParameterUse, entries_of


class HostedLinear(ParallelLinear):
    """A linear layer in the place of the model's own, called as that is, with its operand alone.

    Args:
        linear: the model's own, on meta.
        tokens: the tokens of the step that runs.
        name: that of the layer in the model.
        options: further arguments of `ParallelLinear`: `place`, `units`, `is_attention`.
    """

    def __init__(self, linear: nn.Module, tokens: Tokens, name: str, **options: Any) -> None:
        super().__init__(linear, tokens.strategy, name=name, **options)
        self.name = name
        object.__setattr__(self, "tokens", tokens)
        self.order = self._order()
        self._use = ParameterUse([entries_of([self])])
        roles = tokens.strategy.roles
        self._lands = roles.core(self.site.is_attention) if self.site.is_first else roles.residual

    def join(self, group: HostedGroup) -> None:
        """Set the group of linear layers, called with the same operand, that this layer belongs to.

        The first call of a layer of the group on an operand computes the results of all of them, as one product.
        To be called before `forward`, except for a layer that is local.
        """
        object.__setattr__(self, "group", group)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Return this rank's shard of the result, from x, its shard of the operand. Collective.

        x is (batch, sequence, features) or (batch * sequence, features), and so is the result.
        """
        if self.is_local:  # the columns of a table and fused weights are then those of the weight itself
            weight, *bias = self._use()
            self.tokens.place = self._lands
            return nn.functional.linear(x, weight.t() if self.is_transposed else weight, *bias)
        result: Tensor = self.group(self, x)
        if self.order is not None:
            result = result.index_select(-1, self.order.to(result.device))
        self.tokens.place = self._lands
        return result if self.site.is_first else self.tokens.told(result)

    def _order(self) -> Tensor | None:
        """Return where the columns of a table are among what units have of them, in the order of the weight."""
        if self.table is None:
            return None
        rows = self.bias_rows()
        order = rows.argsort(stable=True)
        return None if bool((order == torch.arange(len(order))).all()) else order

    def bias_rows(self) -> Tensor:
        """Return the indices of this rank's output features, int64, unit by unit in the order of `table`.

        Only for a layer with a `table`.
        """
        assert self.table is not None
        side, dims = self.bias_placement()
        start, stop = (end // side.unit for end in self.layer_strategy.span(side, dims))
        return torch.tensor([row for rows in self.table[start:stop] for row in rows], dtype=torch.int64)


class HostedGroup:
    """Linear layers that the code of a layer calls one after the other with the same operand."""

    def __init__(self, linears: Sequence[HostedLinear]) -> None:
        self.linears = list(linears)
        self.product = LinearGroup(self.linears)
        self._operand: Tensor | None = None
        self._results: dict[int, Tensor] = {}

    def __call__(self, linear: HostedLinear, x: Tensor) -> Tensor:
        """Return the result of `linear`, one of the layers, on x; the first call on x computes all the layers.

        x is this rank's shard of the operand. Collective in that first call.
        """
        if self._operand is not x or id(linear) not in self._results:
            if self._operand is not None and self._operand is not x:
                self._drop()
            self._compute(x)
        result = self._results.pop(id(linear))
        if not self._results:
            self._drop()
        return result

    def _drop(self) -> None:
        self._operand, self._results = None, {}

    def _compute(self, x: Tensor) -> None:
        first = self.linears[0]
        operand = as_plain(x)
        is_flat = operand.ndim == 2
        rows = first.tokens.rows_of(operand, first.operand_dims) if is_flat else operand
        if rows.ndim != 3:
            raise UnsupportedError(f"{first.name}: an operand of {rows.ndim} dims is not computed")
        sizes = first.tokens.sizes
        results = self.product(rows, *sizes)
        for linear in self.linears:
            own, results = results[: linear.parts], results[linear.parts :]
            result = own[0] if linear.parts == 1 else torch.cat(own, -1)
            self._results[id(linear)] = result.flatten(0, 1) if is_flat else result
        self._operand = x


def units_of(columns: HeadColumns, strategy: LayerStrategy, where: str) -> int:
    """Return the number of equal runs of consecutive heads into which attention is cut; a rank has whole runs.

    A run is a group of heads that share keys and values. Where ranks cannot share the groups evenly, but can share
    equal parts of groups, it is such a part, whose keys and values several ranks then have.

    Args:
        columns: the heads of the module of attention.
        strategy: the strategy on its ranks.
        where: the name of the module, for errors.

    Raises LayoutError where a rank would have no heads: the model's own code does not run without.
    """
    dims, mesh = strategy.roles.core(True), strategy.mesh
    ranks = num_parts(dims, mesh.shape, ("inner",))
    copies = math.lcm(columns.groups, ranks)
    if columns.groups % ranks and columns.heads % copies == 0:
        return copies
    side = Side("inner", columns.groups)
    spans = [strategy.span(side, dims, mesh.coords(rank)) for rank in mesh.ranks]
    if any(first == end for first, end in spans):
        most = max(end - first for first, end in spans)
        raise LayoutError(
            f"{where} has {columns.heads} heads in {columns.groups} groups, which {ranks} ranks cannot share: "
            f"with {most} groups on a rank, some ranks have none"
        )
    return columns.groups


def attention_units(columns: HeadColumns, name: str, units: int) -> FeatureUnits:
    """Return how the output columns of linear layer `name`, before attention, fall into `units` runs of heads."""
    of_units = columns.of_units(name, units)
    features, width = columns.features[name], len(of_units[0])
    runs = [tuple(range(unit * width, (unit + 1) * width)) for unit in range(units)]
    if of_units == runs:
        return FeatureUnits(units)
    distinct = sorted(set(of_units))
    width = features // len(distinct)
    if distinct == [tuple(range(n * width, (n + 1) * width)) for n in range(len(distinct))]:
        copies = units // len(distinct)
        if of_units == [own for own in distinct for _ in range(copies)]:
            return FeatureUnits(units, weight_count=len(distinct))
    for parts in range(2, len(of_units[0]) + 1):
        if len(of_units[0]) % parts or features % parts:
            continue
        run, block = len(of_units[0]) // parts, features // parts
        spread = [
            tuple(part * block + unit * run + at for part in range(parts) for at in range(run))
            for unit in range(units)
        ]
        if of_units == spread and run * units == block:
            return FeatureUnits(units, parts=parts)
    return FeatureUnits(units, table=of_units)
