"""Sizes of shards: as expressions for program templates, and the largest for skeletons."""

from __future__ import annotations

from meshweave.algorithms.matmul2d.common.problem import MESH, Matmul2dProblem, Placements
from meshweave.describe.layout import Shard
from meshweave.ir.program.expressions import Index, Var, minimum
from meshweave.ir.skeleton import Task
from meshweave.ir.work import matmul_work


def chunk_extent(size: Index, parts: int, at: Index) -> Index:
    """Return the elements of chunk `at` of `size` elements cut into `parts` by DTensor's chunk rule.

    It is an expression where `size` or `at` is one.
    """
    if parts == 1:
        return size
    if isinstance(size, int) and size % parts == 0:
        return size // parts
    each = (size + (parts - 1)) // parts
    return minimum((at + 1) * each, size) - minimum(at * each, size)


def local_extent(problem: Matmul2dProblem, placements: Placements, operand: str, dim: int) -> Index:
    """Return the elements of dim `dim` of an operand's shard, as an expression in the mesh coordinates.

    `operand` is "a", "b" or "c", `dim` a dim of it as stored, `placements` one placement per mesh axis for each.
    """
    size: Index = problem.stored_shape(operand)[dim]
    for axis, placement in zip(problem.mesh.axes, placements[operand], strict=True):
        if placement == Shard(dim):
            size = chunk_extent(size, problem.axis_size(axis), Var(f"{MESH}.{axis}"))
    return size


def largest_extent(problem: Matmul2dProblem, placements: Placements, operand: str, dim: int) -> int:
    """Return the elements of dim `dim` of an operand's largest shard, which by the chunk rule is the first.

    The arguments are as for `local_extent`: `operand` is "a", "b" or "c", `dim` a dim of it as stored.
    """
    size = problem.stored_shape(operand)[dim]
    for parts, placement in zip(problem.mesh_shape, placements[operand], strict=True):
        if isinstance(placement, Shard) and placement.dim == dim:
            size = -(-size // parts)
    return size


def product_task(problem: Matmul2dProblem, placements: Placements, width: int) -> Task:
    """Return the task of a product of the largest stationary shard with `width` elements of the sliced dim."""
    first, second = (largest_extent(problem, placements, problem.stationary, dim) for dim in (0, 1))
    dims = {"os": (first, second, width), "ls": (first, width, second), "rs": (width, second, first)}
    return Task("matmul", "compute", matmul_work(*dims[problem.dataflow], problem.dtype))
