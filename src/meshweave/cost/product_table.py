"""Times of products interpolated between measured ones.

What is interpolated is the logarithm of time over a base (the model of `cost.products`, or else a roofline of
the best rates in the table): padding and waves are the base's, and what the base misses changes slowly. The
interpolation is simple kriging (Rasmussen and Williams, "Gaussian Processes for Machine Learning", section 2.2)
with covariance exp(-distance / 4). Coordinates are log2 of m, n and k, and for each of them whether it is no
multiple of 8, which counts as two octaves. Measured times scatter: a tenth of the variance is taken for noise, so
that a neighbour's outlier is not followed. Measured points themselves are returned as they are; far from all
of them the base remains.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshweave.base.errors import UnsupportedError
from meshweave.cost.products import product_seconds
from meshweave.describe.machine.kernels import ProductModel, ProductTable
from meshweave.describe.machine.measured_file import LOW_PRECISIONS

Array = NDArray[np.float64]
_OCTAVES = 4.0
_ALIGNED_TO, _UNALIGNED_OCTAVES = 8, 2.0
_NOISE = 0.1
_ITEM_BYTES = {"float32": 4, "float64": 8, "int8": 1, **dict.fromkeys(LOW_PRECISIONS, 1)}


def item_bytes(dtype: str) -> int:
    """Return the bytes of an element in kernels of a dtype; 1 for dtypes of 4 bits with their scales."""
    return _ITEM_BYTES.get(dtype, 2)


class TableInterpolation:
    """A table of measured products, ready for lookups.

    Args:
        table: the measured products, in `dtype`.
        constants: a model whose ratio to the measured times is interpolated; None for a roofline of the best
            rates in the table in its place.
        dtype: the element type of the operands.
    """

    def __init__(self, table: ProductTable, constants: ProductModel | None, dtype: str) -> None:
        self.table, self.constants, self.dtype = table, constants, dtype
        points = np.array(table.points, dtype=np.float64)
        self._sizes, seconds = points[:, :3], points[:, 3]
        flops = 2 * self._sizes.prod(axis=1)
        self._least_s, self._best_flops_per_s = seconds.min() / 2, (flops / seconds).max()
        self._at = _coordinates(self._sizes)
        known = np.log(seconds / self._base(*self._sizes.T))
        between = _covariance(self._at, self._at) + _NOISE * np.eye(len(known))
        self._weights = np.linalg.solve(between, known)
        self._measured = {point[:3]: point[3] for point in table.points}

    def covers(self, m: int, n: int, k: int) -> bool:
        """Return whether a product is within the table's ranges of m, n and k."""
        return all(
            low <= size <= high for size, (low, high) in zip((m, n, k), self.table.ranges, strict=True)
        )

    def seconds(self, m: ArrayLike, n: ArrayLike, k: ArrayLike) -> Array:
        """Return the seconds of products (m, k) by (k, n), of numpy's broadcast shape of m, n and k.

        Measured products have their measured seconds. Others, also outside the ranges, are interpolated.
        """
        sizes = np.stack(
            np.broadcast_arrays(*(np.asarray(size, dtype=np.float64) for size in (m, n, k))), axis=-1
        )
        flat = sizes.reshape(-1, 3)
        change = _covariance(_coordinates(flat), self._at) @ self._weights
        result: Array = self._base(*flat.T) * np.exp(change)
        for at, shape in enumerate(flat):
            result[at] = self._measured.get(tuple(shape), result[at])
        return result.reshape(sizes.shape[:-1])

    def _base(self, m: Array, n: Array, k: Array) -> Array:
        if self.constants is not None:
            return product_seconds(self.constants, m, n, k, item_bytes(self.dtype))
        result: Array = self._least_s + 2 * m * n * k / self._best_flops_per_s
        return result


def _coordinates(sizes: Array) -> Array:
    """Return where products lie among each other, in octaves; shape (products, 6)."""
    return np.concatenate([np.log2(sizes), _UNALIGNED_OCTAVES * (sizes % _ALIGNED_TO != 0)], axis=1)


def _covariance(a: Array, b: Array) -> Array:
    squares = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1) - 2 * a @ b.T
    result: Array = np.exp(-np.sqrt(np.maximum(squares, 0.0)) / _OCTAVES)
    return result


@lru_cache(maxsize=8)
def interpolation(table: ProductTable, constants: ProductModel | None, dtype: str) -> TableInterpolation:
    """Return the interpolation of a table; cached, so that equal arguments return the same object.

    The arguments are those of `TableInterpolation`.
    """
    return TableInterpolation(table, constants, dtype)


@lru_cache(maxsize=1 << 16)
def table_s(
    table: ProductTable, constants: ProductModel | None, dtype: str, m: int, n: int, k: int, outside: str
) -> float | None:
    """Return the seconds of a product (m, k) by (k, n), interpolated between those of a table.

    Args:
        constants: a model of products, whose ratio to the measured times is interpolated; None for
            the best rates in the table in its place.
        dtype: of the operands; the table was measured in it.
        outside: for a product outside the table's ranges of m, n and k: "model" returns None, so
            that the caller prices it with `constants`; "error" raises.

    Raises:
        UnsupportedError: the product is outside the ranges, and `outside` is "error" or `constants`
            is None.
    """
    known = interpolation(table, constants, dtype)
    if not known.covers(m, n, k):
        if outside == "model" and constants is not None:
            return None
        ranges = ", ".join(f"{x} from {a} to {b}" for x, (a, b) in zip("mnk", table.ranges, strict=True))
        raise UnsupportedError(
            f"a product of m={m}, n={n}, k={k} is outside the measured ones ({table.source}: {ranges}); "
            'give constants of products and outside = "model", or measure it'
        )
    return float(known.seconds(m, n, k))
