"""The programs of T3's study: sliced products as problems of the entries of `algorithms.fused`."""

from __future__ import annotations

from dataclasses import dataclass

from meshweave.algorithms.fused import NoChoice, RingReduceScatter, SequentialReduceScatter, Tiles
from meshweave.algorithms.fused.product import RingText
from meshweave.algorithms.universal.problem import UniversalProblem
from meshweave.base.errors import LayoutError
from meshweave.describe.layout import Layout, Replicate, Shard
from meshweave.describe.layout.mesh import Mesh
from meshweave.ir.program import Program
from meshweave.ir.program.parse import parse
from meshweave.ir.program.release import TileOrder


@dataclass(frozen=True)
class SlicedProduct:
    """C (rows, columns) = the sum over ranks of A (rows, depth) B (depth, columns), C on all ranks.

    Attributes:
        rows, columns: of C; each rank owns `rows / ranks` rows after the reduce-scatter.
        depth: the slice of the inner dimension that one rank has.
        ranks: the number of ranks of the ring, two or more; it divides the rows.
        transpose_a, transpose_b: whether the operand lies in memory transposed.

    Raises:
        LayoutError: the rows do not divide over the ranks, or there is one rank only.
    """

    rows: int
    columns: int
    depth: int
    ranks: int
    transpose_a: bool = False
    transpose_b: bool = True
    dtype: str = "float16"

    def __post_init__(self) -> None:
        if self.ranks < 2 or self.rows % self.ranks:
            raise LayoutError(
                f"a ring of {self.ranks} ranks over {self.rows} rows; give 2 ranks or more that divide the rows"
            )

    @property
    def problem(self) -> UniversalProblem:
        """Return it as a `UniversalProblem`, which the algorithms of `algorithms.fused` solve."""
        mesh = Mesh.of("tp", (self.ranks,), ("x",))
        a, b, c = (Layout(mesh, (placement,)) for placement in (Shard(1), Shard(0), Replicate()))
        a_order, b_order = (
            (1, 0) if transposed else None for transposed in (self.transpose_a, self.transpose_b)
        )
        depth = self.depth * self.ranks
        return UniversalProblem(
            self.rows, self.columns, depth, a, b, c, self.dtype, orders=(a_order, b_order, None)
        )


def sequential_program(product: SlicedProduct) -> Program:
    """Return the product, then its reduce-scatter, then the all-gather, each after the other."""
    return SequentialReduceScatter().program(product.problem, NoChoice())


def overlapped_program(product: SlicedProduct, order: TileOrder = "") -> Program:
    """Return T3's product, which reduce-scatters itself by tiles of the machine, and the all-gather behind it."""
    return RingReduceScatter().program(product.problem, Tiles(order=order))


def fused_alone_program(product: SlicedProduct, order: TileOrder = "") -> Program:
    """Return the product with T3's tiles and updates near its own memory, and no communication.

    It reads and stores as T3's does, past the cache, so that what it gains or loses over the product alone is
    the cache's relief and the cost of updates; what T3 loses beside it is contention.
    """
    ring, ranks = RingText(product.problem), product.ranks
    release = Tiles(order=order).release(update=True)
    first, passed, own = (
        f"local(acc[{rows}, :], a=a[{rows}, :])"
        for rows in map(
            ring.rows.range,
            (f"((tp.x + {ranks - 1}) % {ranks})", f"((tp.x + {ranks - 2} - s) % {ranks})", "tp.x"),
        )
    )
    return parse(f"""{ring.declarations("T3's product without communication")}\
acc = scratch(({product.rows}, {product.columns}), "{product.dtype}", on=tp)
compute = lane()
with tp:
    zero(acc, lane=compute)
    product(a, b, ({first}, {ring.each(passed, ranks - 2)}{own}), release={release}, lane=compute)
""")


def reduce_scatter_program(product: SlicedProduct) -> Program:
    """Return the reduce-scatter of C alone."""
    part = product.rows // product.ranks
    return parse(f"""program("reduce-scatter around a ring")
tp = mesh(({product.ranks},), ("x",))
acc = scratch(({product.rows}, {product.columns}), "{product.dtype}", on=tp)
part = scratch(({part}, {product.columns}), "{product.dtype}", on=tp)
compute = lane()
with tp:
    zero(acc, lane=compute)
    reduce_scatter(part, acc, over="tp.x", dim=0, lane=compute)
""")
