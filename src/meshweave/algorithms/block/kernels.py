"""The products and the attention of a layer on a rank, by the roles of a strategy alone: no program is written.

A program computes them one after the other, so that a layer takes at least their sum. Searches rule layers out by
that. Strategies that include 2D products cut each product along the features of its operand.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from meshweave.algorithms.block.halves import halves_of
from meshweave.algorithms.block.problem import BlockProblem
from meshweave.algorithms.block.roles import Roles, Side
from meshweave.algorithms.block.sides import largest_extent
from meshweave.ir.work import Compute, matmul_work


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel of the first rank, which has the largest shards.

    Attributes:
        times: how often it runs.
        part: the part of the layer that it belongs to.
        sliced: of a product, which of its dims m, n and k has the features of the operand; 0 of attention.
    """

    work: Compute
    times: int
    part: Literal["forward", "backward"]
    sliced: int = 0


def kernels_of(problem: BlockProblem, roles: Roles) -> Iterator[Kernel]:
    """Yield the products and the attention of the forward and the backward part of a layer."""
    mesh, dtype = problem.mesh, problem.dtype
    batch, sequence = Side("batch", problem.batch), Side("sequence", problem.sequence)
    hidden = Side("hidden", problem.hidden)
    for half in halves_of(problem, 0):
        for is_first in (True, False):
            operand, weight = roles.operand(is_first), roles.weight(is_first)
            inner = Side("inner", half.units, half.in_unit if is_first else half.out_unit)
            tokens = largest_extent(mesh, batch, operand) * largest_extent(mesh, sequence, operand)
            sizes = [largest_extent(mesh, side, weight) for side in (hidden, inner)]
            k, n = sizes if is_first else reversed(sizes)
            yield Kernel(matmul_work(tokens, n, k, dtype), 1, "forward", 2)
            yield Kernel(matmul_work(tokens, k, n, dtype), 1, "backward", 1)
            yield Kernel(matmul_work(k, n, tokens, dtype), 1, "backward", 0)
        if half.is_attention:
            core = roles.core(True)
            queries = largest_extent(mesh, sequence, core)
            shape = (
                largest_extent(mesh, batch, core),
                largest_extent(mesh, Side("inner", half.units, problem.queries_per_group), core),
                queries,
                problem.priced_keys(queries),
                problem.head_dim,
            )
            turns = 1 if roles.ring_axis is None else mesh.shape[roles.ring_axis]
            for part, name in (("forward", ""), ("backward", "input_grad")):
                work = Compute("call", 0, 1, dtype=dtype, call="attention", shape=shape, part=name)
                yield Kernel(work, turns, part)  # type: ignore[arg-type]
