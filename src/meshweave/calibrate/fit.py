"""Robust regression of `seconds = launch + steps (sync + bytes / rate)`, with no coefficient below zero.

What disturbs a measurement makes it slower, some of them much slower, so least squares will not do. Residuals
are relative, for a plan needs small and large operations alike to a few per cent. They are minimised in
absolute value first (weights 1 / |residual|), which outliers do not pull, then by Huber's function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np

from meshweave.base.units import format_bytes, format_s

Array = np.ndarray[Any, np.dtype[np.float64]]

_HUBER = 1.345
"""95 % of the efficiency of least squares on normal errors (Huber, 1964), in standard deviations."""
_LEAST_SPREAD = 1e-3
"""No clock here is better than that, relative to what is measured."""
_LAUNCH_STANDARD_ERRORS = 2.0
"""A launch counts as distinct from the synchronisation if it is so many standard errors above zero."""


@dataclass(frozen=True)
class Sample:
    """One measured operation.

    Attributes:
        seconds: how long it took.
        amount: the bytes that each step moves; for a product, its FLOPs.
        steps: the number of steps.
    """

    seconds: float
    amount: float
    steps: int = 1


@dataclass(frozen=True)
class FitLimits:
    """The limits of a fit: its relative errors are at most these, and it has at least so many points."""

    median_error: float = 0.10
    worst_error: float = 0.30
    num_points: int = 4


@dataclass(frozen=True)
class Fit:
    """Constants of one kind of operation in one place, and how well they give the measured times.

    Attributes:
        name: what was fitted, `all_gather along row`.
        launch_s, sync_s: seconds per operation and per step.
        rate_per_s: bytes (or FLOPs) per second; infinite where time does not grow with the amount.
        median_error, worst_error: relative, over all points, those that the regression discounts included.
        num_points: how many samples were fitted.
        smallest, largest: the least and greatest `amount` of a sample.
        steps: the numbers of steps that samples have, ascending.
        remark: a caveat, such as constants that the samples cannot tell apart; "" for none.
    """

    name: str
    launch_s: float
    sync_s: float
    rate_per_s: float
    median_error: float
    worst_error: float
    num_points: int
    smallest: float
    largest: float
    steps: tuple[int, ...]
    remark: str = ""

    def seconds(self, amount: float, steps: int = 1) -> float:
        """Return the seconds of an operation of `steps` steps of `amount` bytes each (or of `amount` FLOPs)."""
        return self.launch_s + steps * (self.sync_s + amount / self.rate_per_s)

    def problems(self, limits: FitLimits) -> list[str]:
        """Return why these constants must not be used, a sentence each; [] if they are good."""
        out = []
        if self.num_points < limits.num_points:
            out.append(f"{self.name}: {self.num_points} points, at least {limits.num_points} are needed")
        if not math.isfinite(self.rate_per_s):
            out.append(f"{self.name}: time does not grow with the amount, so there is no rate")
        if self.median_error > limits.median_error:
            out.append(f"{self.name}: median error {self.median_error:.1%}, over {limits.median_error:.0%}")
        if self.worst_error > limits.worst_error:
            out.append(f"{self.name}: worst error {self.worst_error:.1%}, over {limits.worst_error:.0%}")
        return out

    @property
    def quality(self) -> str:
        """Return the relative errors, number, sizes and steps (unless all are 1) of the points, and `remark`."""
        steps = f" in {' or '.join(map(str, self.steps))} steps" if self.steps != (1,) else ""
        remark = f"; {self.remark}" if self.remark else ""
        return (
            f"median error {self.median_error:.1%}, worst {self.worst_error:.1%} over {self.num_points} points "
            f"of {self.smallest:.4g} to {self.largest:.4g}{steps}{remark}"
        )

    def describe(self, rate: Callable[[float], str] = format_bytes) -> str:
        """Return the constants in a line of text; `rate` formats the amount per second."""
        parts = [f"{rate(self.rate_per_s)}/s" if math.isfinite(self.rate_per_s) else "no rate"]
        if self.sync_s:
            parts.append(f"sync {format_s(self.sync_s)}")
        if self.launch_s:
            parts.append(f"launch {format_s(self.launch_s)}")
        return ", ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Return the constants and errors as JSON values; an infinite rate as None."""
        data = asdict(self)
        data["rate_per_s"] = self.rate_per_s if math.isfinite(self.rate_per_s) else None
        return data


