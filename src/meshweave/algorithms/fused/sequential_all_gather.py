"""The baseline of products of gathered operands: an all-gather of A, then the product."""

from __future__ import annotations

from meshweave.algorithms.fused.product import GATHERS, NoChoice, RingText, UntiledProduct


class SequentialAllGather(UntiledProduct):
    """An all-gather of the rows of A and the product of all of them, with no overlap."""

    name = "sequential_all_gather"
    title = "Sequential all-gather"
    source = (
        "Korthikanti et al., Reducing activation recomputation in large transformer models, section 4.2.2"
    )
    accepted = GATHERS
    wants = "A sharded by rows, B and C by columns"
    program_title = "an all-gather and a product"

    def text(self, ring: RingText, config: NoChoice) -> str:
        """Return the program behind its declarations; `refusal` of its problem must be None."""
        return f"""\
gathered = scratch(({ring.problem.m}, {ring.problem.k}), "{ring.problem.dtype}", on=tp)
compute = lane()
with tp:
    all_gather(gathered, a, over="tp.x", dim=0{ring.rows.sizes}, lane=compute)
    matmul(c, gathered, b, lane=compute)
"""
