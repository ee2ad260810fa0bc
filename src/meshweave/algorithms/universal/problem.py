"""What the universal product is given: two operands and a result, each in a layout of its own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from meshweave.base.errors import LayoutError, did_you_mean
from meshweave.base.units import DTYPES
from meshweave.describe.layout import Layout

Operand = Literal["a", "b", "c"]
OPERANDS: tuple[Operand, ...] = ("a", "b", "c")

DIMS: dict[Operand, tuple[int, int]] = {"a": (0, 2), "b": (2, 1), "c": (0, 1)}
"""Which of (m, n, k) the rows and columns of each matrix run over."""

LOOP: dict[Operand, int] = {"a": 1, "b": 0, "c": 2}
"""The dim of (m, n, k) that a matrix does not have: where it is stationary, its holder runs over that one."""


@dataclass(frozen=True)
class UniversalProblem:
    """C (M, N) = A (M, K) B (K, N), where each matrix lies on the same ranks in a layout of its own.

    The layouts may be on meshes of different shapes. `orders` gives the dims of A, B, C from outermost to
    innermost in memory (None: as written), so that a transposed operand is one that lies the other way round.

    Raises LayoutError for layouts that are not of the same ranks, for sizes or placements that do not fit, and for
    partial sums by anything but "sum".
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
        if min(self.m, self.n, self.k) < 0:
            raise LayoutError(f"M, N, K = {self.m}, {self.n}, {self.k} must not be negative")
        if self.dtype not in DTYPES:
            raise LayoutError(f"unknown dtype '{self.dtype}'{did_you_mean(self.dtype, DTYPES)}")
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
        """The global ranks, ascending."""
        return tuple(sorted(self.a.mesh.ranks))

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.m, self.n, self.k

    def layout(self, operand: Operand) -> Layout:
        return {"a": self.a, "b": self.b, "c": self.c}[operand]

    def shape(self, operand: Operand) -> tuple[int, int]:
        """Global shape of a matrix."""
        rows, columns = DIMS[operand]
        return self.sizes[rows], self.sizes[columns]
