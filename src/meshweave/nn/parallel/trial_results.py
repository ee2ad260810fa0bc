"""Times of trials that are kept in a file, and what later predictions are corrected by."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from meshweave.base.errors import LayoutError, printable


def is_number(value: Any, least: float = 0.0, most: float = 1e300) -> bool:
    """Return whether a value is an int or float from `least` to `most`; false for bools and nan."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


class MeasuredPlan(Protocol):
    """What a file of trials keeps of a plan that was tried."""

    @property
    def kind(self) -> str:
        """Return the kind of plan ("data", "zero", ...), whose measured times correct predictions of that kind."""

    @property
    def words(self) -> str:
        """Return the plan's name in tables."""

    @property
    def predicted_s(self) -> float | None:
        """Return the predicted seconds of a step; None where there is no prediction."""

    @property
    def measured_s(self) -> float | None:
        """Return the measured seconds of a step; None where it was not run."""


def keep_results(path: str | Path | None, trials: Iterable[MeasuredPlan]) -> None:
    """Append to the file `path` the predicted and measured seconds of those trials that ran; do nothing for None.

    Raises LayoutError where it cannot be written, or is no file of trials.
    """
    if path is None:
        return
    rows = _kept(path) + [
        {
            "kind": trial.kind,
            "words": trial.words,
            "predicted_s": trial.predicted_s,
            "measured_s": trial.measured_s,
        }
        for trial in trials
        if trial.measured_s is not None
    ]
    try:
        partial = Path(path).with_name(f".{Path(path).name}.partial")
        partial.write_text(json.dumps({"trials": rows}, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise LayoutError(f"trials cannot be kept in {path}: {error.strerror}; give another file") from error


def corrections_of(path: str | Path | None) -> dict[str, float]:
    """Return {kind of plan: median of measured over predicted seconds} of the trials in a file.

    It is {} for None, and where there is no such file. Raises LayoutError where it is no file of trials.
    """
    ratios: dict[str, list[float]] = {}
    for row in _kept(path) if path is not None else []:
        if row.get("predicted_s"):
            ratios.setdefault(row["kind"], []).append(row["measured_s"] / row["predicted_s"])
    return {kind: statistics.median(values) for kind, values in ratios.items()}


def usable_corrections(path: str | Path | None) -> dict[str, float]:
    """Return what `corrections_of` returns, after a check that the folder of the file is there to write to.

    Raises LayoutError where the folder is not there, or the file is no file of trials.
    """
    if path is not None and not Path(path).absolute().parent.is_dir():
        raise LayoutError(f"trials cannot be kept in {path}: there is no such folder")
    return corrections_of(path)


def _kept(path: str | Path) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = json.loads(Path(path).read_text(encoding="utf-8"))["trials"]
        is_right = isinstance(rows, list) and all(map(_is_kept_row, rows))
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        is_right = False
    if not is_right:
        raise LayoutError(f"{path} is no file of kept trials; give another, or remove it")
    return rows


def _is_kept_row(row: Any) -> bool:
    """Return whether a row is one that `keep_results` writes."""
    if not isinstance(row, dict) or not isinstance(row.get("kind"), str):
        return False
    predicted, measured = row.get("predicted_s"), row.get("measured_s")
    return (predicted is None or is_number(predicted)) and is_number(measured)


def check_numbers(steps: Any, seconds: Any, within: Any) -> None:
    """Raise LayoutError unless `steps` is an integer, and `seconds` and the share `within` numbers, all >= 0."""
    if not isinstance(steps, int) or not is_number(steps):
        raise LayoutError(f"steps of a trial are a whole number from 0 on, not {printable(steps)}")
    for name, value in (("seconds", seconds), ("within", within)):
        if not is_number(value, most=math.inf):
            raise LayoutError(f"{name} of trials is a number from 0 on, not {printable(value)}")
