"""The rings of a product on a mesh of any number of axes: each is a problem of fused entries on its own ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from meshweave.algorithms.fused.product import GATHERS, SUMS, Parts, Placements
from meshweave.algorithms.universal.problem import DIMS, OPERANDS, Operand, UniversalProblem
from meshweave.describe.layout import Layout, Partial, Shard
from meshweave.describe.layout.mesh import Mesh

Indices = dict[tuple[int, Operand], tuple[NDArray[np.int64], ...]]
"""By rank and operand, which rows and columns of the global matrix the rank holds, in its order."""


@dataclass(frozen=True)
class _Axis:
    """A mesh axis along which the operands lie as a fused entry takes them."""

    problem: UniversalProblem
    number: int
    placements: Placements

    def rings(self) -> Iterator[UniversalProblem | None]:
        """Yield the product of each ring along the axis; None for a ring whose parts no fused entry takes."""
        mesh = self.problem.a.mesh
        array = np.array(mesh.ranks).reshape(mesh.shape)
        for ranks in np.moveaxis(array, self.number, -1).reshape(-1, mesh.shape[self.number]).tolist():
            yield self._ring(tuple(ranks))

    def _ring(self, ranks: tuple[int, ...]) -> UniversalProblem | None:
        own = self.problem
        indices = {
            (rank, name): own.layout(name).indices(own.shape(name), rank)
            for rank in ranks
            for name in OPERANDS
        }
        sizes = [self._size(indices, ranks, dim) for dim in range(3)]
        if None in sizes or sizes[2] != own.k:  # else the ring would lack terms of the sum
            return None
        m, n, k = (int(size or 0) for size in sizes)
        mesh = Mesh("tp", (len(ranks),), ("x",), ranks)
        a, b, c = (Layout(mesh, (placement,)) for placement in self.placements)
        return UniversalProblem(m, n, k, a, b, c, own.dtype, own.orders)

    def _size(self, indices: Indices, ranks: Sequence[int], dim: int) -> int | None:
        """Return the size of a dim of (m, n, k) on a ring; None where it is not cut as entries cut it."""
        whole: list[NDArray[np.int64]] = []
        parts: list[list[NDArray[np.int64]]] = []
        for name, placement in zip(OPERANDS, self.placements, strict=True):
            for side, of in enumerate(DIMS[name]):
                if of != dim:
                    continue
                held = [indices[rank, name][side] for rank in ranks]
                if placement == Shard(side):
                    parts.append(held)
                else:
                    whole += held
        if parts:
            whole.append(np.concatenate(parts[0]))
            size = Parts(len(whole[-1]), len(ranks)).size
            if any(len(part) != size for part in parts[0][:-1]) or len(parts[0][-1]) > size:
                return None
        all_equal = all(np.array_equal(one, whole[0]) for one in whole[1:])
        if not all_equal or any(
            not np.array_equal(one, other)
            for held in parts[1:]
            for one, other in zip(parts[0], held, strict=True)
        ):
            return None
        return len(whole[0])


@lru_cache(maxsize=512)
def ring_problems(problem: UniversalProblem) -> tuple[UniversalProblem, ...]:
    """Return the independent smaller products, one per ring of ranks, that make up a product; () if none do.

    The rings are the lines of ranks along one mesh axis: the first along which the product reduce-scatters C or
    all-gathers A. Each smaller product has a mesh of one axis with a ring's ranks in order. Along the other axes
    the rows of A and C, the columns of B and C, or nothing may be sharded. () is returned if there is no such
    axis, or if a dim is not cut as fused products cut it (into equal parts, of which the last may be smaller).
    """
    mesh = problem.a.mesh
    layouts = problem.a, problem.b, problem.c
    if any(layout.mesh != mesh for layout in layouts):
        return ()
    for number, size in enumerate(mesh.shape):
        others = (p for layout in layouts for i, p in enumerate(layout.placements) if i != number)
        if size < 2 or any(isinstance(placement, Partial) for placement in others):
            continue
        plain = tuple(_of_matrix(layout, number) for layout in layouts)
        if plain not in (*SUMS, *GATHERS):
            continue
        rings = tuple(_Axis(problem, number, plain).rings())
        if None not in rings:
            return rings  # type: ignore[return-value]
    return ()


def _of_matrix(layout: Layout, number: int) -> object:
    """Return the placement along an axis as that of a matrix: dims that are folded into rows are its rows."""
    placement = layout.placements[number]
    if not isinstance(placement, Shard) or layout.folds is None:
        return placement
    rows, _ = layout.folds
    return Shard(0 if placement.dim < len(rows) else 1)
