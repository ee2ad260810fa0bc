"""The baseline of products of gathered operands: an all-gather of A, then the product."""

from __future__ import annotations

from meshweave.algorithms.fused.product import GATHERS, NoChoice, Parts, UntiledProduct, declarations
from meshweave.algorithms.universal.problem import UniversalProblem


class SequentialAllGather(UntiledProduct):
    """An all-gather of the rows of A and the product of all of them, with no overlap."""

    name = "sequential_all_gather"
    title = "Sequential all-gather"
    source = (
        "Korthikanti et al., Reducing activation recomputation in large transformer models, section 4.2.2"
    )
    accepted = GATHERS
    wants = "A sharded by rows, B and C by columns"

    def text(self, problem: UniversalProblem, config: NoChoice) -> str:
        """Return the program as text that `ir.program.parse` reads; `refusal(problem)` must be None."""
        m, _, k = problem.sizes
        parts = Parts(m, len(problem.ranks))
        return f"""{declarations(problem, "an all-gather and a product")}\
gathered = scratch(({m}, {k}), "{problem.dtype}", on=tp)
compute = lane()
with tp:
    all_gather(gathered, a, over="tp.x", dim=0{parts.sizes}, lane=compute)
    matmul(c, gathered, b, lane=compute)
"""
