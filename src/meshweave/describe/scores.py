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
    """A published training run with the error of its prediction.

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


def runs_on(
    chip: str, stack: str = "", is_low: bool | None = None, *, fitted: bool = False
) -> tuple[RunScore, ...]:
    """Return the runs on a chip that judge predictions; with `fitted` those that software was fitted on.

    Args:
        stack: the stack that they were predicted with; "" for all.
        is_low: whether their products were below 16 bits; None for both.
    """
    return tuple(
        score
        for score in run_scores()
        if (score.chip, score.fitted) == (chip, fitted)
        and stack in ("", score.stack)
        and is_low in (None, bool(score.precision))
    )


def error_of_runs_like(chip: str, stack: str = "", *, is_low: bool = False) -> str:
    """Return in words how far predictions were off for published runs on a chip, of models not fitted on.

    Runs of `stack` count alone where there are such, else those of all stacks, each predicted with its own;
    with products below 16 bits (`is_low`), or above.
    """
    own = runs_on(chip, stack, is_low)
    scores = own or runs_on(chip, "", is_low)
    low = " below 16 bits" if is_low else ""
    if not scores:
        low = low or (" in 16 bits" if runs_on(chip, "", True) else "")
        fitted = len(runs_on(chip, "", is_low, fitted=True))
        known = f" that could judge: software was fitted on the {fitted} that are known" if fitted else ""
        return f"no published run{low} on {chip} has a saved score{known}"
    errors = [abs(score.error) for score in scores]
    runs = f"{len(errors)} published runs" if len(errors) > 1 else "one published run"
    of_stack = f" with {stack}" if own and stack else ""
    within = sum(error <= 0.2 for error in errors)
    return (
        f"{runs} on {chip}{of_stack}{low}, predicted: median off by {100 * median(errors):.1f} %, {within} within "
        f"20 %, worst {100 * max(errors):.0f} %"
    )


def evidence_on(chip: str, stack: str = "") -> tuple[bool, str]:
    """Return whether published runs on a chip judge predictions, and in words how far predictions were off.

    Runs in 16 bits and below are told apart. With a `stack` only its runs count.
    """
    lows = [is_low for is_low in (False, True) if runs_on(chip, stack, is_low)]
    if lows:
        return True, "; ".join(error_of_runs_like(chip, stack, is_low=is_low) for is_low in lows)
    if not stack:
        return False, error_of_runs_like(chip)
    if fitted := runs_on(chip, stack, fitted=True):
        number = f"{len(fitted)} published runs" if len(fitted) > 1 else "one published run"
        return False, f"its constants were fitted on {number} on {chip}, and none is left to judge by"
    return False, f"no published run of {stack} on {chip} has a saved score"
