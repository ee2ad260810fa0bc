"""A product that reduce-scatters itself around a ring (T3: Pati et al., ASPLOS '24, section 4).

A is sharded by columns and B by rows, so each rank has a term of all of C. It computes the part that its
neighbour passes on first straight into the neighbour's memory (`remote_map`), and the others into its own. A part
moves on (`dma_map`) as soon as all its updates have arrived: those of the rank's own product and those of the
previous rank. Their number is known, and that is the trigger; no fence is needed. Ranks begin at different parts,
so that the parts that arrive are those that a rank computes next. Where C is replicated, the reduced parts are
gathered from where they were added up.
"""

from __future__ import annotations

from meshweave.algorithms.fused.product import (
    SUMS,
    Parts,
    TiledProduct,
    Tiles,
    declarations,
    each_region,
    gather_or_copy,
    rank_of,
)
from meshweave.algorithms.universal.problem import UniversalProblem


class RingReduceScatter(TiledProduct):
    """One product whose regions, in staggered order, are summed around a ring as their tiles are finished."""

    name = "t3_ring"
    title = "T3 ring reduce-scatter"
    source = "Pati et al., T3, ASPLOS '24, section 4"
    accepted = SUMS
    wants = "A sharded by columns, B by rows, C by rows or replicated"

    def text(self, problem: UniversalProblem, config: Tiles) -> str:
        """Return the program as text that `ir.program.parse` reads; `refusal(problem)` must be None."""
        count = len(problem.ranks)
        parts = Parts(problem.m, count)
        first, passed, own = (
            f"{parts.range(number)}, :"
            for number in (
                f"((tp.x + {count - 1}) % {count})",
                f"((tp.x + {count - 2} - s) % {count})",
                "tp.x",
            )
        )
        following = rank_of(problem.a.mesh, f"(tp.x + 1) % {count}")
        dma_maps = each_region(
            f"dma_map(at({following}, acc[{passed}]), acc[{passed}], a=a[{passed}], lane=dma)", count - 2
        )
        return f"""{declarations(problem, "T3: a product that reduce-scatters itself around a ring")}\
acc = scratch(({problem.m}, {problem.n}), "{problem.dtype}", on=tp)
compute = lane()
dma = lane(order="ready", width=2)
with tp:
    zero(acc, lane=compute)
    fence(over="tp", lane=compute)
    product(a, b, (
        remote_map(at({following}, acc[{first}]), a=a[{first}]),
        {dma_maps}local(acc[{own}], a=a[{own}])), release={config.release(update=True)}, lane=compute)
    {gather_or_copy(problem, parts, f"acc[{parts.range('tp.x')}, :]")}
"""
