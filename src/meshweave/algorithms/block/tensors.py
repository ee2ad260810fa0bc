"""The tensors of a block in buffers: which there are, how they lie, and weights where they are multiplied."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from meshweave.algorithms.block.place import LayerPlace, NodePlace, layers_of, side_of
from meshweave.algorithms.block.problem import BlockProblem
from meshweave.algorithms.block.ring_equations import POSITIONS
from meshweave.algorithms.block.roles import AxisDims, Roles, Side, Sides
from meshweave.algorithms.block.writer import BlockWriter, Kind, Stored
from meshweave.describe.model.nodes import WITH_TOKENS, Features, LayerNode, Linear, NodeWeight

WEIGHTS = "weights"
"""What the lanes of gathers of weights are called, after their mesh axis."""

WeightSpec = tuple[str, Sides, AxisDims]
"""The name of a weight, its sides, and how it lies where it is used."""


@dataclass
class BlockTensors:
    """Declares the tensors of all layers with a writer.

    A tensor's `sides` are its dims. A layout, `dims`, has for each mesh axis the dim that it shards, "" where it
    replicates, "partial" for partial sums.

    Attributes:
        stored: the buffer of each tensor by name; an operand gathered for a product has " gathered" after its
            name.
    """

    problem: BlockProblem
    roles: Roles
    writer: BlockWriter
    stored: dict[str, Stored] = field(default_factory=dict)

    @property
    def layers(self) -> Sequence[LayerPlace]:
        """Return all layers of the problem in order, each with the names of its tensors in the program."""
        return layers_of(self.problem, self.roles.is_flat)

    # --- sides --------------------------------------------------------------------------------------------------

    @property
    def _token_sides(self) -> Sides:
        batch, sequence = self.problem.batch, self.problem.sequence
        if self.roles.is_flat:
            return (Side("batch", batch, sequence),)
        return Side("batch", batch), Side("sequence", sequence)

    def sides(self, features: Features) -> Sides:
        """Return the sides of an activation with these features: (batch, sequence, features).

        With 2D products batch and sequence are one side.
        """
        return *self._token_sides, side_of(features)

    def _residual_sides(self) -> Sides:
        return *self._token_sides, Side("hidden", self.problem.hidden)

    def dims(self, at: NodePlace[LayerNode], features: Features) -> AxisDims:
        """Return the layout of an activation that has these features and is an input or output of a node.

        It is that of the residual for "hidden" features and those of `WITH_TOKENS`, else that of activations
        inside attention or the feed-forward part, whichever the node belongs to.
        """
        return (
            self.roles.residual
            if features.dim in ("hidden", *WITH_TOKENS)
            else self.roles.core(at.node.group == "attention")
        )

    # --- weights ------------------------------------------------------------------------------------------------

    def _weights(self) -> list[WeightSpec]:
        """Return all weights: name, sides, and how each lies where it is used."""
        return [spec for layer in self.layers for spec in self._weights_of(layer)]

    def _weights_of(self, layer: LayerPlace) -> list[WeightSpec]:
        groups = {weight.name: node.group for node in layer.graph.nodes for weight in node.parameters}
        out: list[WeightSpec] = []
        for weight in layer.graph.parameters:
            name, ranks = layer.own(weight.name), self.problem.experts
            if ranks is not None and (own := ranks.side(weight)) is not None:
                everywhere: AxisDims = tuple("expert" for _ in self.roles.axes)
                out.append((name, (own,), everywhere))
                continue
            out.append((name, tuple(map(side_of, weight.sides)), self._used(weight, groups[weight.name])))
        return out

    def _used(self, weight: NodeWeight, group: str) -> AxisDims:
        """Return how parameters lie where they are used."""
        if weight.kind == "matrix":
            return self.roles.weight(weight.sides[0].dim in ("hidden", *WITH_TOKENS))
        if weight.kind in ("whole", "experts"):
            return self.roles.replicated
        if weight.sides[-1].dim == "hidden":
            return self.roles.gain
        if weight.sides[-1].dim in ("", *WITH_TOKENS):
            return self.roles.replicated
        return tuple("inner" if dim == "inner" else "" for dim in self.roles.core(group == "attention"))

    def _declare(self) -> None:
        """Declare inputs and outputs, in the order of their use."""
        problem, roles = self.problem, self.roles
        self._declare_inputs()
        roles_of_weights = [(spec, _is_matrix(spec[1])) for spec in self._weights()]
        kept = (
            (n, s, roles.stored(used, s) if is_matrix else used)
            for (n, s, used), is_matrix in roles_of_weights
        )
        self._declare_all("input", kept)
        if roles.ring_axis is not None:
            self._declare_positions()
        self._declare_outputs()
        if problem.training:
            ends = (
                (f"D{n}", s, roles.gradient(used, s) if is_matrix else used)
                for (n, s, used), is_matrix in roles_of_weights
            )
            self._declare_all("output", ends)

    def _declare_positions(self) -> None:
        """Declare the positions of tokens in their sequence."""
        positions: Sides = (Side("sequence", self.problem.sequence),)
        self.stored[POSITIONS] = self.writer.new(
            POSITIONS.lower(),
            POSITIONS,
            positions,
            self.roles.replicated,
            self.problem.statistics_dtype,
            "input",
        )

    def _declare_inputs(self) -> None:
        """Declare the inputs that are no weights."""
        for name in ("X", "DZ") if self.problem.training else ("X",):
            self._declare_residual(name, "input")

    def _declare_outputs(self) -> None:
        """Declare the outputs that are no gradients of weights."""
        for name in ("Z", "DX") if self.problem.training else ("Z",):
            self._declare_residual(name, "output")

    def _declare_all(self, kind: Kind, specs: Iterable[WeightSpec]) -> None:
        """Declare inputs or outputs."""
        for name, sides, dims in specs:
            self.stored[name] = self.writer.new(name.lower(), name, sides, dims, self.problem.dtype, kind)

    def _declare_residual(self, name: str, kind: Kind) -> None:
        self.stored[name] = self.writer.new(
            name.lower(), name, self._residual_sides(), self.roles.residual, self.problem.dtype, kind
        )

    def new(self, tensor: str, sides: Sides, dims: AxisDims, dtype: str = "") -> Stored:
        """Return the buffer of a tensor: one declared before, or a new one with these sides, layout and dtype.

        A `dtype` of "" is the problem's.
        """
        if tensor not in self.stored:
            self.stored[tensor] = self.writer.new(
                tensor.lower(), tensor, sides, dims, dtype or self.problem.dtype
            )
        return self.stored[tensor]

    def weight(self, at: NodePlace[Linear]) -> Stored:
        """Return the buffer of a product's weight as it is multiplied; write its all-gather if ranks store shards.

        It is gathered anew for each use, or only once if `roles.keeps_weights`.
        """
        return self._gathered(at.node.weight, at.layer, self.roles.weight(at.node.reads_residual))

    def _gathered(self, weight: str, layer: LayerPlace, used: AxisDims) -> Stored:
        tensor = layer.own(weight)
        kept = self.stored[tensor]
        if kept.dims == used:
            return kept
        if self.roles.keeps_weights:
            if f"{tensor}_whole" not in self.stored:
                self.stored[f"{tensor}_whole"] = self.writer.gather_once(kept, None, used, WEIGHTS)
            return self.stored[f"{tensor}_whole"]
        name = weight.rstrip("_").lower()
        out = replace(kept, buffer=f"{name}_whole", dims=used, slot=layer.number % 2)
        return self.writer.gather_once(
            kept, self.writer.scratch(out, min(2, self.problem.layers)), used, WEIGHTS
        )

    def result_buffers(
        self, tensor: str, sides: Sides, natural: AxisDims, final: AxisDims
    ) -> tuple[Stored, Stored]:
        """Return the buffers of a product's result as (before communication, after it).

        They are one buffer in two layouts if there is no communication but all-reduces, which are in place.

        Args:
            tensor: the name of the result; a buffer that was declared for it before is used.
            natural: the layout in which the product leaves its result, "partial" along some axes.
            final: the layout after the communication.
        """
        out = self.new(tensor, sides, final)
        if all(
            before == after or (before == "partial" and not after)
            for before, after in zip(natural, final, strict=True)
        ):
            return replace(out, dims=natural), out
        return self.writer.partial_buffer(out, natural), out


def _is_matrix(sides: Sides) -> bool:
    """Return whether a weight is the matrix of a product, and not the parameters of a norm or a bias."""
    return len(sides) == 2 and bool(sides[0].dim)
