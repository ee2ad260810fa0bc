"""A product whose regions are copied to their owners when they are whole, where they are added up.

What T3 (Pati et al., ASPLOS '24, section 4) does on machines whose memory does not add: a copy engine stores.
Each rank has a term of all of C. It computes the rows of its neighbour first, then those of the rank after that,
and its own last. A region is sent (`dma_map`) when its tiles are there, to its sender's place in its owner's
memory. The owner adds up what has arrived. No rank adds to another's memory as in `t3_direct`; terms take memory
where they are made and where they arrive.
"""

from __future__ import annotations

from meshweave.algorithms.fused.product import SUMS, RingText, TiledProduct, Tiles


class CopiedReduceScatter(TiledProduct):
    """One product whose regions, in staggered order, are copied to their owners, which add up their rows."""

    name = "t3_copied"
    title = "T3 reduce-scatter by copies"
    source = "Pati et al., T3, ASPLOS '24, section 4, with copies in place of updates"
    accepted = SUMS
    wants = "A sharded by columns, B by rows, C by rows or replicated"
    program_title = "T3: a product whose parts are copied to their owners"

    def text(self, ring: RingText, config: Tiles) -> str:
        """Return the program behind its declarations; `refusal` of its problem must be None."""
        count, parts = ring.count, ring.rows

        def sent(owner: str, distance: str) -> str:
            start, rows = f"{parts.size} * ({distance})", parts.range(f"({owner})")
            place = f"arrived[{start}:{start} + {parts.extent(f'({owner})')}, :]"
            return f"dma_map(at({ring.rank(owner)}, {place}), terms[{rows}, :], a=a[{rows}, :], lane=dma)"

        first = sent(f"(tp.x + 1) % {count}", "0")
        others = ring.each(sent(f"(tp.x + 2 + s) % {count}", "s + 1"), count - 2)
        own = parts.range("tp.x")
        return f"""\
terms = scratch(({ring.problem.m}, {ring.problem.n}), "{ring.problem.dtype}", on=tp)
arrived = scratch(({parts.size * (count - 1)}, {ring.problem.n}), "{ring.problem.dtype}", on=tp)
compute = lane()
dma = lane()
with tp:
    product(a, b, ({first},
        {others}local(terms[{own}, :], a=a[{own}, :])), release={config.release(update=False)}, lane=compute)
    for s in range({count - 1}):
        add(terms[{own}, :], arrived[{parts.size} * s:{parts.size} * s + {parts.extent("tp.x")}, :], lane=compute)
    {ring.gather_or_copy(f"terms[{own}, :]")}
"""
