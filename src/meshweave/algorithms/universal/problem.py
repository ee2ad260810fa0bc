"""The problem that the universal product solves: two operands and a result, each in a layout of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from meshweave.base.errors import LayoutError, require_known, require_whole
from meshweave.base.units import DTYPES
from meshweave.describe.layout import Layout, Placement, Shard, StridedShard, Tile

Operand = Literal["a", "b", "c"]
OPERANDS: tuple[Operand, ...] = ("a", "b", "c")

DIMS: dict[Operand, tuple[int, int]] = {"a": (0, 2), "b": (2, 1), "c": (0, 1)}
"""Which of (m, n, k) the rows and the columns of each matrix are."""

LOOP: dict[Operand, int] = {"a": 1, "b": 0, "c": 2}
"""The dim of (m, n, k) that a matrix does not have. Where it is stationary, its holders loop over that dim."""


@dataclass(frozen=True)
class UniversalProblem:
    """C (M, N) = A (M, K) B (K, N), where each matrix has a layout of its own over the same ranks.

    Raises LayoutError for layouts over different ranks, for sizes or placements that do not fit, for partial
    placements by anything but "sum", and for an unknown dtype.

    Attributes:
        m, n, k: global sizes M, N and K, in elements.
        a, b, c: the layouts of A, B and C, which may be on meshes of different shapes.
        dtype: of all three matrices.
        orders: for A, B and C the dims from outermost to innermost in memory: (1, 0) for column-major, None for
            row-major.
    """

    m: int
    n: int
    k: int
    a: Layout
    b: Layout
    c: Layout
    dtype: str = "float32"
    orders: tuple[tuple[int, int] | None, tuple[int, int] | None, tuple[int, int] | None] = (None, None, None)

    def __post_init__(self) -> None:
        for name in ("m", "n", "k"):
            object.__setattr__(self, name, require_whole(getattr(self, name), name.upper(), LayoutError))
        if min(self.m, self.n, self.k) < 0:
            raise LayoutError(f"M, N, K = {self.m}, {self.n}, {self.k} must not be negative")
        require_known(self.dtype, DTYPES, "unknown dtype", LayoutError)
        ranks = set(self.a.mesh.ranks)
        for operand in OPERANDS:
            layout = self.layout(operand)
            if set(layout.mesh.ranks) != ranks:
                raise LayoutError(
                    f"{operand.upper()} is on ranks {sorted(layout.mesh.ranks)}, A on {sorted(ranks)}: "
                    "all three must be on the same ranks"
                )
            for placement in layout.placements:
                if getattr(placement, "op", "sum") != "sum":
                    raise LayoutError(f"{operand.upper()} is {layout}: only sums can be partial in a product")
            layout.local_shape(self.shape(operand), layout.mesh.ranks[0])

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Return the global numbers of all ranks, ascending."""
        return tuple(sorted(self.a.mesh.ranks))

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Return the global sizes (M, N, K), in elements."""
        return self.m, self.n, self.k

    def layout(self, operand: Operand) -> Layout:
        """Return the layout of matrix "a", "b" or "c"."""
        return {"a": self.a, "b": self.b, "c": self.c}[operand]

    def shape(self, operand: Operand) -> tuple[int, int]:
        """Return the global shape (rows, columns) of matrix "a", "b" or "c", in elements."""
        rows, columns = DIMS[operand]
        return self.sizes[rows], self.sizes[columns]


def transposed_layout(layout: Layout) -> Layout:
    """Return the layout of a matrix's transpose: its rows are sharded as the columns were, and vice versa."""
    rows, columns = ((0,), (0,)) if layout.folds is None else layout.folds
    num_rows, num_columns = len(rows), len(columns)

    def swap(placement: Placement) -> Placement:
        if not isinstance(placement, (Shard, StridedShard, Tile)):
            return placement
        dim = placement.dim
        return replace(placement, dim=dim + num_columns if dim < num_rows else dim - num_rows)

    folds = None if layout.folds is None else (columns, rows)
    return replace(layout, placements=tuple(map(swap, layout.placements)), folds=folds)
