"""Scores of published training runs as Markdown: by source, the worst rows, and what was not predicted and why."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Sequence

from meshweave_studies.markdown import markdown_table
from meshweave_studies.training_runs.score import (
    LOW_ROWS_GOAL,
    LOW_TIME_GOAL,
    MEMORY_GOAL,
    ROW_GOAL,
    ROWS_GOAL,
    TIME_GOAL,
    ScoredRun,
    source_scores,
    summary_of,
)

_WIDTH = 58


def scores_csv(rows: Sequence[ScoredRun]) -> str:
    """Return as CSV the errors of rows that were predicted and count, with their chips: what the wheel ships."""
    out = io.StringIO()
    lines = csv.writer(out, lineterminator="\n")
    lines.writerow(("chip", "num_chips", "model", "stack", "precision", "experts", "fitted", "error", "mfu"))
    for row in rows:
        if row.error is not None and row.counts:
            experts, fitted = ("yes" if each else "no" for each in (row.experts, row.fitted))
            words = (row.chip, row.num_chips, row.model, row.stack, row.precision, experts, fitted)
            lines.writerow((*words, f"{row.error:.4f}", f"{row.mfu:.4f}"))
    return out.getvalue()


def runs_table(rows: Sequence[ScoredRun], num_worst: int = 10) -> str:
    """Return as Markdown the errors by source, the `num_worst` rows with the largest errors, the reasons of rows
    that were not predicted, and the summary.
    """
    return "\n".join(
        [source_table(rows), worst_table(rows, num_worst), reasons_table(rows), summary_line(rows)]
    )


def source_table(rows: Sequence[ScoredRun]) -> str:
    """Return the errors by source as a Markdown table."""
    head = ("source", "rows", "scored", "median error", "bias", "worst", f"within {ROW_GOAL:.0%}", "memory")
    lines = []
    for score in source_scores(rows):
        memory = "-" if score.memory_median is None else f"{score.memory_median:.1%} of {score.memory_rows}"
        if score.median is None or score.worst is None or score.bias is None:
            cells = ["-", "-", "-", "-", memory]
        else:
            cells = [
                f"{score.median:.1%}",
                f"{score.bias:+.1%}",
                f"{score.worst:.1%}",
                str(score.num_within),
                memory,
            ]
        lines.append([_short(score.source), str(score.rows), str(score.predicted), *cells])
    return markdown_table(head, "lrrrrrrr", lines)


def worst_table(rows: Sequence[ScoredRun], number: int) -> str:
    """Return the rows with the largest errors as a Markdown table, the worst first."""
    head = ("line", "source", "model", "chips", "metric", "published", "predicted", "error", "laid out as")
    lines = []
    judged = [row for row in rows if row.error is not None]
    for row in sorted(judged, key=lambda row: -abs(row.error or 0.0))[:number]:
        words = str(row.line), _short(row.source), row.model, row.chips, row.metric
        figures = f"{row.published:g}", f"{row.predicted:.4g}", f"{row.error:+.1%}"
        lines.append((*words, *figures, row.choice))
    return markdown_table(head, "rllllrrrl", lines)


def worst_memory_table(rows: Sequence[ScoredRun], number: int) -> str:
    """Return the rows with the largest errors of memory as a Markdown table, the worst first; "" without any."""
    judged = [row for row in rows if row.memory_error is not None]
    if not judged:
        return ""
    head = ("line", "source", "model", "chips", "published", "predicted", "error", "laid out as")
    lines = []
    for row in sorted(judged, key=lambda row: -abs(row.memory_error or 0.0))[:number]:
        words = str(row.line), _short(row.source), row.model, row.chips
        figures = f"{row.published_gb:.1f} GB", f"{row.predicted_gb:.1f} GB", f"{row.memory_error:+.1%}"
        lines.append((*words, *figures, row.choice))
    return markdown_table(head, "rlllrrrl", lines)


def reasons_table(rows: Sequence[ScoredRun]) -> str:
    """Return why rows were not predicted, and how many, as a Markdown table."""
    reasons = Counter((_short(row.source), row.reason) for row in rows if row.reason)
    if not reasons:
        return ""
    lines = [(source, str(count), reason) for (source, reason), count in reasons.items()]
    return markdown_table(("not predicted", "rows", "reason"), "lrl", lines)


def summary_line(rows: Sequence[ScoredRun]) -> str:
    """Return the score over all sources in a line, beside the goals; of rows below 16 bits in one more."""
    low = [row for row in rows if row.precision]
    if not low:
        return _summary(rows, "rows", TIME_GOAL, ROWS_GOAL)
    whole = _summary([row for row in rows if not row.precision], "rows", TIME_GOAL, ROWS_GOAL)
    return f"{whole}\n\n{_summary(low, 'rows below 16 bits', LOW_TIME_GOAL, LOW_ROWS_GOAL)}"


def _summary(rows: Sequence[ScoredRun], what: str, time_goal: float, rows_goal: float) -> str:
    summary = summary_of(rows)
    if summary.median is None or summary.within is None:
        return f"none of {len(rows)} {what} can be predicted"
    memory = ""
    if summary.memory_median is not None:
        memory = f"; memory {summary.memory_median:.1%} of {summary.memory_rows} (goal {MEMORY_GOAL:.0%})"
    return (
        f"{summary.rows} of {len(rows)} {what} scored, {summary.sources} sources: median of their medians "
        f"{summary.median:.1%} (goal {time_goal:.0%}); {summary.within:.0%} of rows within {ROW_GOAL:.0%} "
        f"(goal {rows_goal:.0%}){memory}"
    )


def _short(source: str) -> str:
    if len(source) <= _WIDTH:
        return source
    return f"{source[: _WIDTH - 26].rstrip()} ... {source[-21:].lstrip()}"


def runs_page(rows: Sequence[ScoredRun], sweeps: str = "", cells: str = "") -> str:
    """Return a page with the scores of all rows, Markdown.

    Args:
        sweeps: a table of the order of rows within sweeps.
        cells: published bests of sweeps beside predicted ones, in words and a table.
    """
    page = [
        "# Published training runs beside predicted steps",
        "",
        "`meshweave reproduce published --report FILE` writes this page. A prediction is `mw.step` of what a row",
        "states. Constants of stacks were fitted on half of the families of models, by a hash; the others judge.",
        "",
        summary_line(rows),
        "",
    ]
    for title, chosen in (
        ("All predicted rows", [row for row in rows if row.error is not None]),
        ("Families that judge", [row for row in rows if row.error is not None and not row.fitted]),
        ("Families that were fitted", [row for row in rows if row.error is not None and row.fitted]),
    ):
        if chosen:
            page += [f"## {title}", "", summary_line(chosen), "", source_table(chosen)]
    if sweeps:
        page += ["## Order within sweeps", "", sweeps]
    if cells:
        page += ["## Best configurations of sweeps", "", cells]
    page += [
        "## Rows with the largest errors",
        "",
        worst_table(rows, 30),
        "## Rows with the largest errors of memory",
        "",
        worst_memory_table(rows, 15),
        "## Not predicted",
        "",
        reasons_table(rows),
    ]
    return "\n".join(page).rstrip("\n") + "\n"
