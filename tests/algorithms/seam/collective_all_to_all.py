"""Collective, with each reduce-scatter as an all-to-all of the terms and local sums: a trial of the contract."""

from __future__ import annotations

from dataclasses import replace

from meshweave.algorithms.matmul2d import Matmul2d, Matmul2dConfig, Matmul2dProblem
from meshweave.algorithms.matmul2d.collective import CollectiveProduct
from meshweave.ir.program import Buffer, Program, Statement
from meshweave.ir.program.expressions import Var, minimum
from meshweave.ir.program.ops import Add, AllToAll, Copy, Op, ReduceScatter
from meshweave.ir.program.statements import rewrite
from meshweave.ir.program.views import Range, View
from meshweave.ir.skeleton import Skeleton


class CollectiveAllToAll(CollectiveProduct):
    """One message between each pair of ranks instead of a ring: fewer steps, and the sums are local."""

    name = "collective_a2a"
    title = "Collective, all-to-all"
    source = "a trial of the contract"

    def program(self, problem: Matmul2dProblem, config: Matmul2dConfig) -> Program:
        base = super().program(problem, config)
        terms: list[Buffer] = []

        def exchange(op: Op) -> tuple[Statement, ...]:
            if not isinstance(op, ReduceScatter):
                return (op,)
            axis = problem.mesh.axes[problem.mesh.axes.index(op.over.rpartition(".")[2])]
            count, size, dim = problem.axis_size(axis), (problem.m, problem.n)[op.dim], op.dim
            part = -(-size // count)
            here, peer = Var(f"tp.{axis}"), Var("peer")
            width = minimum(size, part * here + part) - minimum(size, part * here)
            sent = minimum(size, part * peer + part) - minimum(size, part * peer)
            rows = problem.largest_part(problem.m, "row"), problem.largest_part(problem.n, "col")
            shape = [rows[0], rows[1]]
            shape[dim] = part * count
            terms.append(Buffer("terms", "scratch", "tp", problem.dtype, shape=tuple(shape)))
            ends = [Range(), Range()]
            ends[1 - dim] = Range(0, _extent(problem, 1 - dim))

            def term(first: object, last: object) -> View:
                ends[dim] = Range(first, last)
                return View("terms", tuple(ends))

            everything = term(0, width * count)
            sums = [
                Add(out=op.out, src=term(width * n, width * (n + 1)), lane="compute") for n in range(1, count)
            ]
            return (
                AllToAll(over=op.over, out=everything, src=op.src, lane=op.lane, split_dim=dim, concat_dim=dim,
                         send_sizes=sent, recv_sizes=width),
                Copy(out=op.out, src=term(0, width), lane="compute"),
                *sums,
            )  # fmt: skip

        body = rewrite(base.body, exchange)
        return replace(base, name=self.name, body=body, buffers=(*base.buffers, *terms))

    def skeleton(self, problem: Matmul2dProblem, config: Matmul2dConfig) -> Skeleton:
        return Matmul2d.skeleton(self, problem, config)


def _extent(problem: Matmul2dProblem, dim: int) -> object:
    """Return the local size of a dim of C, an expression of the coordinates."""
    axis, size = ("row", "col")[dim], (problem.m, problem.n)[dim]
    part, here = -(-size // problem.axis_size(axis)), Var(f"tp.{axis}")
    return minimum(size, part * here + part) - minimum(size, part * here)


ENTRY = CollectiveAllToAll()
