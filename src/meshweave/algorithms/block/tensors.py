"""The tensors of a block in buffers: which there are, how they lie, and weights where they are multiplied."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from meshweave.algorithms.block.halves import Half, Site, halves_of_layers
from meshweave.algorithms.block.problem import BlockProblem
from meshweave.algorithms.block.ring_equations import POSITIONS
from meshweave.algorithms.block.roles import AxisDims, Roles, Side, Sides
from meshweave.algorithms.block.writer import BlockWriter, Kind, Stored

WEIGHTS = "weights"
"""What the lanes of gathers of weights are called, after their mesh axis."""

WeightSpec = tuple[str, Sides, AxisDims]
"""The name of a weight, its sides, and how it lies where it is used."""


@dataclass
class BlockTensors:
    """Declares the tensors of all layers with a writer.

    Attributes:
        stored: where each tensor lies, by name; an operand where it is multiplied has " gathered" after its name.
    """

    problem: BlockProblem
    roles: Roles
    writer: BlockWriter
    stored: dict[str, Stored] = field(default_factory=dict)

    @property
    def _halves(self) -> list[Half]:
        return halves_of_layers(self.problem, self.roles.is_flat)

    # --- sides --------------------------------------------------------------------------------------------------

    @property
    def _token_sides(self) -> Sides:
        batch, sequence = self.problem.batch, self.problem.sequence
        if self.roles.is_flat:
            return (Side("batch", batch, sequence),)
        return Side("batch", batch), Side("sequence", sequence)

    def _residual_sides(self) -> Sides:
        return *self._token_sides, Side("hidden", self.problem.hidden)

    def _inner_sides(self, half: Half, unit: int) -> Sides:
        return *self._token_sides, Side("inner", half.units, unit)

    def _row_sides(self) -> Sides:
        return *self._token_sides, Side("", self.problem.norm_rows)

    # --- operands and results -----------------------------------------------------------------------------------

    def _weights(self) -> list[WeightSpec]:
        """Return all weights: name, sides, and how each lies where it is used."""
        hidden, roles = Side("hidden", self.problem.hidden), self.roles
        weights: list[WeightSpec] = []
        for half in self._halves:
            weights += [
                (half.gain, (Side("", self.problem.norm_rows), hidden), roles.gain),
                (half.w_in, (hidden, Side("inner", half.units, half.in_unit)), roles.weight(True)),
                (half.w_out, (Side("inner", half.units, half.out_unit), hidden), roles.weight(False)),
            ]
            if self.problem.biases:
                inner = Side("inner", half.units, half.in_unit)
                core: AxisDims = tuple("inner" if d == "inner" else "" for d in roles.core(half.is_attention))
                weights += [
                    (Site(half, True).bias, (inner,), core),
                    (Site(half, False).bias, (hidden,), roles.gain),
                ]
        return weights

    def _declare(self) -> None:
        """Declare inputs and outputs, in the order of their use."""
        problem, roles, writer = self.problem, self.roles, self.writer
        self._declare_inputs()
        for name, sides, used in self._weights():
            dims = roles.stored(used, sides) if _is_matrix(sides) else used
            self.stored[name] = writer.new(name.lower(), name, sides, dims, problem.dtype, "input")
        if roles.ring_axis is not None:
            positions: Sides = (Side("sequence", problem.sequence),)
            self.stored[POSITIONS] = writer.new(
                POSITIONS.lower(), POSITIONS, positions, roles.nowhere, problem.statistics_dtype, "input"
            )
        self._declare_outputs()
        for name, sides, used in self._weights() if problem.training else ():
            dims = roles.gradient(used, sides) if _is_matrix(sides) else used
            self.stored[f"D{name}"] = writer.new(
                f"d{name.lower()}", f"D{name}", sides, dims, problem.dtype, "output"
            )

    def _declare_inputs(self) -> None:
        """Declare the inputs that are no weights."""
        for name in ("X", "DZ") if self.problem.training else ("X",):
            self._declare_residual(name, "input")

    def _declare_outputs(self) -> None:
        """Declare the outputs that are no gradients of weights."""
        for name in ("Z", "DX") if self.problem.training else ("Z",):
            self._declare_residual(name, "output")

    def _declare_residual(self, name: str, kind: Kind) -> None:
        self.stored[name] = self.writer.new(
            name.lower(), name, self._residual_sides(), self.roles.residual, self.problem.dtype, kind
        )

    def _new(self, tensor: str, sides: Sides, dims: AxisDims, dtype: str = "") -> Stored:
        """Return the buffer of a tensor: that which is declared for it, or a new one."""
        if tensor not in self.stored:
            self.stored[tensor] = self.writer.new(
                tensor.lower(), tensor, sides, dims, dtype or self.problem.dtype
            )
        return self.stored[tensor]

    def _weight(self, site: Site) -> Stored:
        """Return a weight where it is multiplied: gathered, if it is kept in parts."""
        kept, used = self.stored[site.weight], self.roles.weight(site.is_first)
        if kept.dims == used:
            return kept
        if self.roles.keeps_weights:
            if f"{site.weight}_whole" not in self.stored:
                self.stored[f"{site.weight}_whole"] = self.writer.gather_once(kept, None, used, WEIGHTS)
            return self.stored[f"{site.weight}_whole"]
        name = site.weight.removesuffix(str(site.half.layer)).rstrip("_").lower()
        out = replace(kept, buffer=f"{name}_whole", dims=used, slot=site.half.layer % 2)
        return self.writer.gather_once(
            kept, self.writer.scratch(out, min(2, self.problem.layers)), used, WEIGHTS
        )

    def _landing(
        self, tensor: str, sides: Sides, natural: AxisDims, final: AxisDims
    ) -> tuple[Stored, Stored]:
        """Return the buffer that a product writes, and that in which its result is to lie.

        They are one where sums are made in place.
        """
        out = self._new(tensor, sides, final)
        if all(
            before == after or (before == "partial" and not after)
            for before, after in zip(natural, final, strict=True)
        ):
            return replace(out, dims=natural), out
        return self.writer.partial_buffer(out, natural), out


def _is_matrix(sides: Sides) -> bool:
    """Return whether a weight is the matrix of a product, and not the parameters of a norm or a bias."""
    return len(sides) == 2 and bool(sides[0].dim)
