"""The time of a product C = A B on systolic arrays (TPU): fill, passes, results, memory.

Arrays of 128 x 128 hold a part of one operand each, while rows of the other pass through, eight at a time. So two
dims are padded to 128 and one to 8; of m and n the one that is padded to 8 is the one for which that costs least.

    multiply = 2 (rows + load_rows) columns depth / flops_per_s, padded; loading a part costs like more rows
    round    = padded elements of C / rounded_per_s, where C is narrower than the sums (4 bytes); else 0
    first    = what of A and B is read before the first multiplication, at most first_bytes
    last     = what of C is written after the last one, at most last_bytes
    again    = A once more for each `window` columns of C, B for each `window` rows
    memory   = (A + B - first + C - last + again) / memory_bytes_per_s
    time     = launch_s + (first + last) / memory_bytes_per_s + (multiply^p + (round + memory)^p)^(1/p)

Rounding and memory traffic take turns at the memory on the chip; multiplications run beside both. A size that may
grow to a bound turns into it smoothly, x bound / sqrt(x^2 + bound^2). The windows through which a compiler streams
operands are not chosen here: `first_bytes`, `last_bytes` and `window` are their typical sizes. Cf. Jouppi et
al. (ISCA '17, section 2) for arrays that hold weights while rows pass, and (ISCA '23) for TPU v4. Every term grows
with m, n and k.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshweave.describe.machine.kernels import SystolicConstants

Array = NDArray[np.float64]
_SIDE = 128
_ROWS = 8
_SUM_BYTES = 4


def systolic_seconds(
    constants: SystolicConstants,
    m: ArrayLike,
    n: ArrayLike,
    k: ArrayLike,
    item_bytes: int,
    out_bytes: ArrayLike,
    batch: ArrayLike = 1,
) -> Array:
    """Return the seconds of products of (m, k) by (k, n) on systolic arrays.

    numpy broadcasts m, n, k, `out_bytes` and `batch`, and the result has their shape. `batch` is the number of
    equal products that run as one kernel. Elements of A and B have `item_bytes`, those of C `out_bytes`.
    """
    of = constants
    sizes = np.broadcast_arrays(*(np.asarray(size, dtype=np.float64) for size in (m, n, k, batch)))
    rows, columns, depth, count = sizes
    full = _padded(rows, _SIDE), _padded(columns, _SIDE), _padded(depth, _SIDE)
    thin_m, thin_n = _padded(rows, _ROWS), _padded(columns, _ROWS)
    passed = np.minimum((thin_m + of.load_rows) * full[1], (thin_n + of.load_rows) * full[0]) * full[2]
    is_rounded = np.asarray(out_bytes) < _SUM_BYTES
    rounded = is_rounded * np.minimum(thin_m * full[1], thin_n * full[0])
    operands = item_bytes * count * (rows * depth + depth * columns)
    sums = np.asarray(out_bytes) * count * rows * columns
    first, last = _at_most(operands, of.first_bytes), _at_most(sums, of.last_bytes)
    again = 2 * item_bytes * count * rows * columns * depth / of.window
    memory_s = (operands - first + sums - last + again) / of.memory_bytes_per_s
    multiply_s = 2 * count * passed / of.flops_per_s
    beside_s = overlapped(multiply_s, count * rounded / of.rounded_per_s + memory_s, of.overlap)
    result: Array = of.launch_s + (first + last) / of.memory_bytes_per_s + beside_s
    return result


def _padded(size: Array, step: int) -> Array:
    result: Array = np.ceil(size / step) * step
    return result


def _at_most(size: Array, bound: float) -> Array:
    result: Array = size * bound / np.hypot(size, bound)
    return result


def overlapped(first_s: Array, second_s: Array, power: float) -> Array:
    """Return the seconds of two activities that partly overlap: (first_s^power + second_s^power)^(1/power).

    Power 1 is one after the other; the higher it is, the closer the result comes to the longer of the two.
    """
    longer, shorter = np.maximum(first_s, second_s), np.minimum(first_s, second_s)
    result: Array = longer * (1 + (shorter / longer) ** power) ** (1 / power)
    return result
