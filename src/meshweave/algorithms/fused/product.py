"""What the entries of fused products share: the layouts they take, and the declarations of their programs.

All ranks of the problem's mesh, whatever their numbers, stand in one ring, the mesh axis `tp.x` of the program. A
dim that is sharded is cut into parts of equal size, the last of which may be smaller; part number i belongs to
member i of the ring. `rings.ring_problems` finds the rings of a product on a mesh of several axes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from meshweave.algorithms.contract import ConfigT
from meshweave.algorithms.universal.algorithm import AnyLayoutProduct
from meshweave.algorithms.universal.problem import UniversalProblem
from meshweave.base.errors import LayoutError
from meshweave.describe.layout import Layout, Placement, Replicate, Shard
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.machine.cluster import Cluster
from meshweave.ir.program import Program
from meshweave.ir.program.parse import parse
from meshweave.ir.program.release import Release, TileOrder
from meshweave.ir.program.text import mesh_to_text, value_to_text

Placements = tuple[Placement, Placement, Placement]
"""Of A, B and C over the one mesh axis."""

GATHERS: tuple[Placements, ...] = ((Shard(0), Shard(1), Shard(1)),)
"""Each rank needs all rows of A for its columns of C."""

SUMS: tuple[Placements, ...] = tuple((Shard(1), Shard(0), c) for c in (Shard(0), Replicate()))
"""Each rank has a term of all of C; the sum is scattered by rows, and gathered again where C is replicated."""


@dataclass(frozen=True)
class Parts:
    """The parts of a dim of `total` elements over `count` ranks, as expressions of the text form."""

    total: int
    count: int

    @property
    def size(self) -> int:
        """Return the size of the largest parts: of all but the last, unless some are empty."""
        return -(-self.total // self.count)

    @property
    def are_equal(self) -> bool:
        """Return whether all parts have the same size."""
        return self.total % self.count == 0

    @property
    def has_empty(self) -> bool:
        """Return whether the last part has no elements."""
        return self.size * (self.count - 1) >= self.total

    def range(self, number: str) -> str:
        """Return the range "start:stop" of part `number` in the dim, as an expression.

        `number` is an expression from 0, in parentheses unless it is a single number or name.
        """
        start = f"{self.size} * {number}"
        stop = f"{start} + {self.size}"
        return f"{start}:{stop if self.are_equal else f'min({self.total}, {stop})'}"

    def extent(self, number: str) -> str:
        """Return the elements of part `number`, as an expression.

        `number` is an expression from 0, in parentheses unless it is a single number or name.
        """
        if self.are_equal:
            return str(self.size)
        return f"min({self.total}, {self.size} * {number} + {self.size}) - {self.size} * {number}"

    @property
    def sizes(self) -> str:
        """Return the argument `sizes` of a collective, with a leading comma; "" if all parts are equal.

        It is an expression of `peer`, the position of a member of the collective.
        """
        return "" if self.are_equal else f", sizes={self.extent('peer')}"


class FusedProduct(AnyLayoutProduct[ConfigT]):
    """A product on a ring of ranks, with the all-gather, reduce-scatter or all-to-all that it needs.

    Its communication starts as tiles of it are finished, or it starts as tiles arrive; the rivals that it is
    compared with overlap whole parts, or nothing.

    Attributes:
        accepted: the placements of A, B and C, over one mesh axis, that it takes.
        wants: `accepted` in words.
        cut_dims: the dims of m, n, k (0, 1, 2) that must have at least one element for each rank's part.
    """

    accepted: ClassVar[tuple[Placements, ...]]
    wants: ClassVar[str]
    cut_dims: ClassVar[tuple[int, ...]] = (0,)

    def examples(self) -> Iterator[UniversalProblem]:
        """Yield products on rings of four and three ranks, with parts of unlike sizes and a transposed operand."""
        cases = (((10, 10, 10), 4, None, self.accepted[0]), ((9, 9, 7), 3, (1, 0), self.accepted[-1]))
        for sizes, count, order, placements in cases:
            mesh = Mesh.of("tp", (count,), ("x",))
            a, b, c = (Layout(mesh, (placement,)) for placement in placements)
            yield UniversalProblem(*sizes, a, b, c, orders=(None, order, None))

    def refusal(self, problem: UniversalProblem) -> str | None:
        """Return why a problem does not fit; None if it fits.

        Reasons are layouts that are not `accepted` or have folds, a mesh of several axes or of one rank, and a
        dim of `cut_dims` of which some rank would have no element.
        """
        mesh = problem.a.mesh
        layouts = (problem.a, problem.b, problem.c)
        on_ring = all(
            layout.mesh == mesh and len(layout.placements) == 1 and layout.folds is None for layout in layouts
        )
        placements = tuple(layout.placements[0] for layout in layouts) if on_ring else ()
        if placements not in self.accepted or len(mesh.ranks) < 2:
            return f"it takes {self.wants}, without folds, on a mesh of one axis and two ranks or more"
        for dim in self.cut_dims:
            if Parts(problem.sizes[dim], len(mesh.ranks)).has_empty:
                what = ("rows", "columns")[dim]
                return f"{problem.sizes[dim]} {what} of C leave some of {len(mesh.ranks)} ranks without any"
        return None

    def program(self, problem: UniversalProblem, config: ConfigT) -> Program:
        """Return the program. Raises LayoutError where `refusal` has a reason."""
        refusal = self.refusal(problem)
        if refusal is not None:
            raise LayoutError(f"{self.title}: {refusal}")
        return parse(self.text(problem, config))

    @abstractmethod
    def text(self, problem: UniversalProblem, config: ConfigT) -> str:
        """Return the program for a problem that `refusal` accepts, in the text form that `parse` reads."""

    def gradients(self, problem: UniversalProblem) -> tuple[()]:
        """Return (): fused products declare no gradients; `Universal.gradients` has the problems."""
        return ()


@dataclass(frozen=True)
class Tiles:
    """The tiles in which products signal finished parts of their results.

    Attributes:
        rows, columns: elements of a tile; 0 rows leave both to the machine.
        order: tiles one after another along the "rows", or down the "columns". "" leaves it to the machine.
        first: number of the tile, in that order, with which each region begins; those before it come last.
    """

    rows: int = 0
    columns: int = 0
    order: TileOrder = ""
    first: int = 0

    def __str__(self) -> str:
        size = f"tiles of {self.rows} x {self.columns}" if self.rows else "tiles of the machine"
        return (
            size + (f" by {self.order}" if self.order else "") + (f" from {self.first}" if self.first else "")
        )

    def release(self, update: bool) -> str:
        """Return the `release` argument of an op in the text form; with `update` the op adds to its output."""
        tile = (self.rows, self.columns) if self.rows else ()
        return value_to_text(Release(tile, self.order, self.first, update))


@dataclass(frozen=True)
class NoChoice:
    """The only config of an algorithm that leaves nothing open."""

    def __str__(self) -> str:
        return "nothing to choose"


class TiledProduct(FusedProduct[Tiles]):
    """A fused product that signals its results tile by tile."""

    def candidates(self, problem: UniversalProblem, cluster: Cluster | None = None) -> Iterator[Tiles]:
        """Yield three configs: the machine's own tiles, then small tiles in two orders.

        The second has tiles of at most 2 rows and the full width of a part, by rows; the third of at most 2 rows
        and 3 columns, by columns, from tile 1 on. `cluster` is ignored.
        """
        rows, columns = (
            Parts(size, len(problem.ranks)).size if dim in self.cut_dims else size
            for dim, size in enumerate(problem.sizes[:2])
        )
        yield Tiles()
        yield Tiles(min(2, rows), columns, "rows")
        yield Tiles(min(2, rows), min(3, columns), "columns", 1)


class UntiledProduct(FusedProduct[NoChoice]):
    """A product of the fused family that signals nothing before it is finished: a rival or baseline."""

    def candidates(self, problem: UniversalProblem, cluster: Cluster | None = None) -> Iterator[NoChoice]:
        """Yield the only config: there is nothing to choose."""
        yield NoChoice()


def rank_of(mesh: Mesh, member: str) -> str:
    """Return, as text, the global rank of a member of a mesh; `member` is an expression from 0 to ranks - 1."""
    if mesh.ranks == tuple(range(mesh.num_ranks)):
        return member
    return f"{mesh.ranks}[{member}]"


def each_region(region: str, count: int) -> str:
    """Return as text the argument that lists `region`, an expression in `s`, for s = 0 .. count - 1.

    It ends in a comma; it is "" if there are none.
    """
    return f"*({region} for s in range({count})), " if count > 0 else ""


def gather_or_copy(problem: UniversalProblem, parts: Parts, reduced: str) -> str:
    """Return as text the op after a reduce-scatter: an all-gather into C if C is replicated, else a copy to C.

    `reduced` is the view, as text, of the rank's reduced rows; `parts` are the parts of the rows of C.
    """
    if isinstance(problem.c.placements[0], Replicate):
        return f'all_gather(c, {reduced}, over="tp.x", dim=0{parts.sizes}, lane=compute)'
    return f"copy(c, {reduced}, lane=compute)"


def declarations(problem: UniversalProblem, title: str) -> str:
    """Return the head of a program in the text form: mesh, tensors, equation, inputs and output."""
    (m, n, k), dtype = problem.sizes, problem.dtype
    a, b, c = (
        f"tp[{layout.placements[0]}]" + ("" if order is None else f", order={order}")
        for layout, order in zip((problem.a, problem.b, problem.c), problem.orders, strict=True)
    )
    mesh = mesh_to_text(replace(problem.a.mesh, name="tp", axes=("x",)))
    return f"""program("{title}")
tp = {mesh}
A = tensor(({m}, {k}), "{dtype}")
B = tensor(({k}, {n}), "{dtype}")
C = tensor(({m}, {n}), "{dtype}")
computes(C, product(A, B))
a = input(A, {a})
b = input(B, {b})
c = output(C, {c})
"""
