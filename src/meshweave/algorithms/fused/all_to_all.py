"""A product whose columns are exchanged as they are computed: an all-to-all of stores (T3, section 7.1).

Each rank has its rows of A and all of B. The rows of C that it computes belong to all ranks, by columns: each
block of columns is stored in its owner's memory, the neighbour's first and the own one last.
"""

from __future__ import annotations

from meshweave.algorithms.fused.product import Parts, RingText, TiledProduct, Tiles
from meshweave.describe.layout import Replicate, Shard


class FusedAllToAll(TiledProduct):
    """One product whose regions, in staggered order, are stored in their owners' memory as tiles are finished."""

    name = "t3_all_to_all"
    title = "T3 all-to-all"
    source = "Pati et al., T3, ASPLOS '24, section 7.1"
    accepted = ((Shard(0), Replicate(), Shard(1)),)
    wants = "A sharded by rows, B replicated, C sharded by columns"
    program_title = "T3: a product whose columns go straight to their owners"
    cut_dims = (0, 1)

    def text(self, ring: RingText, config: Tiles) -> str:
        """Return the program behind its declarations; `refusal` of its problem must be None."""
        count = ring.count
        rows, columns = (Parts(size, count) for size in ring.problem.sizes[:2])
        first, owner = f"(tp.x + 1) % {count}", f"(tp.x + 2 + s) % {count}"
        mine, own_columns = rows.range("tp.x"), columns.range("tp.x")

        def remote_map(to: str) -> str:
            return f"remote_map(at({ring.rank(to)}, c[{mine}, :]), b=b[:, {columns.range(f'({to})')}])"

        return f"""\
compute = lane()
with tp:
    product(a, b, (
        {remote_map(first)},
        {ring.each(remote_map(owner), count - 2)}local(c[{mine}, :], b=b[:, {own_columns}])),
        release={config.release(update=False)}, lane=compute)
"""
