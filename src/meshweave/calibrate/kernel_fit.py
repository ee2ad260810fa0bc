"""Fit the constants of kernels to measured times: products, attention, collectives of one host.

The sum of absolute relative errors is minimised, because kernels chosen by heuristics leave outliers that squares
would follow: Levenberg-Marquardt on logarithms of times, with weights 1 / |error| (iteratively reweighted least
squares), and derivatives by differences. Constants with a bound, such as rates below the peak, are its sigmoids;
the others are exponentials, so nothing leaves its range. A fit starts at one point and has no random choices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshweave.cost.products import product_seconds
from meshweave.describe.machine.kernels import ChipKernels, CpuProductConstants, ProductConstants

Array = NDArray[np.float64]

_LEAST_ERROR = 0.02
"""Relative errors below this weigh alike: times are not better known."""
_STEP = 1e-4
_MOST_STEPS = 80
_MOST_TRIALS = 10
_LARGEST_MOVE = 0.5
_DIGITS = 4
_FEW_ROWS_WEIGHT = 0.5
FEW_ROWS = 256
"""Products of fewer rows than this weigh half in a fit: they wait for memory, and training has few of them."""


@dataclass(frozen=True)
class Free:
    """A constant to be fitted: its first value, its upper bound (infinite for none), and its lower bound."""

    start: float
    most: float = math.inf
    least: float = 0.0

    def value(self, position: float) -> float:
        """Return the constant for `position`, an unbounded number that the fit varies."""
        if math.isinf(self.most):
            return self.least + math.exp(min(position, 700.0))
        return self.least + (self.most - self.least) / (1 + math.exp(-max(position, -700.0)))

    @property
    def position(self) -> float:
        """Return the unbounded number for `start`, at which the fit begins: the inverse of `value`."""
        above = self.start - self.least
        if math.isinf(self.most):
            return math.log(above)
        return math.log(above / (self.most - self.start))


def fit_constants(
    free: Mapping[str, Free],
    seconds_of: Callable[[Mapping[str, float]], Array],
    measured: Array,
    weights: Array,
) -> dict[str, float]:
    """Return the constants that give the measured seconds best, rounded to four significant digits.

    Args:
        free: the constants to fit, by name.
        seconds_of: returns the seconds of all samples, from constants by name.
        measured, weights: the seconds and the weight of each sample.
    """
    names = list(free)

    def constants(at: Array) -> dict[str, float]:
        return {name: free[name].value(float(x)) for name, x in zip(names, at, strict=True)}

    def errors(at: Array) -> Array:
        result: Array = np.log(seconds_of(constants(at))) - np.log(measured)
        return result

    def loss(error: Array) -> float:
        return float((weights * np.abs(error)).sum())

    at = np.array([free[name].position for name in names])
    error, damping = errors(at), 1e-2
    for _ in range(_MOST_STEPS):
        moves = _STEP * np.eye(len(at))
        slopes = np.stack([(errors(at + move) - errors(at - move)) / (2 * _STEP) for move in moves], axis=1)
        weight = weights / np.maximum(np.abs(error), _LEAST_ERROR)
        curvature, slope = slopes.T @ (weight[:, None] * slopes), slopes.T @ (weight * error)
        before = loss(error)
        for _ in range(_MOST_TRIALS):
            ridge = damping * np.diag(np.diag(curvature) + 1e-6)
            move = np.clip(np.linalg.solve(curvature + ridge, -slope), -_LARGEST_MOVE, _LARGEST_MOVE)
            tried = errors(at + move)
            if loss(tried) < before:
                at, error, damping = at + move, tried, max(damping / 3, 1e-6)
                break
            damping *= 4
        if before - loss(error) < 1e-5 * before:
            break
    return {name: _rounded(value, free[name].most) for name, value in constants(at).items()}


def _rounded(value: float, most: float) -> float:
    return min(float(f"{value:.{_DIGITS}g}"), most)


@dataclass(frozen=True)
class Hardware:
    """What is known of a chip before it is measured.

    Attributes:
        units: the number of multiprocessors or systolic arrays.
        peak_flops_per_s: of all units; an upper bound of the fitted rate.
        memory_bytes_per_s: an upper bound of the fitted bandwidth of the chip's memory.
    """

    units: int
    peak_flops_per_s: float
    memory_bytes_per_s: float


@dataclass(frozen=True)
class DeviceCalibration:
    """The constants of products on a device, in `kernels`, for operands of `dtype`.

    `mean_error` and `worst_error` are relative (0.1: a tenth), over the `num_products` measured products to which
    the constants are fitted.
    """

    kernels: ChipKernels
    dtype: str
    num_products: int
    mean_error: float
    worst_error: float

    @property
    def quality(self) -> str:
        """Return the errors of the fit in words."""
        return f"mean error {self.mean_error:.1%}, worst {self.worst_error:.1%} over {self.num_products} products"


def fit_products(
    sizes: Array, seconds: Array, hardware: Hardware, tiles: str, item_bytes: int, *, is_cast: bool = False
) -> ProductConstants:
    """Return the constants of products on a chip with units such as multiprocessors.

    Args:
        sizes: (m, n, k) of each sample, shape (samples, 3).
        seconds: of each sample.
        tiles: the name of a menu of `TILE_MENUS`.
        item_bytes: of an element of an operand.
        is_cast: whether A is cast to the dtype within the measured time.
    """
    unit_rate = hardware.peak_flops_per_s / hardware.units
    free = {
        "flops_per_s": Free(0.85 * hardware.peak_flops_per_s, hardware.peak_flops_per_s),
        "unit_bytes_per_s": Free(unit_rate / 32),
        "tile_s": Free(1e-6),
        "launch_s": Free(2e-6),
        "memory_bytes_per_s": Free(0.8 * hardware.memory_bytes_per_s, hardware.memory_bytes_per_s),
        "wave_share": Free(0.5, 1.0),
        "overlap": Free(3.0, least=1.0),
        "slowdown": Free(0.02),
        **({"prepare_s": Free(1e-12)} if is_cast else {"split_passes": Free(1.0)}),
    }
    m, n, k = sizes.T
    weights = np.where(m < FEW_ROWS, _FEW_ROWS_WEIGHT, 1.0)

    def made(constants: Mapping[str, Any]) -> ProductConstants:
        return ProductConstants(tiles=tiles, units=hardware.units, **constants)

    return made(
        fit_constants(free, lambda at: product_seconds(made(at), m, n, k, item_bytes), seconds, weights)
    )


def fit_cpu_products(sizes: Array, seconds: Array, item_bytes: int) -> CpuProductConstants:
    """Return the constants of products on one thread of a CPU.

    Args:
        sizes: (m, n, k) of each sample, shape (samples, 3).
        seconds: of each sample.
        item_bytes: of an element of an operand.
    """
    m, n, k = sizes.T
    free = {
        "flops_per_s": Free(float((2 * m * n * k / seconds).max())),
        "launch_s": Free(max(float(seconds.min()), 1e-7)),
        "memory_bytes_per_s": Free(1e10),
        "cache_bytes": Free(8e6, most=1e9, least=1e5),
        **{name: Free(1e-11) for name in ("copy_s", "store_s", "unaligned_s", "unaligned_far_s")},
        "strided_s": Free(1e-10),
    }

    def seconds_of(constants: Mapping[str, float]) -> Array:
        return product_seconds(CpuProductConstants(**constants), m, n, k, item_bytes)

    return CpuProductConstants(**fit_constants(free, seconds_of, seconds, np.ones_like(seconds)))
