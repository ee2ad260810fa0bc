"""Programs of one site of a layer each: one of its products with what it moves, attention in a ring, one move.

A layer is sites with functions between them that work on what a rank has. Who runs these functions by other means,
as a model of torch does, needs the sites alone. They are written by the same writers as whole layers, from the
same roles, so that they move the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from meshweave.algorithms.block.halves import Half, Site, halves_of, token_sizes
from meshweave.algorithms.block.parts import BlockParts, parts_of_writer
from meshweave.algorithms.block.pieces import LayersPiece
from meshweave.algorithms.block.problem import BlockConfig, BlockProblem
from meshweave.algorithms.block.program_writer import ProgramWriter
from meshweave.algorithms.block.ring_equations import (
    POSITIONS,
    ring_gradient_meanings,
    ring_gradient_tensors,
    ring_meanings,
    ring_tensors,
)
from meshweave.algorithms.block.roles import TOKENS, AxisDims, Roles, Side, Sides
from meshweave.algorithms.block.tensors import WeightSpec
from meshweave.algorithms.block.writer import Stored
from meshweave.describe.layout.mesh import Mesh
from meshweave.ir.program import On, Program, Tensor
from meshweave.ir.program.meanings import Meaning, Product, Same

OPERAND, WEIGHT, RESULT = "X", "W", "Y"
"""The tensors of a product; gradients have a D before them. Buffers have the same names in lower case."""


@dataclass(frozen=True)
class ProductSite:
    """A product of activations with a weight, at one of the two sites of a half of a layer.

    Attributes:
        is_first: whether it is the product that enters a half, (hidden, inner), or the one that leaves it.
        is_attention: whether the half is attention, or the feed-forward part.
        hidden: the features of the residual.
        units, unit: what is dealt out of the inner features: units of so many columns, that are never divided.
        stored: how the weight is kept; None as the roles say.
    """

    is_first: bool
    is_attention: bool
    hidden: int
    units: int
    unit: int = 1
    stored: AxisDims | None = None

    @property
    def weight_sides(self) -> Sides:
        """Return the sides of the weight (features of the operand, features of the result)."""
        hidden, inner = Side("hidden", self.hidden), Side("inner", self.units, self.unit)
        return (hidden, inner) if self.is_first else (inner, hidden)

    def stored_dims(self, roles: Roles) -> AxisDims:
        """Return how the weight is kept, and its gradient is to lie."""
        return self.stored or roles.stored(roles.weight(self.is_first), self.weight_sides)


def product_sites(problem: BlockProblem) -> list[ProductSite]:
    """Return the four products of a layer."""
    return [
        ProductSite(
            is_first,
            half.is_attention,
            problem.hidden,
            half.units,
            half.in_unit if is_first else half.out_unit,
        )
        for half in halves_of(problem, 0)
        for is_first in (True, False)
    ]


def site_problem(
    batch: int, sequence: int, hidden: int, mesh_shape: tuple[int, ...], dtype: str
) -> BlockProblem:
    """Return a problem with these sizes of activations, for a site, which has no others."""
    return BlockProblem(batch, sequence, hidden, 1, 1, 1, 1, mesh_shape, dtype=dtype)


def product_parts(
    site: ProductSite, problem: BlockProblem, config: BlockConfig, roles: Roles, mesh: Mesh
) -> BlockParts:
    """Return the forward and the backward program of a product.

    Inputs are "x", and "dy" backward; outputs "y", and "dx" and "dw" backward. Gradients of the weight are
    complete and lie as it is stored.

    Raises:
        LayoutError: the roles fit no product.
    """
    writer = ProgramWriter(problem, config, mesh, _batch_dims(roles))
    piece = ProductPiece(problem, roles, writer, site=site)
    tokens = token_sizes(problem, roles.is_flat)
    rows, columns = (side.size for side in site.weight_sides)
    tensors: list[Tensor] = []
    for prefix in ("", "D"):
        tensors += [
            Tensor(f"{prefix}{OPERAND}", (*tokens, rows), problem.dtype),
            Tensor(f"{prefix}{WEIGHT}", (rows, columns), problem.dtype),
            Tensor(f"{prefix}{RESULT}", (*tokens, columns), problem.dtype),
        ]
    meanings: list[Meaning] = [
        Product(RESULT, OPERAND, WEIGHT),
        Product(f"D{OPERAND}", f"D{RESULT}", WEIGHT, transpose_b=True),
        Product(f"D{WEIGHT}", OPERAND, f"D{RESULT}", transpose_a=True),
    ]
    side = "into" if site.is_first else "out of"
    half = "attention" if site.is_attention else "feed-forward"
    return parts_of_writer(piece, writer, f"product {side} {half}, {config}", tensors, meanings)


@dataclass
class ProductPiece(LayersPiece):
    """Writes one product forward, and the products of its gradients."""

    site: ProductSite = field(kw_only=True)

    @property
    def _place(self) -> Site:
        own = self.site
        half = Half(
            self.problem, own.is_attention, 0, "", RESULT, "", "", OPERAND, WEIGHT, RESULT, OPERAND, WEIGHT, "",
            own.units, own.unit, own.unit, self.roles.is_flat,
        )  # fmt: skip
        return Site(half, own.is_first)

    @property
    def _operand_sides(self) -> Sides:
        if self.site.is_first:
            return self._residual_sides()
        return self._inner_sides(self._place.half, self.site.unit)

    @property
    def _operand_dims(self) -> AxisDims:
        return self.roles.residual if self.site.is_first else self.roles.core(self.site.is_attention)

    def _declare(self) -> None:
        """Declare the operand and the weight, the gradient that arrives, and what comes out."""
        new, dtype, site = self.writer.new, self.problem.dtype, self.site
        _, sides, final = self._result(self._place)
        kept = site.stored_dims(self.roles)
        operand, weight = (OPERAND, self._operand_sides, self._operand_dims), site.weight_sides
        inputs: tuple[WeightSpec, ...] = (
            operand,
            (WEIGHT, weight, kept),
            (f"D{RESULT}", sides, final),
        )
        outputs: tuple[WeightSpec, ...] = (
            (RESULT, sides, final),
            (f"D{OPERAND}", *operand[1:]),
            (f"D{WEIGHT}", weight, kept if site.stored else self.roles.gradient(self._used, weight)),
        )
        for name, sides, dims in inputs:
            self.stored[name] = new(name.lower(), name, sides, dims, dtype, "input")
        for name, sides, dims in outputs:
            self.stored[name] = new(name.lower(), name, sides, dims, dtype, "output")

    @property
    def _used(self) -> AxisDims:
        return self.roles.weight(self.site.is_first)

    def write_forward(self) -> None:
        """Write the product and the moves around it."""
        self._multiply(self._place)

    def write_backward(self) -> None:
        """Write the products for both gradients, and the reduction of that of the weight over ranks."""
        self._multiply_back(self._place, self.stored[f"D{RESULT}"])
        self._write_later()
        for landed, out in self._reductions:
            self.writer.move_once(landed, out.dims, "gradients", out)

    def _reduce(self, landed: Stored, out: Stored) -> None:
        """Write the reduction of a gradient here, as in a program of whole layers."""
        super(LayersPiece, self)._reduce(landed, out)


# --- attention in a ring ------------------------------------------------------------------------------------


def ring_parts(problem: BlockProblem, config: BlockConfig, roles: Roles, mesh: Mesh) -> BlockParts:
    """Return the forward and the backward program of attention whose keys and values go round.

    The problem has no biases; with family "gpt" queries and keys come as they are multiplied. Inputs are "qkv0" in
    groups of heads and "positions", and "da0" backward; outputs "a0", and "dqkv0" backward.
    """
    writer = ProgramWriter(problem, config, mesh, _batch_dims(roles))
    half = halves_of(problem, 0)[0]
    tensors = [*half.tensors(), *half.gradient_tensors(), *ring_tensors(half), *ring_gradient_tensors(half)]
    tensors.append(Tensor(POSITIONS, (problem.sequence,), problem.statistics_dtype))
    meanings: list[Meaning] = [
        Same(f"{half.inner}_units", half.inner),
        *ring_meanings(half),
        *ring_gradient_meanings(half),
    ]
    piece = RingPiece(problem, roles, writer)
    return parts_of_writer(piece, writer, f"ring attention, {config}", tensors, meanings)


@dataclass
class RingPiece(LayersPiece):
    """Writes the ring of attention alone."""

    def _declare(self) -> None:
        problem, roles, new = self.problem, self.roles, self.writer.new
        half, dims = self._half, self.roles.core(True)
        widths = {half.inner: half.in_unit, half.core: half.out_unit}
        for name, kind in ((half.inner, "input"), (half.core, "output")):
            sides = self._inner_sides(half, widths[name])
            self.stored[name] = new(name.lower(), name, sides, dims, problem.dtype, kind)  # type: ignore[arg-type]
        for name, kind in ((half.core, "input"), (half.inner, "output")):
            sides = self._inner_sides(half, widths[name])
            gradient = f"D{name}"
            self.stored[gradient] = new(gradient.lower(), gradient, sides, dims, problem.dtype, kind)  # type: ignore[arg-type]
        positions: Sides = (Side("sequence", problem.sequence),)
        self.stored[POSITIONS] = new(
            POSITIONS.lower(), POSITIONS, positions, roles.nowhere, problem.statistics_dtype, "input"
        )

    @property
    def _half(self) -> Half:
        return halves_of(self.problem, 0)[0]

    def write_forward(self) -> None:
        """Write attention over all keys that pass."""
        self._core(self._half, self.stored[self._half.inner])

    def write_backward(self) -> None:
        """Write its gradient."""
        self._core_gradient(self._half, self.stored[f"D{self._half.core}"])


# --- one move -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MoveSite:
    """A move of a tensor from one layout to another: "x" to "y".

    Attributes:
        sides: those of the tensor; the first two are batch and sequence, where it has tokens.
        before, after: how it lies; before it may be terms of a sum.
        op: how terms are combined.
    """

    sides: Sides
    before: AxisDims
    after: AxisDims
    op: str = "sum"

    @property
    def is_needed(self) -> bool:
        """Return whether anything is moved."""
        return self.before != self.after


def move_program(site: MoveSite, mesh: Mesh, dtype: str) -> Program:
    """Return the program of a move."""
    token_counts = [side.count for side in site.sides if side.dim in TOKENS]
    batch, sequence = (*token_counts, 1, 1)[:2]
    problem = site_problem(batch, sequence, 1, mesh.shape, dtype)
    dims: AxisDims = tuple("batch" if dim == "batch" else "" for dim in site.before)
    writer = ProgramWriter(problem, BlockConfig(), mesh, dims)
    src = writer.new("x", OPERAND, site.sides, site.before, dtype, "input")
    out = writer.new("y", RESULT, site.sides, site.after, dtype, "output")
    if all(x == y or (x == "partial" and not y) for x, y in zip(site.before, site.after, strict=True)):
        landed = replace(out, dims=site.before)
        writer.copy(landed, src)
        writer.move(landed, site.after, "moved", op=site.op)
    else:
        writer.move(src, site.after, "moved", into=out, op=site.op)
    writer.cut()
    shape = tuple(side.size for side in site.sides)
    return Program(
        "move",
        (mesh,),
        (Tensor(OPERAND, shape, dtype), Tensor(RESULT, shape, dtype)),
        tuple(writer.buffers.values()),
        writer.lanes,
        (On(mesh.name, tuple(writer.statements)),),
        (Same(RESULT, OPERAND),),
    )


def _batch_dims(roles: Roles) -> AxisDims:
    return tuple("batch" if dim == "batch" else "" for dim in roles.residual)
