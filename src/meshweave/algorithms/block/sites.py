"""Programs of one site of a layer each: one of its products with what it moves, attention in a ring, one move.

A layer is sites with functions between them that work on what a rank has. Who runs these functions by other means,
as a model of torch does, needs the sites alone. They are written by the same writers as whole layers, from the
same roles, so that they move the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from meshweave.algorithms.block.assembly import batch_dims
from meshweave.algorithms.block.folds import layer_gradient_meanings, layer_meanings, layer_tensors
from meshweave.algorithms.block.parts import BlockParts, parts_of_writer
from meshweave.algorithms.block.pieces import LayersPiece
from meshweave.algorithms.block.place import LayerPlace, attention_of
from meshweave.algorithms.block.problem import BlockConfig, BlockProblem
from meshweave.algorithms.block.program_writer import ProgramWriter
from meshweave.algorithms.block.roles import TOKENS, AxisDims, Roles, Side, Sides, gradient_dims, product
from meshweave.algorithms.block.tensors import WeightSpec
from meshweave.algorithms.block.writer import Stored
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.model.layer import LayerGraph
from meshweave.describe.model.nodes import Features, Linear
from meshweave.ir.program import On, Program, Tensor
from meshweave.ir.program.meanings import Same

OPERAND, WEIGHT, RESULT = "X", "W", "Y"
"""The tensors of a product; gradients have a D before them. Buffers have the same names in lower case."""


@dataclass(frozen=True)
class ProductSite:
    """A product of activations with a weight, with the communication that it needs, as a program of its own.

    Attributes:
        is_first: whether the weight is (hidden, inner), as W_qkv and W_1; else it is (inner, hidden).
        is_attention: whether it is a product of attention; else of the feed-forward part.
        hidden: number of features of the residual stream.
        units, unit: inner features: number of units (such as heads) that are never split, and features of each.
        stored: the layout in which the weight is stored; None for that of the roles.
        gathers: for each mesh axis whether the product gathers the weight along it, and scatters its gradient.
            Along other axes the caller does so, for many weights together. None: the product does along all axes.
    """

    is_first: bool
    is_attention: bool
    hidden: int
    units: int
    unit: int = 1
    stored: AxisDims | None = None
    gathers: tuple[bool, ...] | None = field(default=None, repr=False)

    @property
    def layer(self) -> LayerGraph:
        """Return the graph of a layer that has this product as its only node."""
        hidden, inner = Features("hidden", self.hidden), Features("inner", self.units, self.unit)
        operand, result = (hidden, inner) if self.is_first else (inner, hidden)
        group = "attention" if self.is_attention else "feed_forward"
        return LayerGraph((Linear(RESULT, (OPERAND,), group, operand, result, "product", WEIGHT),))  # type: ignore[arg-type]

    @property
    def weight_sides(self) -> Sides:
        """Return the two sides (dims) of the weight: features of the operand, then features of the result."""
        hidden, inner = Side("hidden", self.hidden), Side("inner", self.units, self.unit)
        return (hidden, inner) if self.is_first else (inner, hidden)

    def stored_dims(self, roles: Roles) -> AxisDims:
        """Return the layout of the product's input "w".

        Along axes along which the product gathers, the weight is sharded as ranks store it; along other axes it is
        already as it is multiplied.

        Raises:
            LayoutError: no dim of the weight is left to shard.
        """
        used = roles.weight(self.is_first)
        stored = self.stored or roles.stored(used, self.weight_sides)
        return self._gathered_here(used, stored)

    def _gathered_here(self, left: AxisDims, here: AxisDims) -> AxisDims:
        """Return `here` along the axes along which the product gathers its weight, `left` along the others."""
        if self.gathers is None:
            return here
        return tuple(h if is_here else dim for dim, h, is_here in zip(left, here, self.gathers, strict=True))

    def with_own_gathers(self, roles: Roles, shape: tuple[int, ...]) -> ProductSite:
        """Return the same product with `gathers` set, for a caller that gathers many weights at once.

        The product gathers its weight along axes whose role has `products_gather`, and the caller along others. 2D
        products gather along all axes with that role. Other products leave such an axis to the caller if another
        axis shards the same dim of the stored weight, if the weight is multiplied whole, or if the size of the
        axis does not divide the units of the dim.

        Args:
            shape: the sizes of the mesh axes.

        Raises:
            LayoutError: no dim of the weight is left to shard.
        """
        used = roles.weight(self.is_first)
        stored, counts = roles.stored(used, self.weight_sides), {s.dim: s.count for s in self.weight_sides}

        def gathers(axis: int) -> bool:
            dim = stored[axis]
            if not roles.axes[axis].products_gather or roles.is_flat:
                return roles.axes[axis].products_gather
            is_alone = stored.count(dim) == 1
            return any(used) and is_alone and counts[dim] % shape[axis] == 0

        return replace(self, gathers=tuple(map(gathers, range(len(stored)))))

    def is_local(self, roles: Roles) -> bool:
        """Return whether each rank multiplies its own tokens by a whole weight, so that nothing communicates.

        It is False if `gathers` is None, and for strategies of 2D products, whose tokens are one dim.
        """
        edges = roles.residual, roles.core(self.is_attention)
        if self.gathers is None or roles.is_flat or any(roles.weight(self.is_first)):
            return False
        return edges[0] == edges[1] == roles.operand(self.is_first)

    def gradient_terms(self, roles: Roles) -> AxisDims:
        """Return the layout of the product's output "dw", the weight's gradient.

        Along axes that shard the tokens it is "partial", unless the product scatters the gradient along them.

        Raises:
            LayoutError: the roles fit no product.
        """
        arriving = gradient_dims(roles.product(self.is_first))
        lies = product(roles.operand(self.is_first), arriving, TOKENS)
        return self._gathered_here(lies, roles.gradient(roles.weight(self.is_first), self.weight_sides))


@lru_cache(maxsize=256)
def _site_place(problem: BlockProblem, site: ProductSite, is_flat: bool) -> LayerPlace:
    return LayerPlace(problem, site.layer, 0, "", OPERAND, RESULT, is_flat)


def site_problem(
    batch: int, sequence: int, hidden: int, mesh_shape: tuple[int, ...], dtype: str
) -> BlockProblem:
    """Return a `BlockProblem` for one site, with these global sizes of activations; its other sizes are 1."""
    return BlockProblem(batch, sequence, hidden, 1, 1, 1, 1, mesh_shape, dtype=dtype)


def product_parts(
    site: ProductSite, problem: BlockProblem, config: BlockConfig, roles: Roles, mesh: Mesh
) -> BlockParts:
    """Return the forward and the backward program of one product.

    Inputs are "x" and "w", and "dy" backward; outputs are "y", and "dx" and "dw" backward. Of "x" and "y" the one
    of hidden features is laid out as the residual, the other as activations inside attention or the feed-forward
    part. "dw" is complete and sharded as the weight is stored, unless `site.gathers` leaves partial sums
    (`site.gradient_terms`).

    Raises:
        LayoutError: the roles fit no product.
    """
    writer = ProgramWriter(problem, _alone(config), mesh, batch_dims(roles))
    piece = ProductPiece(problem, roles, writer, site=site)
    layer = piece.layers[0]
    tensors = list({tensor.name: tensor for tensor in layer_tensors(layer, roles)}.values())
    meanings = [*layer_meanings(layer, roles), *layer_gradient_meanings(layer, roles)]
    side = "into" if site.is_first else "out of"
    half = "attention" if site.is_attention else "feed-forward"
    return parts_of_writer(piece, writer, f"product {side} {half}, {config}", tensors, meanings)


@dataclass
class ProductPiece(LayersPiece):
    """Writes one product forward, and backward the products for its two gradients."""

    site: ProductSite = field(kw_only=True)

    @property
    def layers(self) -> Sequence[LayerPlace]:
        """Return the only layer, which has the product as its only node."""
        return (_site_place(self.problem, self.site, self.roles.is_flat),)

    def _declare(self) -> None:
        """Declare the operand and the weight, the gradient that arrives, and what comes out."""
        at, site, roles = self.layers[0].nodes[0], self.site, self.roles
        own = roles.core(site.is_attention)
        before, after = (roles.residual, own) if site.is_first else (own, roles.residual)
        result = RESULT, self.sides(at.node.makes), after
        operand = OPERAND, self.sides(at.node.takes[0]), before
        kept, sides = site.stored_dims(roles), site.weight_sides
        of_weight = kept if site.stored else roles.gradient(self._used_dims, sides)
        if site.gathers is not None:
            of_weight = site.gradient_terms(roles)
        inputs: tuple[WeightSpec, ...] = (operand, (WEIGHT, sides, kept), (f"D{RESULT}", *result[1:]))
        outputs: tuple[WeightSpec, ...] = (
            result,
            (f"D{OPERAND}", *operand[1:]),
            (f"D{WEIGHT}", sides, of_weight),
        )
        for kind, specs in (("input", inputs), ("output", outputs)):
            self._declare_all(kind, specs)  # type: ignore[arg-type]

    @property
    def _used_dims(self) -> AxisDims:
        return self.roles.weight(self.site.is_first)

    def write_backward(self) -> None:
        """Write the products for both gradients, and the reduction of the weight's gradient over ranks."""
        super().write_backward()
        for landed, out in self._reductions:
            self.writer.move_once(landed, out.dims, "gradients", out)

    def reduce(self, landed: Stored, out: Stored) -> None:
        """Write the reduction of the weight's gradient over ranks, from its partial sums `landed` into `out`.

        Unlike in other pieces, all-reduces are written, too, and not left to the caller.
        """
        super(LayersPiece, self).reduce(landed, out)


