"""Scores of kernels as a Markdown table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshweave_studies.kernels.score import Score
from meshweave_studies.markdown import markdown_table

_HEAD = ("device", "dtype or kind", "priced by", "rows of", "rows", "mean", "median", "worst")


def score_table(scores: Sequence[Score]) -> str:
    """Return scores as a Markdown table, errors in percent."""
    lines = []
    for score in scores:
        errors = (percent(error) for error in (score.mean, score.median, score.worst))
        lines.append((score.device, score.group, score.method, score.subset, str(score.rows), *errors))
    return markdown_table(_HEAD, "llllrrrr", lines)


def percent(error: float | None) -> str:
    """Return a relative error in percent with one digit, "-" for None."""
    return "-" if error is None else f"{100 * error:.1f} %"


def results_page(results: Mapping[str, Any]) -> str:
    """Return the page of the results of `validation/fit_kernels.py`, Markdown."""
    parts, middle = results["parts"], results["middle_m"]
    lines = [
        "# Kernels: predicted times beside measured ones",
        "",
        f"Data: {results['data']}. Each row is predicted by constants, or by a table, of the other {parts - 1} of "
        f"{parts} parts: all products of one (n, k), attentions of one head count and length, and collectives of "
        "one number of chips and size are in one part. `python validation/fit_kernels.py` writes this page.",
        "",
    ]
    for kind, scores in results["held_out"].items():
        both = [*scores, *results["overall"][kind]]
        lines += [f"## {kind}", "", score_table([Score(**score) for score in both])]
    lines += [
        "## Thirds of the rows",
        "",
        "Each third of the products, drawn by a hash of m, n and k, predicted by the others.",
        "",
        score_table([Score(**score) for score in results["thirds"]]),
        "## Extrapolation in m",
        "",
        f"Products of m >= 256: fitted up to m = {middle}, scored above; and back.",
    ]
    for name, scores in results["extrapolated"].items():
        lines += ["", f"### {name}", "", score_table([Score(**score) for score in scores])]
    return "\n".join(lines).rstrip("\n") + "\n"


def tpu_page(results: Mapping[str, Any]) -> str:
    """Return the page of the results of `validation/fit_tpu.py`, Markdown."""
    scores = [Score(**{key: row[key] for key in row if key != "fitted"}) for row in results["held_out"]]
    lines = [
        "# TPU products: predicted times beside the compiler's",
        "",
        f"Cycles that XLA's compiler for TPUs expects ({results['versions']}) of single products, operands and "
        f"result in the chip's memory. Of each device, {results['scored']} products are scored by constants "
        "fitted on the others, beside those of the same (n, k) with C in float32; all products of one (n, k) are "
        "on one side. These are expectations of a compiler, not measurements. `python validation/fit_tpu.py` "
        "writes this page.",
        "",
        score_table(scores),
    ]
    return "\n".join(lines).rstrip("\n") + "\n"
