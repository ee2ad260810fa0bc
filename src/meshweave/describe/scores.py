"""How far predicted steps were from published training runs: the saved scores that ship with the package.

`catalog/scores.csv` has a line for each run that was predicted and counts. `meshweave reproduce published
--scores` of meshweave-studies writes it.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from statistics import median


@dataclass(frozen=True)
class RunScore:
    """A predicted run.

    Attributes:
        chip: name of the chip, as in its cluster's description.
        model: as the source calls it.
        fitted: whether constants of software were fitted on the model's family.
        error: predicted over published, less 1.
    """

    chip: str
    num_chips: int
    model: str
    fitted: bool
    error: float


@cache
def run_scores() -> tuple[RunScore, ...]:
    """Return the saved scores, in the order of their file."""
    text = (files("meshweave") / "catalog" / "scores.csv").read_text(encoding="utf-8")
    return tuple(
        RunScore(
            row["chip"], int(row["num_chips"]), row["model"], row["fitted"] == "yes", float(row["error"])
        )
        for row in csv.DictReader(text.splitlines())
    )


def error_of_runs_like(chip: str) -> str:
    """Return how far predictions were off for published runs on a chip, of models on which nothing was fitted."""
    errors = [abs(score.error) for score in run_scores() if score.chip == chip and not score.fitted]
    if not errors:
        return f"no published run on {chip} was predicted"
    runs = f"{len(errors)} published runs" if len(errors) > 1 else "one published run"
    within = sum(error <= 0.2 for error in errors)
    return (
        f"{runs} on {chip}, predicted: median off by {100 * median(errors):.1f} %, {within} within 20 %, worst "
        f"{100 * max(errors):.0f} %"
    )
