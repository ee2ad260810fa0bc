"""The time of a product C = A B on systolic arrays (TPU): fill, passes, results, memory.

Arrays of 128 x 128 hold a part of one operand each, while rows of the other pass through, eight at a time. So two
dims are padded to 128 and one to 8; of m and n the one that is padded to 8 is the one for which that costs least.

    multiply = 2 (rows + load_rows) columns depth / flops_per_s, padded; loading a part costs like more rows
    results  = padded elements of C / results_per_s: sums leave the arrays, are rounded and stored
    first    = min(bytes of A and B, first_bytes) / memory_bytes_per_s, before the first multiplication
    last     = min(bytes of C, last_bytes) / memory_bytes_per_s, after the last one
    memory   = what is left of A, B and C / memory_bytes_per_s, beside the multiplications
    time     = launch_s + first + last + (multiply^p + results^p + memory^p)^(1/p)

The windows through which a compiler streams operands are not chosen here: `first_bytes` and `last_bytes` are their
typical sizes. Cf. Jouppi et al. (ISCA '17, section 2) for arrays that hold weights while rows pass, and (ISCA '23)
for TPU v4. Every term grows with m, n and k.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshweave.describe.machine.kernels import SystolicConstants

Array = NDArray[np.float64]
_SIDE = 128
_ROWS = 8


def systolic_seconds(
    constants: SystolicConstants,
    m: ArrayLike,
    n: ArrayLike,
    k: ArrayLike,
    item_bytes: int,
    out_bytes: int,
    batch: ArrayLike = 1,
) -> Array:
    """Return the seconds of products of (m, k) by (k, n), in the shape of the broadcast sizes.

    `batch` counts equal products that run as one kernel. Elements of A and B have `item_bytes`, those of C
    `out_bytes`.
    """
    of = constants
    sizes = np.broadcast_arrays(*(np.asarray(size, dtype=np.float64) for size in (m, n, k, batch)))
    rows, columns, depth, count = sizes
    full = _padded(rows, _SIDE), _padded(columns, _SIDE), _padded(depth, _SIDE)
    thin_m, thin_n = _padded(rows, _ROWS), _padded(columns, _ROWS)
    passed = np.minimum((thin_m + of.load_rows) * full[1], (thin_n + of.load_rows) * full[0]) * full[2]
    results = np.minimum(thin_m * full[1], thin_n * full[0])
    operands = item_bytes * count * (rows * depth + depth * columns)
    sums = out_bytes * count * rows * columns
    first, last = np.minimum(operands, of.first_bytes), np.minimum(sums, of.last_bytes)
    beside_s = _norm(
        of.overlap,
        2 * count * passed / of.flops_per_s,
        count * results / of.results_per_s,
        (operands - first + sums - last) / of.memory_bytes_per_s,
    )
    result: Array = of.launch_s + (first + last) / of.memory_bytes_per_s + beside_s
    return result


def _padded(size: Array, step: int) -> Array:
    result: Array = np.ceil(size / step) * step
    return result


def _norm(power: float, *seconds: Array) -> Array:
    """Return (a^p + b^p + ...)^(1/p) of times of which at least one is positive."""
    longest = np.maximum.reduce(seconds)
    shares = [(part / longest) ** power for part in seconds]
    result: Array = longest * np.sum(shares, axis=0) ** (1 / power)
    return result
