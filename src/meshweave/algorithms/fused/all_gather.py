"""A product that is triggered by what is gathered for it (T3, section 7.2).

A is sharded by rows and each rank computes its columns of C. Parts of A go around the ring: a rank passes on what
arrives as soon as it is there (by DMA), and computes the rows of C that belong to a part when that has arrived.
It begins with its own rows, which it need not wait for, and goes on in the order in which the others arrive.
"""

from __future__ import annotations

from meshweave.algorithms.fused.product import GATHERS, RingText, TiledProduct, Tiles


class AllGatherAtConsumer(TiledProduct):
    """One product whose regions start as the parts of A that they read arrive around a ring."""

    name = "t3_all_gather"
    title = "T3 all-gather at the consumer"
    source = "Pati et al., T3, ASPLOS '24, section 7.2"
    accepted = GATHERS
    wants = "A sharded by rows, B and C by columns"
    program_title = "T3: a product that starts as its operand arrives"

    def text(self, ring: RingText, config: Tiles) -> str:
        """Return the program behind its declarations; `refusal` of its problem must be None."""
        count, parts = ring.count, ring.rows
        own, passed = parts.range("tp.x"), parts.range(f"((tp.x + {count - 1} - s) % {count})")
        following = ring.rank(f"(tp.x + 1) % {count}")
        released = config.release(update=False)
        arrived = ring.each(f"local(c[{passed}, :], a=gathered[{passed}, :])", count - 1)
        return f"""\
gathered = scratch(({ring.problem.m}, {ring.problem.k}), "{ring.problem.dtype}", on=tp)
compute = lane()
dma = lane()
with tp:
    put(at({following}, gathered[{own}, :]), a, release={released}, lane=dma, name="all_gather")
    for s in range({count - 2}):
        put(at({following}, gathered[{passed}, :]), gathered[{passed}, :],
            release={released}, lane=dma, name="all_gather")
    product(a, b, (local(c[{own}, :]), {arrived}), release={released}, lane=compute)
"""
