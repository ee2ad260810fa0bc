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
    """A dim of `total` elements cut into `count` consecutive parts, part i for position i of a ring of ranks.

    All parts have ceil(total / count) elements but the last ones, which may be smaller: Parts(10, 4) has 3, 3, 3
    and 1. Methods return strings in the language of program texts (`ir.program.parse`); a part's `number`, from 0,
    is an expression of that language, such as "tp.x" or "((tp.x + 1) % 4)".
    """

    total: int
    count: int

    @property
    def size(self) -> int:
        """Return the elements of the largest part, ceil(total / count)."""
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
        """Return the indices of a part as "start:stop": Parts(12, 4).range("tp.x") -> "3 * tp.x:3 * tp.x + 3".

        `number` must be in parentheses unless it is a single number or name.
        """
        start = f"{self.size} * {number}"
        stop = f"{start} + {self.size}"
        return f"{start}:{stop if self.are_equal else f'min({self.total}, {stop})'}"

    def extent(self, number: str) -> str:
        """Return the number of elements of a part as a string: "3", or an expression if parts differ in size.

        `number` must be in parentheses unless it is a single number or name.
        """
        if self.are_equal:
            return str(self.size)
        return f"min({self.total}, {self.size} * {number} + {self.size}) - {self.size} * {number}"

    @property
    def sizes(self) -> str:
        """Return the text ", sizes=..." for the argument list of a collective; "" if all parts are equal.

        It gives the elements of a part as an expression in `peer`, the ring position of the rank that has it.
        """
        return "" if self.are_equal else f", sizes={self.extent('peer')}"


def rank_of(mesh: Mesh, member: str) -> str:
    """Return as program text the global rank at position `member` (from 0) of a mesh.

    `member` is an expression. On ranks 0, 1, 2, ... it is the rank: "(tp.x + 1) % 4" is returned unchanged. On
    ranks (4, 6) it indexes them: "tp.x" -> "(4, 6)[tp.x]".
    """
    if mesh.ranks == tuple(range(mesh.num_ranks)):
        return member
    return f"{mesh.ranks}[{member}]"


@dataclass(frozen=True)
class RingText:
    """What the texts of programs on a ring share: the problem, its parts, and pieces of text."""

    problem: UniversalProblem

    @property
    def count(self) -> int:
        """Return the number of ranks."""
        return len(self.problem.ranks)

    @property
    def rows(self) -> Parts:
        """Return how the rows of C are cut, a part for each rank."""
        return Parts(self.problem.m, self.count)

    def rank(self, member: str) -> str:
        """Return as program text the global rank at position `member` of the ring, as `rank_of` does."""
        return rank_of(self.problem.a.mesh, member)

    def each(self, region: str, count: int) -> str:
        """Return program text that lists `region`, an expression in `s`, for s = 0 .. count - 1.

        each("f(s)", 2) -> "*(f(s) for s in range(2)), ", with the comma; "" if `count` is 0 or less.
        """
        return f"*({region} for s in range({count})), " if count > 0 else ""

    def gather_or_copy(self, reduced: str) -> str:
        """Return as program text the op after a reduce-scatter by rows of C.

        It is an all-gather into C if C is replicated, else a copy into C. `reduced` is the view, as text, of the
        rows that the rank has summed.
        """
        if isinstance(self.problem.c.placements[0], Replicate):
            return f'all_gather(c, {reduced}, over="tp.x", dim=0{self.rows.sizes}, lane=compute)'
        return f"copy(c, {reduced}, lane=compute)"

    def declarations(self, title: str) -> str:
        """Return the first lines of a program text: mesh, tensors, equation, inputs a and b, and output c.

        `title` is the name of the program.
        """
        own = self.problem
        (m, n, k), dtype = own.sizes, own.dtype
        a, b, c = (
            f"tp[{layout.placements[0]}]" + ("" if order is None else f", order={order}")
            for layout, order in zip((own.a, own.b, own.c), own.orders, strict=True)
        )
        mesh = mesh_to_text(replace(own.a.mesh, name="tp", axes=("x",)))
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