def fit_samples(
    name: str, samples: Sequence[Sample], *, is_transfer: bool = True, max_per_s: float = math.inf
) -> Fit:
    """Return a fit of all constants that the samples can tell apart.

    With fewer than two samples, samples of one amount only, or a time that is not finite and positive, the rate
    is infinite, which `Fit.problems` calls a problem.

    Args:
        name: what is fitted, for `Fit.name`.
        is_transfer: a transfer has `sync` and, where steps differ enough to see it, `launch`; anything else
            (a product, a copy) has no steps and so no `sync`.
        max_per_s: the upper bound of the rate, which is what the links carry. Short steps take the time of
            this machine's cores, long steps that of the link; between the two, times grow more slowly than
            the link's rate says, and a fit without this bound would extrapolate that.
    """
    amounts = [sample.amount for sample in samples]
    steps = tuple(sorted({sample.steps for sample in samples}))
    seconds = np.array([sample.seconds for sample in samples], dtype=np.float64)
    if len(samples) < 2 or len(set(amounts)) < 2 or not (np.isfinite(seconds).all() and (seconds > 0).all()):
        usable = [float(s) for s in seconds if s > 0 and math.isfinite(s)]
        num = len(usable) if len(set(amounts)) > 1 else min(len(usable), 1)
        return Fit(name, 0.0, min(usable, default=0.0), math.inf, 0.0, 0.0, num, *_range(amounts), steps)
    table = np.array([[1.0, s.steps, s.steps * s.amount] for s in samples], dtype=np.float64)
    coefficients, remark = _fit_coefficients(table, seconds, 1 / max_per_s, is_transfer)
    launch_s, sync_s, per_unit_s = (float(value) for value in coefficients)
    misfit = np.abs(table @ coefficients / seconds - 1)
    return Fit(
        name,
        launch_s,
        sync_s,
        1 / per_unit_s if per_unit_s > 0 else math.inf,
        float(np.median(misfit)),
        float(misfit.max()),
        len(samples),
        *_range(amounts),
        steps,
        remark,
    )


def _fit_coefficients(
    table: Array, seconds: Array, least_per_unit_s: float, is_transfer: bool
) -> tuple[Array, str]:
    """Return launch, sync and seconds per unit, and what the data could not tell.

    Args:
        table: a row [1, steps, steps * amount] for each sample.
        least_per_unit_s: the lower bound of the seconds per unit.
    """
    remark = ""
    if not is_transfer:
        columns = [0, 2]
    elif len(set(table[:, 1])) > 1:
        columns = [0, 1, 2]
    else:
        columns = [1, 2]
        remark = "launch cannot be told from sync with one number of steps, and is in sync"
    min_s = table[:, 2] * least_per_unit_s
    coefficients, error = _robust(table[:, columns], seconds, min_s)
    if columns == [0, 1, 2] and coefficients[0] < _LAUNCH_STANDARD_ERRORS * error[0]:
        columns = [1, 2]
        coefficients, error = _robust(table[:, columns], seconds, min_s)
        remark = "launch cannot be told from zero"
    whole = np.zeros(3)
    whole[columns] = coefficients
    whole[2] += least_per_unit_s
    return whole, remark


def _range(amounts: Sequence[float]) -> tuple[float, float]:
    return min(amounts, default=0.0), max(amounts, default=0.0)


def _robust(columns: Array, seconds: Array, min_s: Array) -> tuple[Array, Array]:
    """Return coefficients of at least zero for the seconds above `min_s`, and their standard errors."""
    # Scaled to size one, or else bytes and seconds are 10 decades apart.
    scale = np.abs(columns).max(axis=0)
    rows, target = columns / scale / seconds[:, None], 1 - min_s / seconds
    weights = np.ones_like(seconds)
    coefficients = _non_negative(rows, target, weights)
    for iteration in range(60):
        residual = np.abs(rows @ coefficients - target)
        spread = max(1.4826 * float(np.median(residual)), _LEAST_SPREAD)
        if iteration < 30:
            weights = 1 / np.maximum(residual, 0.1 * spread)
        else:
            weights = np.minimum(1.0, _HUBER * spread / np.maximum(residual, 1e-12))
        coefficients = _non_negative(rows, target, weights)
    residual = rows @ coefficients - target
    free = max(len(seconds) - len(scale), 1)
    variance = float((weights * residual**2).sum()) / free
    covariance = np.linalg.pinv(rows.T @ (weights[:, None] * rows)) * max(variance, _LEAST_SPREAD**2)
    return coefficients / scale, np.sqrt(np.maximum(np.diag(covariance), 0.0)) / scale


def _non_negative(rows: Array, target: Array, weights: Array) -> Array:
    """Return the weighted least-squares coefficients of at least zero: the best of all subsets of columns.

    There are three columns at most, and so seven subsets: exact, and nothing to converge.
    """
    root = np.sqrt(weights)
    rows, target = rows * root[:, None], target * root
    count = rows.shape[1]
    best, least = np.zeros(count), float((target**2).sum())
    for size in range(1, count + 1):
        for chosen in combinations(range(count), size):
            part = np.linalg.lstsq(rows[:, chosen], target, rcond=None)[0]
            loss = float(((rows[:, chosen] @ part - target) ** 2).sum())
            if (part >= 0).all() and loss < least:
                best, least = np.zeros(count), loss
                best[list(chosen)] = part
    return best
