"""The rival of a product that is triggered by what arrives: parts go around a ring beside products of parts.

The all-gather and the product are cut into one product for each rank's part (Wang et al., ASPLOS '23). A rank
passes on the part that it got while it computes with it. So a transfer hides behind the product of one part, but a
product starts only when all of its part has arrived.
"""

from __future__ import annotations

from meshweave.algorithms.fused.product import GATHERS, NoChoice, RingText, UntiledProduct


class LoopedAllGather(UntiledProduct):
    """A product for each part of A; the next part arrives while a product runs."""

    name = "looped_all_gather"
    title = "Looped collective all-gather"
    source = "Wang et al., Overlap communication with dependent computation, ASPLOS '23, section 5"
    accepted = GATHERS
    wants = "A sharded by rows, B and C by columns"
    program_title = "a product whose operand goes around a ring by parts"

    def text(self, ring: RingText, config: NoChoice) -> str:
        """Return the program behind its declarations; `refusal` of its problem must be None."""
        count, parts = ring.count, ring.rows
        here, following = (f"((tp.x + {count - number} - s) % {count})" for number in (1, 2))
        first, last = (f"((tp.x + {shift}) % {count})" for shift in (count - 1, 1))
        return f"""\
arrived = scratch(({parts.size}, {ring.problem.k}), "{ring.problem.dtype}", on=tp, slots=2)
compute = lane()
ring = lane()
with tp:
    permute(arrived(0)[:{parts.extent(first)}, :], a, over="tp.x", lane=ring)
    matmul(c[{parts.range("tp.x")}, :], a, b, lane=compute)
    for s in range({count - 2}):
        permute(arrived((s + 1) % 2)[:{parts.extent(following)}, :], arrived(s % 2)[:{parts.extent(here)}, :],
            over="tp.x", lane=ring)
        matmul(c[{parts.range(here)}, :], arrived(s % 2)[:{parts.extent(here)}, :], b, lane=compute)
    matmul(c[{parts.range(last)}, :], arrived({count % 2})[:{parts.extent(last)}, :], b, lane=compute)
"""