# --- attention in a ring ------------------------------------------------------------------------------------


def ring_parts(problem: BlockProblem, config: BlockConfig, roles: Roles, mesh: Mesh) -> BlockParts:
    """Return the forward and the backward program of ring attention alone.

    The layer of the problem must have exactly one attention, and one of the roles must be a ring. Rotary embedding
    is applied if the attention node has it: not with family "gpt" and no `graph`. For layers without a `graph`
    inputs are "qkv0" and "positions", and "da0" backward; outputs are "a0", and "dqkv0" backward.

    Raises:
        UnsupportedError: the config has several chunks, of which the keys cannot be kept.
    """
    writer = ProgramWriter(problem, _alone(config), mesh, batch_dims(roles))
    layer = attention_of(problem)
    tensors = list({tensor.name: tensor for tensor in layer_tensors(layer, roles)}.values())
    meanings = [*layer_meanings(layer, roles), *layer_gradient_meanings(layer, roles)]
    piece = RingPiece(problem, roles, writer)
    return parts_of_writer(piece, writer, f"ring attention, {config}", tensors, meanings)


@dataclass
class RingPiece(LayersPiece):
    """Writes ring attention alone, without the products before and after it."""

    @property
    def layers(self) -> Sequence[LayerPlace]:
        """Return the only layer, which has the attention as its only node."""
        return [attention_of(self.problem)]

    def _declare(self) -> None:
        at, dims = self.layers[0].nodes[0], self.roles.core(True)
        ends = (at.operand, self.sides(at.node.takes[0]), dims), (at.out, self.sides(at.node.makes), dims)
        self._declare_all("input", ends[:1])
        self._declare_all("output", ends[1:])
        self._declare_all("input", [(f"D{at.out}", *ends[1][1:])])
        self._declare_all("output", [(f"D{at.operand}", *ends[0][1:])])
        self._declare_positions()


