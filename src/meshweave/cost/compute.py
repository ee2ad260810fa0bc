"""The memory traffic of a product on one chip.

A chip multiplies out of on-chip memory, tile by tile: while one pair of tiles of A and B is multiplied, the
next pair is fetched, and an output tile that is complete is written back (MeshSlice, section 4.1). So the first
pair (`fill`) and the last write-back (`drain`) are exposed, and between them the product takes as long as its
FLOPs or its traffic, whichever is longer: a roofline. With tiles of tm x tk and tk x tn, all of A is read once
per column of output tiles, all of B once per row of them, and C is read and written once, as products that
accumulate do.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshweave.describe.machine.cluster import Chip
from meshweave.ir.work import Compute


@dataclass(frozen=True, slots=True)
class TileTraffic:
    """The memory traffic of a product in bytes: before its first, during, and after its last multiplication."""

    fill_bytes: int = 0
    stream_bytes: int = 0
    drain_bytes: int = 0


NO_TRAFFIC = TileTraffic()


def tile_traffic(work: Compute, chip: Chip) -> TileTraffic:
    """Return the memory traffic of work with FLOPs.

    A product has none where the chip names no `gemm_tile`. A call has the bytes that it declares, all of them
    beside its FLOPs.
    """
    if not work.flops:
        return NO_TRAFFIC
    if work.bytes:
        return TileTraffic(0, work.bytes, 0)
    m, n, k = work.dims
    if chip.gemm_tile is None or not m * n * k:
        return NO_TRAFFIC
    tile_m, tile_n, tile_k = (min(size, tile) for size, tile in zip(work.dims, chip.gemm_tile, strict=True))
    fill = tile_m * tile_k + tile_k * tile_n
    drain = tile_m * tile_n
    total = work.num_products * (m * k * -(-n // tile_n) + k * n * -(-m // tile_m) + 2 * m * n)
    return TileTraffic(
        fill * work.item_bytes, max(total - fill - drain, 0) * work.item_bytes, drain * work.item_bytes
    )
