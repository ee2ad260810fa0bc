"""How far predicted steps were from published training runs: the saved scores that ship with the package.

`catalog/scores.csv` has a line for each run that was predicted and counts. `meshweave reproduce published
--scores` of meshweave-studies writes it.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from statistics import median

MARGIN = 0.05
"""The share of a step's time by which a strategy that no published run has must win to be planned. Predictions are
off by as much: the median over the saved runs of dense models that nothing was fitted on."""


@dataclass(frozen=True)
class RunScore:
    """A published training run with the error of its prediction.

    Attributes:
        chip: name of the chip, as in its cluster's description.
        model: as the source calls it.
        stack: the software stack that it was predicted with.
        precision: the recipe of its products below 16 bits; "" where they ran in 16.
        is_routed: whether the model routes tokens to experts.
        fitted: whether constants of software were fitted on the model's family.
        error: the figure that the source publishes, such as tokens/s: predicted over published, less 1.
        mfu: the published utilization (0 to 1), with the FLOPs that a plan counts.
    """

    chip: str
    num_chips: int
    model: str
    stack: str
    precision: str
    is_routed: bool
    fitted: bool
    error: float
    mfu: float


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
            row["experts"] == "yes",
            row["fitted"] == "yes",
            float(row["error"]),
            float(row["mfu"]),
        )
        for row in csv.DictReader(text.splitlines())
    )


def runs_on(
    chip: str,
    stack: str = "",
    is_low: bool | None = None,
    *,
    is_routed: bool | None = False,
    fitted: bool = False,
) -> tuple[RunScore, ...]:
    """Return the saved runs on a chip, of models on whose family no constant was fitted, in file order.

    Args:
        chip: name of the chip, as in its cluster's description.
        stack: the stack that they were predicted with; "" for all.
        is_low: whether their products were below 16 bits; None for both.
        is_routed: whether their models have experts; None for both.
        fitted: True for the runs of the other models instead, on whose family constants were fitted.
    """
    return tuple(
        score
        for score in run_scores()
        if (score.chip, score.fitted) == (chip, fitted)
        and stack in ("", score.stack)
        and is_low in (None, bool(score.precision))
        and is_routed in (None, score.is_routed)
    )


def error_of_runs_like(
    chip: str, stack: str = "", *, is_low: bool = False, is_routed: bool = False, asked: str = ""
) -> str:
    """Return in words how far predictions were off for published runs on a chip, of models not fitted on.

    Runs of `stack` alone count where there are some; else those of all stacks, each predicted with its own.
    Where there are none, the words say so.

    Args:
        stack: the stack whose runs count; "" for all.
        is_low: whether runs with products below 16 bits count, or those in 16.
        is_routed: whether runs of models with experts count, or those of dense ones.
        asked: what the words call the stack that was priced, where that is not `stack`: the name of one with the
            constants of `stack`, or "kernels and links alone"; "" for `stack`.
    """
    own = runs_on(chip, stack, is_low, is_routed=is_routed)
    scores = own or runs_on(chip, "", is_low, is_routed=is_routed)
    kind = " of a model with experts" if is_routed else ""
    low = " below 16 bits" if is_low else ""
    if not scores:
        return _none_like(chip, kind, is_low, is_routed)
    runs = f"{len(scores)} published runs" if len(scores) > 1 else "one published run"
    kind = kind.replace("a model", "models") if len(scores) > 1 else kind
    of_stack = f" with {stack}" if own and stack else ""
    return (
        f"{runs}{kind} on {chip}{of_stack}{low}{_whose(scores, stack, asked)}, predicted: {_off_by(scores)}"
    )


def _whose(scores: Sequence[RunScore], stack: str, asked: str) -> str:
    """Return in words whose software the runs had, where it is not that of the stack that was asked for."""
    asked = asked or stack
    stacks = [name for name, _ in Counter(score.stack for score in scores).most_common()]
    if not asked or asked in stacks:
        return ""
    if stack in stacks:
        return f", whose constants {asked} has"
    return f" ({'runs' if len(scores) > 1 else 'a run'} of {', '.join(stacks)}; none of {asked})"


def _off_by(scores: Sequence[RunScore]) -> str:
    """Return in words the errors of runs; the worst has as many digits as the median."""
    errors = [abs(score.error) for score in scores]
    within, off = sum(error <= 0.2 for error in errors), f"{100 * median(errors):.1f} %"
    if len(errors) == 1:
        return f"off by {off}"
    return f"median off by {off}, {within} within 20 %, worst {100 * max(errors):.1f} %"


def _none_like(chip: str, kind: str, is_low: bool, is_routed: bool) -> str:
    """Return in words that no run judges, and whether those of another kind are known, which say nothing of it."""
    low = " below 16 bits" if is_low else ""
    if not low and runs_on(chip, "", True, is_routed=is_routed):
        low = " in 16 bits"
    fitted = len(runs_on(chip, "", is_low, is_routed=is_routed, fitted=True))
    known = f" that could judge: software was fitted on the {fitted} that are known" if fitted else ""
    text = f"no published run{kind}{low} on {chip} has a saved score{known}"
    if is_routed and runs_on(chip, "", is_low):
        text += "; those of dense models say nothing of it"
    return text


def evidence_on(chip: str, stack: str = "", *, is_routed: bool = False) -> tuple[bool, str]:
    """Return (whether saved runs on a chip judge predictions, in words how far off these were or why none does).

    Only runs of models on whose family no constant was fitted count. Those in 16 bits and those below have words
    of their own.

    Args:
        chip: name of the chip, as in its cluster's description.
        stack: the stack whose runs count; "" for all.
        is_routed: whether runs of models with experts count, or those of dense ones.
    """
    lows = [is_low for is_low in (False, True) if runs_on(chip, stack, is_low, is_routed=is_routed)]
    if lows:
        texts = (error_of_runs_like(chip, stack, is_low=is_low, is_routed=is_routed) for is_low in lows)
        return True, "; ".join(texts)
    if not stack:
        return False, error_of_runs_like(chip, is_routed=is_routed)
    kind = " of a model with experts" if is_routed else ""
    if fitted := runs_on(chip, stack, is_routed=is_routed, fitted=True):
        number = f"{len(fitted)} published runs" if len(fitted) > 1 else "one published run"
        kind = kind.replace("a model", "models") if len(fitted) > 1 else kind
        return False, f"its constants were fitted on {number}{kind} on {chip}, and none is left to judge by"
    return False, f"no published run of {stack}{kind.replace('of', 'with', 1)} on {chip} has a saved score"


@cache
def most_published_mfu() -> RunScore | None:
    """Return the run in 16 bits of the highest published utilization, on any chip; None where none is saved."""
    return max(
        (score for score in run_scores() if not score.precision), key=lambda run: run.mfu, default=None
    )
