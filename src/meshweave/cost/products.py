"""The time of a product C = A B by its shape: tiles, waves, and what streams through memory.

A library cuts C into tiles of tm x tn (padded at the edges) and k into s parts, and takes the fastest of a small
menu. A tile multiplies k in steps, each of which takes as long as its FLOPs or its operands' way into the unit:

    step  = max(2 tm tn / (flops_per_s / units), (tm + tn) item / unit_bytes_per_s)   for each element of k
    tile  = k_padded / s * step + tile_s
    waves = x + wave_share (ceil(x) - x), at least 1, where x = tiles s / units
    c     = waves tile, and where k is split tile_s and split_passes s m n 8 bytes through memory besides

Beside that A, B and C cross the memory once, which takes m. The two overlap imperfectly: (c^p + m^p)^(1/p). Long
products run at a lower clock: t (1 + slowdown ln(1 + t / 0.1 ms)). Cf. CUTLASS, "Efficient GEMM in CUDA" (tiles,
waves, split-k). A chip of systolic arrays has constants and a formula of their own (`cost.systolic`).

Every term grows with m, n and k; so does the result, but where a menu chooses by m. A thread of a CPU has a
formula of its own, in `cpu_product_seconds`.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshweave.cost.systolic import overlapped, systolic_seconds
from meshweave.describe.machine.kernels import (
    TILE_MENUS,
    CpuProductConstants,
    ProductModel,
    SystolicConstants,
)

# --- products on a CPU ------------------------------------------------------------------------------------

# The time of a product C = A B on one thread of a CPU by its shape: vectors, copies, cache lines, and memory.
#
# All are row-major. A kernel multiplies full vectors along n, a few rows of A at a time (padded to
# `_LINE_BYTES` and `_ROWS`). Before it B is copied into the kernel's order, after it C is stored; what
# outgrows the caches streams through memory:
#
#     product = launch_s + 2 m_padded n_padded k / flops_per_s + copy_s B + store_s C
#     rows    = (unaligned_s + unaligned_far_s out(C, near_cache_bytes)) C, if rows of C begin within cache lines
#     memory  = (A + B + C) out(A + B + C, cache_bytes) / memory_bytes_per_s
#     strided = strided_s C out(C, cache_bytes / 2), if k is from 48 to 112
#     time    = product + rows + memory + strided
#
# A, B and C are bytes; out(x, c) = x^4 / (x^4 + c^4) is the share of x bytes, used again and again, that c
# bytes of cache no longer have. Cf. Goto and van de Geijn, "Anatomy of High-Performance Matrix
# Multiplication" (TOMS 2008), sections 4 and 5. From k = 48 on MKL copies its operands and stores C in
# columns of tiles, which long sums hide from about 112 on: where a library does otherwise, `strided_s` is
# fitted near 0.
#
# Times grow with m, n and k, but where rows of C become aligned and at the end of that range of k.

Array = NDArray[np.float64]
_ROWS = 4
_LINE_BYTES = 64
"""A cache line, and a vector of AVX-512."""
_STRIDED_K = 48, 112
_SHARPNESS = 4


def cpu_product_seconds(
    constants: CpuProductConstants, m: Array, n: Array, k: Array, item_bytes: int, batch: Array
) -> Array:
    """Return the seconds of products of (m, k) by (k, n) on one CPU thread, an array in the shape of m, n and k.

    Args:
        item_bytes: bytes of an element of A, B or C.
        batch: number of equal products in one call; an array of the same shape.
    """
    of, lanes = constants, max(_LINE_BYTES // item_bytes, 1)
    a, b, c = (item_bytes * size for size in (m * k, k * n, m * n))
    flops = 2 * np.ceil(m / _ROWS) * _ROWS * np.ceil(n / lanes) * lanes * k
    each_s = flops / of.flops_per_s + of.copy_s * b + of.store_s * c
    unaligned_s = of.unaligned_s + of.unaligned_far_s * _outside(c, of.near_cache_bytes)
    each_s = each_s + np.where(n % lanes, unaligned_s * c, 0.0)
    each_s = each_s + (a + b + c) * _outside(a + b + c, of.cache_bytes) / of.memory_bytes_per_s
    is_strided = (k >= _STRIDED_K[0]) & (k <= _STRIDED_K[1])
    each_s = each_s + np.where(is_strided, of.strided_s * c * _outside(c, of.cache_bytes / 2), 0.0)
    result: Array = of.launch_s + batch * each_s
    return result


def _outside(num_bytes: Array, cache_bytes: float) -> Array:
    result: Array = 1 / (1 + (cache_bytes / np.maximum(num_bytes, 1)) ** _SHARPNESS)
    return result


# --- products ---------------------------------------------------------------------------------------------

_SLOW_AFTER_S = 1e-4
_SUM_BYTES = 8
"""A partial sum in fp32 is written and read."""


@lru_cache(maxsize=16)
def _choices(name: str) -> tuple[Array, ...]:
    """Return the columns tm, tn, cluster, splits, above_m and up_to_m of the choices of a menu."""
    menu = TILE_MENUS[name]
    rows = [
        (tile.m, tile.n, tile.cluster, split, tile.above_m, tile.up_to_m or math.inf)
        for tile in menu.tiles
        for split in menu.splits
    ]
    return tuple(np.array(column, dtype=np.float64) for column in zip(*rows, strict=True))


def product_seconds(
    constants: ProductModel,
    m: ArrayLike,
    n: ArrayLike,
    k: ArrayLike,
    item_bytes: int,
    batch: ArrayLike = 1,
    out_bytes: int = 0,
) -> Array:
    """Return the seconds of products (m, k) by (k, n), in the shape to which numpy broadcasts the sizes.

    Args:
        item_bytes: bytes of an element of A or B.
        batch: number of equal products that run as one kernel.
        out_bytes: bytes of an element of C; 0 for `item_bytes`, but at least 2. Ignored by constants of a CPU,
            where it is `item_bytes`.
    """
    out_bytes = out_bytes or max(item_bytes, 2)
    if isinstance(constants, SystolicConstants):
        return systolic_seconds(constants, m, n, k, item_bytes, out_bytes, batch)
    sizes = np.broadcast_arrays(*(np.asarray(size, dtype=np.float64) for size in (m, n, k, batch)))
    if isinstance(constants, CpuProductConstants):
        return cpu_product_seconds(constants, sizes[0], sizes[1], sizes[2], item_bytes, sizes[3])
    rows, columns, depth, count = (size[..., None] for size in sizes)
    of, menu = constants, TILE_MENUS[constants.tiles]
    tile_m, tile_n, cluster, splits, above, up_to = _choices(of.tiles)
    num_tiles = np.ceil(rows / (tile_m * cluster)) * cluster * np.ceil(columns / tile_n) * count
    step_s = np.maximum(
        2 * tile_m * tile_n * of.units / of.flops_per_s, (tile_m + tile_n) * item_bytes / of.unit_bytes_per_s
    )
    passes = np.ceil(depth / (splits * menu.k_step)) * menu.k_step
    filled = num_tiles * splits / of.units
    waves = np.maximum(filled + of.wave_share * (np.ceil(filled) - filled), 1.0)
    sums = of.split_passes * splits * rows * columns * count * _SUM_BYTES / of.memory_bytes_per_s
    compute_s = waves * (passes * step_s + of.tile_s) + np.where(splits > 1, sums + of.tile_s, 0.0)
    operands = item_bytes * (rows * depth + depth * columns) + out_bytes * rows * columns
    memory_s = count * operands / of.memory_bytes_per_s
    fits = (rows > above) & (rows <= up_to)
    compute_s = np.where(fits, compute_s, np.inf).min(axis=-1)
    busy_s = overlapped(compute_s, memory_s[..., 0], of.overlap) + of.launch_s
    prepared_s: Array = of.prepare_s * sizes[0] * sizes[2] * sizes[3]
    return slowed(busy_s, of.slowdown) + prepared_s


def slowed(seconds: Array, slowdown: float) -> Array:
    """Return the seconds of a kernel whose clock falls with heat and power as it runs.

    That is t (1 + slowdown ln(1 + t / 0.1 ms)) for a kernel of t `seconds` at the full clock.
    """
    result: Array = seconds * (1 + slowdown * np.log1p(seconds / _SLOW_AFTER_S))
    return result


@lru_cache(maxsize=1 << 16)
def product_s(
    constants: ProductModel, m: int, n: int, k: int, item_bytes: int, num_products: int = 1
) -> float:
    """Return the seconds of `num_products` equal products of (m, k) by (k, n) in one kernel.

    If m, n, k or `num_products` is 0, these are the seconds of its launch.

    Args:
        item_bytes: bytes of an element of A or B. One of C has as many, but at least 2 except with
            constants of a CPU.
    """
    if not m * n * k * num_products:
        return constants.launch_s
    return float(product_seconds(constants, m, n, k, item_bytes, num_products))