class FusedProduct(AnyLayoutProduct[ConfigT]):
    """A product C = A B on a ring of ranks, with the all-gather, reduce-scatter or all-to-all that it needs.

    In a `TiledProduct` communication starts as tiles of C are finished, or tiles of C are started as rows of A
    arrive. An `UntiledProduct`, for comparison, overlaps whole parts, one per rank, or nothing.

    Attributes:
        accepted: the accepted placements of (A, B, C) over the only mesh axis.
        wants: `accepted` in words.
        program_title: the name of the programs.
        cut_dims: which of the dims (m, n, k), as 0, 1, 2, must have at least one element for every rank.
    """

    accepted: ClassVar[tuple[Placements, ...]]
    wants: ClassVar[str]
    program_title: ClassVar[str]
    cut_dims: ClassVar[tuple[int, ...]] = (0,)

    def examples(self) -> Iterator[UniversalProblem]:
        """Yield products on rings of four and three ranks, with parts of unlike sizes and a transposed operand."""
        cases = (((10, 10, 10), 4, None, self.accepted[0]), ((9, 9, 7), 3, (1, 0), self.accepted[-1]))
        for sizes, count, order, placements in cases:
            mesh = Mesh.of("tp", (count,), ("x",))
            a, b, c = (Layout(mesh, (placement,)) for placement in placements)
            yield UniversalProblem(*sizes, a, b, c, orders=(None, order, None))

    def refusal(self, problem: UniversalProblem) -> str | None:
        """Return why the algorithm cannot solve a problem; None if it can.

        It needs `accepted` placements, without folded dims, on one mesh of one axis and two or more ranks, and
        each rank must have at least one element of every dim in `cut_dims`.
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
        """Return the program for all ranks.

        Raises:
            LayoutError: `refusal` has a reason why the problem does not fit.
        """
        refusal = self.refusal(problem)
        if refusal is not None:
            raise LayoutError(f"{self.title}: {refusal}")
        ring = RingText(problem)
        return parse(ring.declarations(self.program_title) + self.text(ring, config))

    @abstractmethod
    def text(self, ring: RingText, config: ConfigT) -> str:
        """Return the program behind its declarations, as text that `ir.program.parse` reads.

        `refusal` of the ring's problem must be None.
        """

    def gradients(self, problem: UniversalProblem) -> tuple[()]:
        """Return (): fused products give no problems of gradients, as `Universal.gradients` does."""
        return ()


@dataclass(frozen=True)
class Tiles:
    """The tiles of C after which a product signals that another piece of its result is there.

    A region is the part of C that a product computes for one rank.

    Attributes:
        rows, columns: elements of a tile along each dim; 0 rows leave both to the machine.
        order: "rows" computes a region's tiles row by row, "columns" column by column, "" as the machine does.
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
        """Return an op's `release` argument as program text; `update` says that the op adds to its output."""
        tile = (self.rows, self.columns) if self.rows else ()
        return value_to_text(Release(tile, self.order, self.first, update))


@dataclass(frozen=True)
class NoChoice:
    """The only config of an algorithm that has nothing to choose."""

    def __str__(self) -> str:
        return "nothing to choose"


class TiledProduct(FusedProduct[Tiles]):
    """A fused product that signals its results tile by tile; a config is the `Tiles`."""

    def candidates(self, problem: UniversalProblem, cluster: Cluster | None = None) -> Iterator[Tiles]:
        """Yield three configs: the machine's own tiles, then small tiles in two orders.

        The second has tiles of at most 2 rows and all columns of a rank's part of C, in order "rows"; the third
        of at most 2 rows and 3 columns, in order "columns", from tile 1 on. `cluster` is ignored.
        """
        rows, columns = (
            Parts(size, len(problem.ranks)).size if dim in self.cut_dims else size
            for dim, size in enumerate(problem.sizes[:2])
        )
        yield Tiles()
        yield Tiles(min(2, rows), columns, "rows")
        yield Tiles(min(2, rows), min(3, columns), "columns", 1)


class UntiledProduct(FusedProduct[NoChoice]):
    """A product that signals nothing before it is finished, to compare the tiled ones with."""

    def candidates(self, problem: UniversalProblem, cluster: Cluster | None = None) -> Iterator[NoChoice]:
        """Yield the only config: there is nothing to choose.

        `cluster` is ignored.
        """
        yield NoChoice()
