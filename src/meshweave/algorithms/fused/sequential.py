"""The baseline of fused products: a product, then a reduce-scatter, then an all-gather, one after another."""

from __future__ import annotations

from meshweave.algorithms.fused.product import SUMS, NoChoice, Parts, UntiledProduct, declarations
from meshweave.algorithms.universal.problem import UniversalProblem
from meshweave.describe.layout import Replicate


class SequentialReduceScatter(UntiledProduct):
    """A product whose sum over ranks is reduce-scattered, and gathered where C is replicated, with no overlap."""

    name = "t3_sequential"
    title = "Sequential reduce-scatter"
    source = "Pati et al., T3, ASPLOS '24, section 5.3"
    accepted = SUMS
    wants = "A sharded by columns, B by rows, C by rows or replicated"

    def text(self, problem: UniversalProblem, config: NoChoice) -> str:
        """Return the program as text that `ir.program.parse` reads; `refusal(problem)` must be None."""
        m, n, _ = problem.sizes
        parts = Parts(m, len(problem.ranks))
        gathers = isinstance(problem.c.placements[0], Replicate)
        part = f'part = scratch(({parts.extent("tp.x")}, {n}), "{problem.dtype}", on=tp)\n' if gathers else ""
        gather = (
            f'\n    all_gather(c, part, over="tp.x", dim=0{parts.sizes}, lane=compute)' if gathers else ""
        )
        out = "part" if gathers else "c"
        return f"""{declarations(problem, "a product, a reduce-scatter and an all-gather")}\
acc = scratch(({m}, {n}), "{problem.dtype}", on=tp)
{part}\
compute = lane()
with tp:
    matmul(acc, a, b, lane=compute)
    reduce_scatter({out}, acc, over="tp.x", dim=0{parts.sizes}, lane=compute){gather}
"""
