"""Which tile a library multiplies matrices by on a GPU, and in how many parts along k.

Libraries have kernels for several tiles, and take the one whose time they estimate to be the least (NVIDIA,
"Matrix Multiplication Background User's Guide": large tiles load less, small ones leave fewer compute units idle
in the last wave). Where there are few tiles and k is long, they also cut k, and a second kernel adds the parts
(split-K). The estimate here has the machine's own rates and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from meshweave.base.units import PS_PER_S
from meshweave.describe.machine.gpu import GpuFile

SPLITS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
"""Parts of k that are considered."""
PARTIAL_BYTES = 4
"""Bytes of an element of a part's result: float32."""
MOST_SLOTS = 8
"""Work groups that a compute unit runs at once, however small their tiles."""


@dataclass(frozen=True)
class TileChoice:
    """Rows and columns of a tile, elements of k that are loaded at once, parts of k, and work groups at once."""

    rows: int
    columns: int
    depth: int
    splits: int
    slots: int


def choose_tile(gpu: GpuFile, m: int, n: int, k: int, item_bytes: int) -> TileChoice:
    """Return the tile and the parts of k with the least estimated time of C (m, n) = A (m, k) B (k, n).

    A GPU whose description lists no `tiles` has one, `tile`, and leaves k whole.
    """
    if not gpu.tiles:
        return TileChoice(gpu.tile[0], gpu.tile[1], gpu.tile[2], 1, gpu.slots)
    candidates = [
        TileChoice(rows, columns, gpu.tile[2], splits, _slots(gpu, rows * columns))
        for (rows, columns), splits in product(gpu.tiles, SPLITS)
        if splits == 1 or splits * gpu.tile[2] <= k
    ]
    return min(candidates, key=lambda one: estimated_ps(gpu, one, m, n, k, item_bytes))


def estimated_ps(gpu: GpuFile, tile: TileChoice, m: int, n: int, k: int, item_bytes: int) -> float:
    """Return picoseconds of a product by a tile: whole waves of tiles, or what its loads take if that is longer.

    A compute unit multiplies at its share of the rate, and loads what it may have in flight within a latency: that
    of the cache, or of memory for what is loaded the first time. Units share the banks of the cache and memory.
    """
    memory, cache = gpu.memory, gpu.cache
    depth = -(-k // tile.splits)
    tiles = -(-m // tile.rows) * -(-n // tile.columns) * tile.splits
    per_unit = -(-tiles // gpu.compute_units)
    multiply_ps = 2 * tile.rows * tile.columns * PS_PER_S * gpu.compute_units / gpu.flops_per_s
    line_bytes = (tile.rows + tile.columns) * item_bytes
    far_ps = cache.to_memory_ps + cache.from_memory_ps
    first = (m + n) * k * item_bytes / (tiles * depth * line_bytes)
    latency_ps = cache.hit_ps + first * max(far_ps - cache.hit_ps, 0)
    load_ps = line_bytes * latency_ps / gpu.in_flight_bytes
    shared_ps = line_bytes * min(tiles, gpu.compute_units) * cache.bank_ps / (cache.line_bytes * cache.banks)
    units_ps = per_unit * depth * max(multiply_ps, load_ps, shared_ps)
    memory_bytes_per_s = memory.channels * memory.column_bytes * int(memory.clock_hz)
    bytes_once = ((m + n) * k + m * n) * item_bytes
    stored = PARTIAL_BYTES if tile.splits > 1 else item_bytes
    store_ps = tile.rows * tile.columns * stored / cache.line_bytes * gpu.store_ps
    out = max(units_ps, bytes_once * PS_PER_S / memory_bytes_per_s) + far_ps + store_ps
    if tile.splits == 1:
        return out
    partial_bytes = tile.splits * m * n * PARTIAL_BYTES
    if partial_bytes > cache.num_bytes // 2:  # operands need room too
        return out + gpu.launch_ps + far_ps + 2 * partial_bytes * PS_PER_S / memory_bytes_per_s
    in_flight = gpu.in_flight_bytes * gpu.compute_units
    sum_ps = max(cache.bank_ps / (cache.line_bytes * cache.banks), cache.hit_ps / in_flight)
    return out + gpu.launch_ps + far_ps + partial_bytes * sum_ps


def _slots(gpu: GpuFile, area: int) -> int:
    """Return how many tiles of an area fit where the machine's do at once."""
    return max(1, min(MOST_SLOTS, gpu.slots * gpu.tile[0] * gpu.tile[1] // area))
