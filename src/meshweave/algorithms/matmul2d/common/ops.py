"""The ops that programs of several algorithms have: a local product, and the collective of a matrix that moves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from meshweave.algorithms.matmul2d.common.extents import local_extent
from meshweave.algorithms.matmul2d.common.problem import (
    MESH,
    Dataflow,
    Matmul2dProblem,
    MovingMatrix,
    Placements,
)
from meshweave.ir.program import Buffer, Lane, On, Program, Statement
from meshweave.ir.program.expressions import Index
from meshweave.ir.program.ops import AllGather, Matmul, ReduceScatter
from meshweave.ir.program.views import View


def local_product(dataflow: Dataflow, operand: Mapping[str, View], accumulate: Index) -> Matmul:
    """Return the op that multiplies views of A and B, stored as the dataflow says, into a view of C.

    Args:
        dataflow: "os" (C = A B), "ls" (C = A B^T) or "rs" (C = A^T B).
        operand: the views, by "a", "b" and "c".
        accumulate: 1 to add to C, 0 to overwrite it; it may be an expression.
    """
    return Matmul(
        out=operand["c"],
        a=operand["a"],
        b=operand["b"],
        transpose_a=dataflow == "rs",
        transpose_b=dataflow == "ls",
        accumulate=accumulate,
        lane="compute",
    )


def collective_of(moving: MovingMatrix, whole: View, shard: View, sizes: Index) -> AllGather | ReduceScatter:
    """Return the op that all-gathers, or reduce-scatters, a moving matrix over its mesh axis.

    It is an all-gather from `shard` into `whole` for an input, or a reduce-scatter from `whole` into `shard` for
    an output (`moving.scattered`). The op runs on the lane named after the axis.

    Args:
        whole: the view with all of dim `moving.dim`.
        shard: the view with this rank's part of that dim.
        sizes: the length of that part on member `peer` of the axis, as an expression in `peer`.
    """
    kind: type[AllGather | ReduceScatter] = ReduceScatter if moving.scattered else AllGather
    verb, out, src = ("scatter", shard, whole) if moving.scattered else ("gather", whole, shard)
    return kind(
        over=f"{MESH}.{moving.axis}",
        out=out,
        src=src,
        dim=moving.dim,
        sizes=sizes,
        lane=moving.axis,
        name=f"{verb}_{moving.operand}",
    )


def moving_scratch(
    problem: Matmul2dProblem,
    placements: Placements,
    moving: MovingMatrix,
    name: str,
    along: int,
    slots: int = 1,
    *,
    is_outermost: bool = True,
) -> Buffer:
    """Return the declaration of scratch for `along` elements of the dim of a matrix that moves.

    Of the other dim it has what lies on the rank.

    Args:
        placements: for each of "a", "b" and "c" one placement per mesh axis.
        slots: the number of copies.
        is_outermost: whether the dim that moves is the outer one in memory, so that its parts are contiguous.
    """
    across = local_extent(problem, placements, moving.operand, 1 - moving.dim)
    shape = (across, along) if moving.dim == 1 else (along, across)
    order = (1, 0) if moving.dim == 1 and is_outermost else None
    return Buffer(name, "scratch", MESH, problem.dtype, shape=shape, slots=slots, order=order)


def with_ops(
    declared: Program, buffers: Iterable[Buffer], lanes: Iterable[str], body: Iterable[Statement]
) -> Program:
    """Return the program `declared` with `buffers` added, and with `body` as its statements.

    Args:
        declared: a program without statements, as `Matmul2dProblem.declarations` returns it.
        lanes: the names of the lanes that the ops use.
    """
    return replace(
        declared,
        buffers=(*declared.buffers, *buffers),
        lanes=tuple(map(Lane, lanes)),
        body=(On(MESH, tuple(body)),),
    )
