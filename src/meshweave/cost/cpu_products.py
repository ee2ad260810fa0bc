"""The time of a product C = A B on one thread of a CPU by its shape: vectors, copies, cache lines, and memory.

All are row-major. A kernel multiplies full vectors along n, a few rows of A at a time (padded to `_LINE_BYTES`
and `_ROWS`). Before it B is copied into the kernel's order, after it C is stored; what outgrows the caches
streams through memory:

    product = launch_s + 2 m_padded n_padded k / flops_per_s + copy_s B + store_s C
    rows    = (unaligned_s + unaligned_far_s out(C, near_cache_bytes)) C, if rows of C begin within cache lines
    memory  = (A + B + C) out(A + B + C, cache_bytes) / memory_bytes_per_s
    strided = strided_s C out(C, cache_bytes / 2), if k is from 48 to 112
    time    = product + rows + memory + strided

A, B and C are bytes; out(x, c) = x^4 / (x^4 + c^4) is the share of x bytes, used again and again, that c bytes of
cache no longer have. Cf. Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (TOMS 2008),
sections 4 and 5. From k = 48 on MKL copies its operands and stores C in columns of tiles, which long sums hide
from about 112 on: where a library does otherwise, `strided_s` is fitted near 0.

Times grow with m, n and k, but where rows of C become aligned and at the end of that range of k.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshweave.describe.machine.kernels import CpuProductConstants

Array = NDArray[np.float64]
_ROWS = 4
_LINE_BYTES = 64
"""A cache line, and a vector of AVX-512."""
_STRIDED_K = 48, 112
_SHARPNESS = 4


def cpu_product_seconds(
    constants: CpuProductConstants, m: Array, n: Array, k: Array, item_bytes: int, batch: Array
) -> Array:
    """Return the seconds of products of (m, k) by (k, n) on one CPU thread; all arrays have one shape.

    Args:
        item_bytes: bytes of an element of A, B or C.
        batch: equal products in one call.
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
