"""Sizes of shards: as expressions for program templates, and the largest for skeletons."""

from __future__ import annotations

from meshweave.algorithms.matmul2d.common.problem import MESH, Matmul2dProblem, Placements
from meshweave.describe.layout import Shard
from meshweave.ir.program.expressions import Index, Var, minimum
from meshweave.ir.skeleton import Task
from meshweave.ir.work import matmul_work


def chunk_extent(size: Index, parts: int, at: Index) -> Index:
    """Return how many of `size` elements are in chunk number `at` of `parts`, by DTensor's chunk rule.

    Chunks have ceil(size / parts) elements, but for the last ones: (10, 4, 3) -> 1. The result may be an
    expression if `size` or `at` is one.
    """
    if parts == 1:
        return size
    if isinstance(size, int) and size % parts == 0:
        return size // parts
    each = (size + (parts - 1)) // parts
    return minimum((at + 1) * each, size) - minimum(at * each, size)


def local_extent(problem: Matmul2dProblem, placements: Placements, operand: str, dim: int) -> Index:
    """Return a rank's number of rows (`dim` 0) or columns (`dim` 1) of an operand, as stored.

    It is an integer, or an expression in the mesh coordinates where shards differ in size.

    Args:
        placements: for each of "a", "b" and "c" one placement per mesh axis.
        operand: "a", "b" or "c".
        dim: 0 or 1, of the operand as stored.
    """
    size: Index = problem.stored_shape(operand)[dim]
    for axis, placement in zip(problem.mesh.axes, placements[operand], strict=True):
        if placement == Shard(dim):
            size = chunk_extent(size, problem.axis_size(axis), Var(f"{MESH}.{axis}"))
    return size


def largest_extent(problem: Matmul2dProblem, placements: Placements, operand: str, dim: int) -> int:
    """Return the number of rows (`dim` 0) or columns (`dim` 1) of the largest shard of an operand, as stored.

    Arguments are those of `local_extent`. By DTensor's chunk rule the largest shard is that of the first rank.
    """
    size = problem.stored_shape(operand)[dim]
    for parts, placement in zip(problem.mesh_shape, placements[operand], strict=True):
        if isinstance(placement, Shard) and placement.dim == dim:
            size = -(-size // parts)
    return size


def product_task(problem: Matmul2dProblem, placements: Placements, width: int) -> Task:
    """Return the skeleton's task, in lane "compute", of one local product on the rank with the largest shards.

    It has the rank's whole shard of the stationary matrix and `width` elements of the sliced dim.
    """
    first, second = (largest_extent(problem, placements, problem.stationary, dim) for dim in (0, 1))
    dims = {"os": (first, second, width), "ls": (first, width, second), "rs": (width, second, first)}
    return Task("matmul", "compute", matmul_work(*dims[problem.dataflow], problem.dtype))
