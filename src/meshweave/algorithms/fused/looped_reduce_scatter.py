"""The rival of fused products: a product in parts, whose running sums go around a ring (Wang et al., ASPLOS '23).

The product and its reduce-scatter are cut into one product for each rank's part. A rank adds its term to the sum
of a part that it received, and passes it on while it computes the term of the next part. So a transfer hides
behind the product of one part, but starts only when all of the part before is finished.
"""

from __future__ import annotations

from meshweave.algorithms.fused.product import SUMS, NoChoice, RingText, UntiledProduct


class LoopedReduceScatter(UntiledProduct):
    """A product for each part of the result; the sum of a part moves on while the next part is computed."""

    name = "looped_reduce_scatter"
    title = "Looped collective reduce-scatter"
    source = "Wang et al., Overlap communication with dependent computation, ASPLOS '23, section 5"
    accepted = SUMS
    wants = "A sharded by columns, B by rows, C by rows or replicated"
    program_title = "a product whose parts are summed up around a ring"

    def text(self, ring: RingText, config: NoChoice) -> str:
        """Return the program behind its declarations; `refusal` of its problem must be None."""
        count, parts = ring.count, ring.rows
        first = f"((tp.x + {count - 1}) % {count})"
        passed, next_part = (f"((tp.x + {count - number} - s) % {count})" for number in (1, 2))
        last = f"sum({(count - 1) % 2})[:{parts.extent('tp.x')}, :]"
        return f"""\
sum = scratch(({parts.size}, {ring.problem.n}), "{ring.problem.dtype}", on=tp, slots=2)
arrived = scratch(({parts.size}, {ring.problem.n}), "{ring.problem.dtype}", on=tp, slots=2)
compute = lane()
ring = lane()
with tp:
    matmul(sum(0)[:{parts.extent(first)}, :], a[{parts.range(first)}, :], b, lane=compute)
    for s in range({count - 1}):
        permute(arrived(s % 2)[:{parts.extent(next_part)}, :], sum(s % 2)[:{parts.extent(passed)}, :], over="tp.x",
            lane=ring)
        matmul(sum((s + 1) % 2)[:{parts.extent(next_part)}, :], a[{parts.range(next_part)}, :], b, lane=compute)
        add(sum((s + 1) % 2)[:{parts.extent(next_part)}, :], arrived(s % 2)[:{parts.extent(next_part)}, :],
            lane=compute)
    {ring.gather_or_copy(last)}
"""
