"""Scores of kernels as a Markdown table."""

from __future__ import annotations

from collections.abc import Sequence

from meshweave.reproduce.kernels.score import Score

_HEAD = ("device", "dtype or kind", "priced by", "rows of", "rows", "mean", "median", "worst")


def score_table(scores: Sequence[Score]) -> str:
    """Return scores as a Markdown table, errors in percent."""
    lines = [f"| {' | '.join(_HEAD)} |", "|---|---|---|---|---:|---:|---:|---:|"]
    for score in scores:
        errors = (percent(error) for error in (score.mean, score.median, score.worst))
        cells = score.device, score.group, score.method, score.subset, str(score.rows), *errors
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def percent(error: float | None) -> str:
    """Return a relative error in percent with one digit, "-" for None."""
    return "-" if error is None else f"{100 * error:.1f} %"