# --- one move -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MoveSite:
    """A move of a tensor from one layout to another, as a program from input "x" to output "y".

    Attributes:
        sides: the dims of the tensor; the first two are batch and sequence if it has tokens.
        before, after: the layouts, for each mesh axis the dim that it shards; `before` may have "partial".
        op: the reduction of partial values: "sum", "max", "min" or "prod".
    """

    sides: Sides
    before: AxisDims
    after: AxisDims
    op: str = "sum"

    @property
    def is_needed(self) -> bool:
        """Return whether the two layouts differ, so that something has to move."""
        return self.before != self.after

    @property
    def is_sum(self) -> bool:
        """Return whether the move has no communication but all-reduces, or none at all."""
        pairs = zip(self.before, self.after, strict=True)
        return all(x == y or (x == "partial" and not y) for x, y in pairs)


def move_program(site: MoveSite, mesh: Mesh, dtype: str) -> Program:
    """Return the program of a move on `mesh`, with input "x" and output "y" of `dtype`."""
    token_counts = [side.count for side in site.sides if side.dim in TOKENS]
    batch, sequence = (*token_counts, 1, 1)[:2]
    problem = site_problem(batch, sequence, 1, mesh.shape, dtype)
    dims: AxisDims = tuple("batch" if dim == "batch" else "" for dim in site.before)
    writer = ProgramWriter(problem, BlockConfig(), mesh, dims)
    src = writer.new("x", OPERAND, site.sides, site.before, dtype, "input")
    out = writer.new("y", RESULT, site.sides, site.after, dtype, "output")
    if site.is_sum:
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


def _alone(config: BlockConfig) -> BlockConfig:
    """Return a config for the program of one site, which has no other beside it."""
    return replace(config, overlap="layers")
