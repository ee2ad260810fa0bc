"""A product whose regions go straight to their owners, where they are added up (T3, section 7.1).

Each rank has a term of all of C. It computes the rows of its neighbour first, then those of the rank after that,
and its own last: at any time each owner gets the tiles of one rank. No rank passes on what it got, so there is no
copy of a part by DMA: the stores of the product are all the communication (`remote_map`).
"""

from __future__ import annotations

from meshweave.algorithms.fused.product import SUMS, RingText, TiledProduct, Tiles


class DirectReduceScatter(TiledProduct):
    """One product whose regions, in staggered order, are added to their owners' memory as tiles are finished."""

    name = "t3_direct"
    title = "T3 direct reduce-scatter"
    source = "Pati et al., T3, ASPLOS '24, section 7.1"
    accepted = SUMS
    wants = "A sharded by columns, B by rows, C by rows or replicated"
    program_title = "T3: a product whose parts go straight to their owners"

    def text(self, ring: RingText, config: Tiles) -> str:
        """Return the program behind its declarations; `refusal` of its problem must be None."""
        count, parts = ring.count, ring.rows
        first, owner = f"(tp.x + 1) % {count}", f"(tp.x + 2 + s) % {count}"

        def remote_map(to: str) -> str:
            return f"remote_map(at({ring.rank(to)}, acc), a=a[{parts.range(f'({to})')}, :])"

        return f"""\
acc = scratch(({parts.extent("tp.x")}, {ring.problem.n}), "{ring.problem.dtype}", on=tp)
compute = lane()
with tp:
    zero(acc, lane=compute)
    fence(over="tp", lane=compute)
    product(a, b, (
        {remote_map(first)},
        {ring.each(remote_map(owner), count - 2)}local(acc, a=a[{parts.range("tp.x")}, :])),
        release={config.release(update=True)}, lane=compute)
    {ring.gather_or_copy("acc")}
"""
