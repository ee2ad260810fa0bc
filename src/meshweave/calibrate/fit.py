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
_MAX_FLOOR_PASSES = 20
"""In which points above a floor and below it are told apart."""
_LAUNCH_STANDARD_ERRORS = 2.0
"""Standard errors that a launch must be above zero to be told from the synchronisation."""


@dataclass(frozen=True)
class Sample:
    """One measured operation: it took `seconds` for `steps` steps that each move `amount` bytes.

    For a product, one step of `amount` FLOPs. However high the rate, moving takes `least_s` in all.
    """

    seconds: float
    amount: float
    steps: int = 1
    min_s: float = 0.0


@dataclass(frozen=True)
class FitLimits:
    """Above which relative error of a fit, and below which number of points, its data do not fit."""

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
        num_points, smallest, largest, steps: what the points cover.
        remark: what the data could not tell.
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
        """What the model says."""
        return self.launch_s + steps * (self.sync_s + amount / self.rate_per_s)

    def problems(self, limits: FitLimits) -> list[str]:
        """Why these constants are not to be used; empty where they are."""
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
        """The errors and what they are over, in a line."""
        steps = f" in {' or '.join(map(str, self.steps))} steps" if self.steps != (1,) else ""
        remark = f"; {self.remark}" if self.remark else ""
        return (
            f"median error {self.median_error:.1%}, worst {self.worst_error:.1%} over {self.num_points} points "
            f"of {self.smallest:.4g} to {self.largest:.4g}{steps}{remark}"
        )

    def describe(self, rate: Callable[[float], str] = format_bytes) -> str:
        """The constants in a line, for people."""
        parts = [f"{rate(self.rate_per_s)}/s" if math.isfinite(self.rate_per_s) else "no rate"]
        if self.sync_s:
            parts.append(f"sync {format_s(self.sync_s)}")
        if self.launch_s:
            parts.append(f"launch {format_s(self.launch_s)}")
        return ", ".join(parts)

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        data["rate_per_s"] = self.rate_per_s if math.isfinite(self.rate_per_s) else None
        return data


def fit_samples(
    name: str, samples: Sequence[Sample], *, is_transfer: bool = True, max_per_s: float = math.inf
) -> Fit:
    """Fits all constants that the samples can tell apart.

    Args:
        is_transfer: a transfer has `sync` and, where steps differ enough to see it, `launch`; anything else
            (a product, a copy) has no steps and so no `sync`.
        most_per_s: the rate is at most this, as the links carry no more. Where a step is a matter of this
            machine's cores as long as it is short, and of the link from then on, times grow by less than the
            link's rate in between, and a fit would extrapolate that.

    With fewer than two samples, or all of one amount, there is no rate: see `Fit.problems`.
    """
    steps = tuple(sorted({sample.steps for sample in samples}))
    amounts = [sample.amount for sample in samples]
    seconds = np.array([sample.seconds for sample in samples], dtype=np.float64)
    if len(samples) < 2 or len(set(amounts)) < 2 or not (np.isfinite(seconds).all() and (seconds > 0).all()):
        usable = [float(s) for s in seconds if s > 0 and math.isfinite(s)]
        low = min(usable, default=0.0)
        num = len(usable) if len(set(amounts)) > 1 else min(len(usable), 1)
        return Fit(name, 0.0, low, math.inf, 0.0, 0.0, num, *_range(amounts), steps)
    table = np.array([[1.0, s.steps, s.steps * s.amount] for s in samples], dtype=np.float64)
    columns, remark = [2], ""
    if is_transfer:
        columns = [1, 2]
        if len(steps) > 1:
            columns = [0, 1, 2]
        else:
            remark = "launch cannot be told from sync with one number of steps, and is in sync"
    else:
        columns = [0, 2]
    least_s = table[:, 2] / max_per_s
    found, error = _robust(table[:, columns], seconds, least_s)
    if columns == [0, 1, 2] and found[0] < _LAUNCH_STANDARD_ERRORS * error[0]:
        columns = [1, 2]
        found, error = _robust(table[:, columns], seconds, least_s)
        remark = "launch cannot be told from zero"
    floor_s = np.array([s.min_s for s in samples], dtype=np.float64)
    held = np.zeros(len(samples), dtype=bool)
    for _ in range(_MAX_FLOOR_PASSES if floor_s.any() else 0):
        # Points that the floor holds say nothing of the rate: without it they still tell launch and sync.
        before, held = held, table[:, 2] * (found[-1] + 1 / max_per_s) < floor_s
        if (held == before).all() or held.all():
            break
        freed = table.copy()
        freed[held, 2] = 0.0
        found, error = _robust(freed[:, columns], seconds, np.where(held, floor_s, least_s))
    whole = np.zeros(3)
    whole[columns] = found
    whole[2] += 1 / max_per_s
    launch_s, sync_s, per_unit_s = (float(value) for value in whole)
    moving_s = np.maximum(table[:, 2] * whole[2], floor_s)
    misfit = np.abs((table[:, :2] @ whole[:2] + moving_s) / seconds - 1)
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


def _range(amounts: Sequence[float]) -> tuple[float, float]:
    return min(amounts, default=0.0), max(amounts, default=0.0)


def _robust(columns: Array, seconds: Array, least_s: Array) -> tuple[Array, Array]:
    """Coefficients of at least zero for what the seconds are over `least_s`, and their standard errors."""
    # Scaled to size one, or else bytes and seconds are 10 decades apart.
    scale = np.abs(columns).max(axis=0)
    rows, target = columns / scale / seconds[:, None], 1 - least_s / seconds
    weights = np.ones_like(seconds)
    found = _non_negative(rows, target, weights)
    for turn in range(60):
        residual = np.abs(rows @ found - target)
        spread = max(1.4826 * float(np.median(residual)), _LEAST_SPREAD)
        if turn < 30:
            weights = 1 / np.maximum(residual, 0.1 * spread)
        else:
            weights = np.minimum(1.0, _HUBER * spread / np.maximum(residual, 1e-12))
        found = _non_negative(rows, target, weights)
    residual = rows @ found - target
    free = max(len(seconds) - len(scale), 1)
    variance = float((weights * residual**2).sum()) / free
    covariance = np.linalg.pinv(rows.T @ (weights[:, None] * rows)) * max(variance, _LEAST_SPREAD**2)
    return found / scale, np.sqrt(np.maximum(np.diag(covariance), 0.0)) / scale


def _non_negative(rows: Array, target: Array, weights: Array) -> Array:
    """Weighted least squares with coefficients of at least zero: the best of all subsets of columns.

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
