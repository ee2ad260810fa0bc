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
        stack: the software stack that it was predicted with.
        precision: the recipe of its products below 16 bits; "" where they ran in 16.
        fitted: whether constants of software were fitted on the model's family.
        error: predicted over published, less 1.
    """

    chip: str
    num_chips: int
    model: str
    stack: str
    precision: str
    fitted: bool
    error: float


@cache
def run_scores() -> tuple[RunScore, ...]:
    """Return the saved scores, in the order of their file."""
    text = (files("meshweave") / "catalog" / "scores.csv").read_text(encoding="utf-8")
    return tuple(
        RunScore(
            row["chip"],
            int(row["num_chips"]),
            row["model"],
            row["stack"],
            row["precision"],
            row["fitted"] == "yes",
            float(row["error"]),
        )
        for row in csv.DictReader(text.splitlines())
    )


def _fitted_on(chip: str) -> str:
    """Return how many runs on a chip constants were fitted on, as the end of a sentence; "" for none."""
    number = sum(score.fitted for score in run_scores() if score.chip == chip)
    return f" that could judge: software was fitted on the {number} that are known" if number else ""


def error_of_runs_like(chip: str, stack: str = "", *, is_low: bool = False) -> str:
    """Return how far predictions were off for published runs on a chip, of models on which nothing was fitted.

    Runs of `stack` count alone where there are such, else those of all stacks, each predicted with its own; with
    products below 16 bits (`is_low`), or above.
    """
    scores = [score for score in run_scores() if score.chip == chip and not score.fitted]
    scores = [score for score in scores if bool(score.precision) == is_low]
    own = [score for score in scores if score.stack == stack]
    errors = [abs(score.error) for score in own or scores]
    if not errors:
        low = "below 16 bits " if is_low else ""
        return f"no published run {low}on {chip} has a saved score{_fitted_on(chip)}"
    runs = f"{len(errors)} published runs" if len(errors) > 1 else "one published run"
    of_stack = f" with {stack}" if own else ""
    of_stack += " below 16 bits" if is_low else ""
    within = sum(error <= 0.2 for error in errors)
    return (
        f"{runs} on {chip}{of_stack}, predicted: median off by {100 * median(errors):.1f} %, {within} within "
        f"20 %, worst {100 * max(errors):.0f} %"
    )
