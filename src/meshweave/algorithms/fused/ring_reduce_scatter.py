"""A product that reduce-scatters itself around a ring (T3: Pati et al., ASPLOS '24, section 4).

A is sharded by columns and B by rows, so each rank has a term of all of C. It computes the part that its
neighbour passes on first straight into the neighbour's memory (`remote_map`), and the others into its own. A part
moves on (`dma_map`) as soon as all its updates have arrived: those of the rank's own product and those of the
previous rank. Their number is known, and that is the trigger; no fence is needed. Ranks begin at different parts,
so that the parts that arrive are those that a rank computes next. Where C is replicated, the reduced parts are
gathered from where they were added up.
"""

from __future__ import annotations

from meshweave.algorithms.fused.product import SUMS, RingText, TiledProduct, Tiles


class RingReduceScatter(TiledProduct):
    """One product whose regions, in staggered order, are summed around a ring as their tiles are finished."""

    name = "t3_ring"
    title = "T3 ring reduce-scatter"
    source = "Pati et al., T3, ASPLOS '24, section 4"
    accepted = SUMS
    wants = "A sharded by columns, B by rows, C by rows or replicated"
    program_title = "T3: a product that reduce-scatters itself around a ring"

    def text(self, ring: RingText, config: Tiles) -> str:
        """Return the program behind its declarations; `refusal` of its problem must be None."""
        count, parts = ring.count, ring.rows
        first, passed, own = (
            f"{parts.range(number)}, :"
            for number in (
                f"((tp.x + {count - 1}) % {count})",
                f"((tp.x + {count - 2} - s) % {count})",
                "tp.x",
            )
        )
        following = ring.rank(f"(tp.x + 1) % {count}")
        dma_maps = ring.each(
            f"dma_map(at({following}, acc[{passed}]), acc[{passed}], a=a[{passed}], lane=dma)", count - 2
        )
        return f"""\
acc = scratch(({ring.problem.m}, {ring.problem.n}), "{ring.problem.dtype}", on=tp)
compute = lane()
dma = lane(order="ready", width=2)
with tp:
    zero(acc, lane=compute)
    fence(over="tp", lane=compute)
    product(a, b, (
        remote_map(at({following}, acc[{first}]), a=a[{first}]),
        {dma_maps}local(acc[{own}], a=a[{own}])), release={config.release(update=True)}, lane=compute)
    {ring.gather_or_copy(f"acc[{parts.range('tp.x')}, :]")}
"""
