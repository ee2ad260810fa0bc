"""The partitionings of Slicing Is All You Need: how A, B and C are cut, and how often each is copied.

Section 5.2: all combinations of row block, column block and 2D block with all valid replication factors, and a
"traditional" 2D block in which the tiles of A, B and C are aligned. With c copies, each copy lies on the ranks
c' p/c to (c' + 1) p/c.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import Literal

from meshweave.algorithms.universal import UniversalProblem
from meshweave.algorithms.universal.problem import DIMS, OPERANDS
from meshweave.describe.layout import Layout, Placement, Replicate, Shard, Tile
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.layout.shapes import near_square

BlockKind = Literal["row", "column", "2d"]
BLOCK_KINDS: tuple[BlockKind, ...] = ("row", "column", "2d")


@dataclass(frozen=True)
class Partitioning:
    """How A, B and C are cut.

    Attributes:
        aligned: A and B are cut alike along k, block-cyclically, as SUMMA needs it.
    """

    name: str
    a: BlockKind
    b: BlockKind
    c: BlockKind
    aligned: bool = False


COLUMN = Partitioning("column block", "column", "column", "column")
INNER = Partitioning("inner product", "row", "column", "column")
OUTER = tuple(Partitioning("outer product", "column", "row", cut) for cut in BLOCK_KINDS)
ROW = Partitioning("row block", "row", "row", "row")
BLOCK = Partitioning("2D block", "2d", "2d", "2d")
TRADITIONAL = Partitioning("traditional 2D", "2d", "2d", "2d", aligned=True)

NAMED: dict[str, tuple[Partitioning, ...]] = {
    "column block": (COLUMN,),
    "inner product": (INNER,),
    "outer product": OUTER,
    "row block": (ROW,),
    "2D block": (BLOCK,),
    "traditional 2D": (TRADITIONAL,),
}
"""Those of the figures. The paper does not say how C is cut in an outer product: the fastest cut counts."""


def every_partitioning() -> dict[str, tuple[Partitioning, ...]]:
    """Return the named partitionings, and every other combination of three cuts under the name of its cuts."""
    named = {(known.a, known.b, known.c) for group in NAMED.values() for known in group}
    others = [cuts for cuts in product(BLOCK_KINDS, repeat=3) if cuts not in named]
    return NAMED | {(name := " x ".join((a, b, c))): (Partitioning(name, a, b, c),) for a, b, c in others}


def partitioned_problem(
    partitioning: Partitioning,
    sizes: tuple[int, int, int],
    num_ranks: int,
    copies: tuple[int, int],
    dtype: str = "float32",
) -> UniversalProblem | None:
    """Return the product of `sizes` (m, n, k) with `copies` of A and B, and of C.

    Return None where the partitioning does not allow these copies.
    """
    m, n, k = sizes
    copies_ab, copies_c = copies
    if partitioning.aligned and copies_ab != copies_c:
        return None
    aligned_k = k if partitioning.aligned else 0
    a = _layout("a", partitioning.a, num_ranks, copies_ab, aligned_k)
    b = _layout("b", partitioning.b, num_ranks, copies_ab, aligned_k)
    c = _layout("c", partitioning.c, num_ranks, copies_c, aligned_k)
    return UniversalProblem(m, n, k, a, b, c, dtype)


def _layout(name: str, cut: BlockKind, num_ranks: int, copies: int, aligned_k: int) -> Layout:
    count = num_ranks // copies
    placements: list[Placement]
    if cut == "2d":
        rows, columns = near_square(count)
        shape, axes, placements = [rows, columns], ["row", "col"], [Shard(0), Shard(1)]
        if aligned_k and name != "c":
            tile = -(-aligned_k // math.lcm(rows, columns))
            placements["ab".index(name) ^ 1] = Tile("ab".index(name) ^ 1, tile)
    else:
        shape, axes, placements = [count], ["part"], [Shard(BLOCK_KINDS.index(cut))]
    if copies > 1:
        shape, axes, placements = [copies, *shape], ["copy", *axes], [Replicate(), *placements]
    mesh = Mesh.of("x".join(map(str, shape)) + axes[-1], tuple(shape), tuple(axes))
    return Layout(mesh, tuple(placements))


def local_products(problem: UniversalProblem) -> int:
    """Return how many local products a process has on average in the paper's algorithm.

    There is one for each overlap of a tile of A, a tile of B and a tile of C (section 4.1).
    """
    total = 1
    for dim, size in enumerate(problem.sizes):
        first, second = (
            _parts(problem.layout(operand), DIMS[operand].index(dim), size)
            for operand in OPERANDS
            if dim in DIMS[operand]
        )
        total *= first + second - math.gcd(first, second)
    return max(total // len(problem.ranks), 1)


def _parts(layout: Layout, dim: int, size: int) -> int:
    """Return how many tiles a dim of a matrix is cut into."""
    count = 1
    for placement, ranks in zip(layout.placements, layout.mesh.shape, strict=True):
        if isinstance(placement, Shard) and placement.dim == dim:
            count *= ranks
        elif isinstance(placement, Tile) and placement.dim == dim:
            count *= -(-size // placement.size)
    return count


def divisors(count: int) -> tuple[int, ...]:
    """Return the divisors of a number, smallest first."""
    return tuple(size for size in range(1, count + 1) if count % size == 0)
