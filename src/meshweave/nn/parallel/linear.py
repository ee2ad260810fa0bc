"""Linear layers at the sites of a layer: `ParallelLinear`, which a user can also place by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshweave.algorithms.block import BlockConfig
from meshweave.algorithms.block.roles import TOKENS, AxisDims, Side, Sides
from meshweave.algorithms.block.sites import ProductSite
from meshweave.base.errors import LayoutError
from meshweave.nn.autocast import autocast_operands
from meshweave.nn.custom_ops import number_of
from meshweave.nn.parallel.buckets import KeptParameter
from meshweave.nn.parallel.moves import Mover, PlacedMove, terms
from meshweave.nn.parallel.ops import SiteProduct, multiply
from meshweave.nn.parallel.parameters import ParameterLayout
from meshweave.nn.parallel.strategy import LayerStrategy
from meshweave.nn.parallel.units import FeatureUnits, UnitChoice
from meshweave.nn.parallel.uses import Entry, ParameterUse

Place = Literal["in", "out"]
"""Where a product is: "in" takes the residual to inner features, "out" takes them back."""


def is_transposed(linear: nn.Module) -> bool:
    """Return whether a linear layer is a Conv1D of transformers, whose weight is (features in, features out)."""
    return type(linear).__name__ == "Conv1D"


class ParallelLinear(nn.Module):  # type: ignore[misc]
    """A linear layer whose weight and bias are DTensors, and whose product is the program of a strategy's site.

    It takes the place of an `nn.Linear`, or of a Conv1D of transformers, with parameters of the same names and
    global shapes:

        up = mw.nn.ParallelLinear(nn.Linear(64, 256), "megatron_sp", device_mesh, place="in")
        down = mw.nn.ParallelLinear(nn.Linear(256, 64), "megatron_sp", device_mesh, place="out")
        y = down(torch.relu(up(x)))  # x: this rank's part (batch, sequence, features) of the residual

    Args:
        linear: the layer with its whole weight, equal on all ranks; on the meta device for DTensors there.
        strategy: the name of a strategy, or one on its ranks.
        device_mesh: a mesh with a dim for each axis of a strategy that is given by its name; else ignored.
        place: "in" where it takes the residual to inner features (heads, or those of the feed-forward part),
            "out" where it takes these back: column and row parallel in Megatron.
        units: the groups of inner features that ranks never divide, such as heads, and how the weight has them.
        is_attention: whether its inner features are heads of attention, or those of the feed-forward part.
        stored: for each mesh axis the dim of the weight that it shards where it is stored; None as the strategy
            says.
        config: chunks and slices of a strategy that is given by its name; else ignored.
        name: that of the layer, for errors.

    Raises:
        LayoutError: the strategy or the sizes do not fit the mesh.
        UnsupportedError: there is no such strategy, or two axes would shard one dim of the weight, of which only
            the outer one is gathered before the product.
    """

    def __init__(
        self,
        linear: nn.Module,
        strategy: LayerStrategy | str,
        device_mesh: DeviceMesh | None = None,
        *,
        place: Place,
        units: FeatureUnits = FeatureUnits(),  # noqa: B008 (frozen)
        is_attention: bool = False,
        stored: AxisDims | None = None,
        config: BlockConfig | None = None,
        name: str = "weight",
    ) -> None:
        super().__init__()
        if isinstance(strategy, str):
            if device_mesh is None:
                raise LayoutError("ParallelLinear: give the device mesh of the strategy")
            strategy = LayerStrategy.of(strategy, device_mesh, config)
        self.place, self.parts, self.is_transposed = place, units.parts, is_transposed(linear)
        weight = linear.weight
        rows, columns = weight.shape if self.is_transposed else weight.shape[::-1]
        hidden, inner = (rows, columns // units.parts) if place == "in" else (columns, rows)
        count = units.count or (inner if units.table is None else len(units.table))
        self.real_units, self.table = units.weight_count or count, units.table
        if units.table is not None:
            inner = sum(map(len, units.table))
        if inner % self.real_units:
            raise LayoutError(f"{name}: {inner} features do not fall into {self.real_units} units")
        site = ProductSite(place == "in", is_attention, hidden, count, inner // self.real_units, stored)
        is_given = stored is not None
        self.site = site if is_given else site.with_own_gathers(strategy.roles, strategy.mesh.shape)
        self.layer_strategy = strategy
        self._lay_parameters(linear, name)
        self.is_local = strategy.is_alone or self.site.is_local(strategy.roles)
        self.alone = LinearGroup([self])

    def _lay_parameters(self, linear: nn.Module, name: str) -> None:
        own, strategy = self.site, self.layer_strategy
        sides = own.weight_sides if self.is_transposed else own.weight_sides[::-1]
        used = own.stored_dims(strategy.roles)
        choice = self.weight_choice = UnitChoice(
            strategy, sides, used, self.real_units, self.parts, self.table
        )
        layout = ParameterLayout(*self._stored(choice, used), self.parts)
        of_gradient = used if own.gathers is None else own.gradient_terms(strategy.roles)
        self.weight = layout.distribute(name, linear.weight, strategy)
        self.layouts = {"weight": layout}
        self.kept = {"weight": KeptParameter(strategy, layout, choice.kept, choice.terms(of_gradient))}
        self.opened: dict[str, Tensor] = {}
        self.bias: nn.Parameter | None = None
        if getattr(linear, "bias", None) is not None:
            side, dims = self.bias_placement()
            table = self.table if own.is_first else None
            self.bias_choice = UnitChoice(strategy, (side,), dims, self.real_units, self.parts, table)
            kept = self._kept_bias(self.bias_choice.kept)
            self.layouts["bias"] = ParameterLayout(self.bias_choice.sides, kept, self.parts)
            self.bias = self.layouts["bias"].distribute(f"{name} (bias)", linear.bias, strategy)
            summed = self.bias_choice.terms(self._bias_terms())
            at_kept = tuple("partial" if t == "partial" else k for t, k in zip(summed, kept, strict=True))
            self.kept["bias"] = KeptParameter(strategy, self.layouts["bias"], kept, at_kept)
            there = PlacedMove(strategy, (Side("", self.parts), side), kept, dims, has_tokens=False)
            back = PlacedMove(strategy, (Side("", self.parts), side), dims, kept, has_tokens=False)
            self.take_bias = None if self.bias_choice.is_needed else Mover(there, back)

    def _stored(self, choice: UnitChoice, used: AxisDims) -> tuple[Sides, AxisDims]:
        """Return the sides of the weight as they are kept, and how: in parts along axes that shard weights."""
        own, roles = self.site, self.layer_strategy.roles
        if own.gathers is None:
            return choice.sides, choice.kept
        stored = roles.stored(roles.weight(own.is_first), own.weight_sides)
        kept = tuple(k if u else s for k, u, s in zip(choice.kept, used, stored, strict=True))
        if "inner" in used or "inner" not in kept:
            return choice.sides, kept
        # Units are whole where they are multiplied, not where they are kept.
        return tuple(replace(s, count=s.size, unit=1) if s.dim == "inner" else s for s in choice.sides), kept

    def _bias_terms(self) -> AxisDims:
        """Return how the gradient of the bias lies where it is computed."""
        roles, own = self.layer_strategy.roles, self.site
        return terms(roles.core(own.is_attention) if own.is_first else roles.residual, TOKENS)

    def bias_placement(self) -> tuple[Side, AxisDims]:
        """Return (side, dims): the dim of the bias, or of each part of a fused one, and which mesh axes split it.

        `dims` has for each mesh axis the name of that dim if the axis splits it, else "".
        """
        own, roles = self.site, self.layer_strategy.roles
        if not own.is_first:
            return Side("hidden", own.hidden), roles.gain
        dims: AxisDims = tuple("inner" if dim == "inner" else "" for dim in roles.core(own.is_attention))
        return Side("inner", own.units, own.unit), dims

    def _kept_bias(self, dims: AxisDims) -> AxisDims:
        """Return how the bias is kept. DTensor has no placement for fused parts that two axes split."""
        first = dims.index("inner") if "inner" in dims else 0
        if self.parts == 1:
            return dims
        return tuple("" if dim == "inner" and at > first else dim for at, dim in enumerate(dims))

    def weights(self, kept: Tensor) -> list[Tensor]:
        """Return this rank's part (features out, features in) of each fused weight, or of the one weight.

        `kept` is this rank's weight, already gathered along the axes that split it only while it is stored.
        """
        parts = self.weight_choice(kept)
        return [part.t() for part in parts] if self.is_transposed else parts

    def biases(self, bias: Tensor) -> list[Tensor]:
        """Return this rank's part (features,) of each of the fused biases; of the one if none is fused.

        `bias` is this rank's shard of all of them together.
        """
        if self.parts == 1 or self.take_bias is None:
            return self.bias_choice(bias)
        return list(self.take_bias(bias.view(self.parts, -1), 1, 1))

    def forward(self, x: Tensor, batch: int = 0, sequence: int = 0) -> Tensor:
        """Return this rank's shard (batch, sequence, features) of the result. Collective.

        Args:
            x: this rank's shard of the operand, (batch, sequence, features).
            batch: the number of sequences of all ranks; 0 where all ranks have as many sequences, and tokens of
                each.
            sequence: the number of tokens of a whole sequence; ignored where `batch` is 0.
        """
        strategy, dims = self.layer_strategy, self.operand_dims
        if not batch:
            batch, sequence = x.shape[0], x.shape[1]
            for dim, size in zip(dims, strategy.mesh.shape, strict=True):
                batch, sequence = (
                    batch * (size if dim == "batch" else 1),
                    sequence * (size if dim == "sequence" else 1),
                )
        return (
            torch.cat(self.alone(x, batch, sequence), -1)
            if self.parts > 1
            else self.alone(x, batch, sequence)[0]
        )

    @property
    def operand_dims(self) -> AxisDims:
        """Return for each mesh axis the dim of the operand that it splits: "batch", "sequence", ...; "" for
        none.
        """
        roles = self.layer_strategy.roles
        return roles.residual if self.site.is_first else roles.core(self.site.is_attention)

    def extra_repr(self) -> str:
        """Return strategy, place, global shape of the weight and whether there is a bias, as text for printing."""
        shape = tuple(self.weight.shape)
        return f"{self.layer_strategy.name}, {self.place}, {shape}, bias={self.bias is not None}"


class LinearGroup:
    """Linear layers with one input, as of queries, keys and values: one product where ranks communicate in it.

    All have the same number of units of inner features, such as heads; each unit is on one rank.

    Args:
        linears: at least one, all of one place and strategy.
    """

    def __init__(self, linears: Sequence[ParallelLinear]) -> None:
        first = linears[0]
        self.linears, self.strategy = list(linears), first.layer_strategy
        widths = tuple(linear.site.unit for linear in linears for _ in range(linear.parts))
        units = {linear.site.units for linear in linears}
        assert len(units) == 1, units
        own = first.site
        site = replace(own, unit=sum(widths))
        self.product = SiteProduct(site, self.strategy, widths)
        self.number = number_of(self.product)
        self.is_local = first.is_local
        self._with_bias = [linear for linear in linears if linear.bias is not None]
        entries: list[Entry] = [(linear, "weight") for linear in linears]
        self._use = ParameterUse([[*entries, *((linear, "bias") for linear in self._with_bias)]])

    def _local_parameters(self) -> tuple[list[Tensor], Sequence[Tensor]]:
        """Return this rank's parts of the weights and biases of all layers."""
        linears, kept = self.linears, self._use()
        weights = [part for linear, own in zip(linears, kept, strict=False) for part in linear.weights(own)]
        pairs = zip(self._with_bias, kept[len(linears) :], strict=True)
        return weights, [part for linear, own in pairs for part in linear.biases(own)]

    def __call__(self, x: Tensor, batch: int, sequence: int) -> list[Tensor]:
        """Return this rank's shards of the results, one for each linear layer, or each part of a fused one.

        Collective. `x` is this rank's shard of the operand; `batch` and `sequence` are those of all ranks.
        """
        weights, biases = self._local_parameters()
        if self.is_local:
            pairs = zip(weights, self._beside(biases), strict=True)
            return [nn.functional.linear(x, weight, bias) for weight, bias in pairs]
        x, *weights = autocast_operands(x.device.type, x, *weights)
        results = multiply(x.contiguous(), weights, self.number, batch, sequence)
        if biases:
            biases = autocast_operands(x.device.type, *biases)
            pairs = zip(results, self._beside(biases), strict=True)
            results = [result if bias is None else result + bias for result, bias in pairs]
        return list(results)

    def _beside(self, biases: Sequence[Tensor]) -> list[Tensor | None]:
        """Return for each weight its bias, None where its layer has none."""
        left = iter(biases)
        return [
            None if linear.bias is None else next(left)
            for linear in self.linears
            for _ in range(linear.parts)
        ]
