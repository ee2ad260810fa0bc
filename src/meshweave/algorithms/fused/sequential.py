"""The baseline of fused products: a product, then a reduce-scatter, then an all-gather, one after another."""

from __future__ import annotations

from meshweave.algorithms.fused.product import SUMS, NoChoice, RingText, UntiledProduct
from meshweave.describe.layout import Replicate


class SequentialReduceScatter(UntiledProduct):
    """A product whose sum over ranks is reduce-scattered, and gathered where C is replicated, with no overlap."""

    name = "t3_sequential"
    title = "Sequential reduce-scatter"
    source = "Pati et al., T3, ASPLOS '24, section 5.3"
    accepted = SUMS
    wants = "A sharded by columns, B by rows, C by rows or replicated"
    program_title = "a product, a reduce-scatter and an all-gather"

    def text(self, ring: RingText, config: NoChoice) -> str:
        """Return the program behind its declarations; `refusal` of its problem must be None."""
        m, n, _ = ring.problem.sizes
        parts = ring.rows
        gathers = isinstance(ring.problem.c.placements[0], Replicate)
        part = (
            f'part = scratch(({parts.extent("tp.x")}, {n}), "{ring.problem.dtype}", on=tp)\n'
            if gathers
            else ""
        )
        gather = (
            f'\n    all_gather(c, part, over="tp.x", dim=0{parts.sizes}, lane=compute)' if gathers else ""
        )
        out = "part" if gathers else "c"
        return f"""\
acc = scratch(({m}, {n}), "{ring.problem.dtype}", on=tp)
{part}\
compute = lane()
with tp:
    matmul(acc, a, b, lane=compute)
    reduce_scatter({out}, acc, over="tp.x", dim=0{parts.sizes}, lane=compute){gather}
"""
