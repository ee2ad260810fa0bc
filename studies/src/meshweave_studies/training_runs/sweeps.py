"""Sweeps among published runs: whether predictions order their rows as the measurements do.

A sweep is all rows of a source with the same model, software and precision that differ in one thing: sequence
length, chips, the schedule of a pipeline with as many micro-batches, or, of vTrain's runs on as many chips with as
large a batch, the layout.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import correlation, mean
from typing import Any

from meshweave_studies.markdown import markdown_table
from meshweave_studies.training_runs.models import size_of
from meshweave_studies.training_runs.rows import PublishedRun
from meshweave_studies.training_runs.score import ScoredRun

LEAST_ROWS = 3
"""Two rows have no order worth a correlation."""
LEAST_SPREAD = 0.03
"""Figures that differ by no more have no order that a measurement shows."""
GOAL = 0.7
_MICRO_BATCHES = re.compile(r"(\d+) micro-?batches", re.IGNORECASE)


@dataclass(frozen=True)
class RunSweep:
    """Rows that differ in one thing, and Spearman's rank correlation of predicted with published figures.

    Attributes:
        model: the size in the models' names, such as "7b"; for "layout" the name.
        varies: "schedule", "layout", "sequence" or "chips".
        rows: how many rows.
        spread: by which share the greatest published figure is above the least.
    """

    source: str
    model: str
    varies: str
    rows: int
    correlation: float
    spread: float

    def to_json(self) -> dict[str, Any]:
        """Return the sweep as plain values."""
        return asdict(self)


def sweeps_of(runs: Sequence[PublishedRun], rows: Sequence[ScoredRun]) -> list[RunSweep]:
    """Return the sweeps of at least `LEAST_ROWS` rows; `rows` are the predictions of `runs` in order."""
    groups: dict[tuple[str, ...], list[ScoredRun]] = {}
    for run, row in zip(runs, rows, strict=True):
        if row.predicted is None:
            continue
        micro_batches = _MICRO_BATCHES.search(run.config)
        same = run.metric, row.stack, row.precision
        if micro_batches:
            keys = [(size_of(run), "schedule", micro_batches[1])]
        elif "vTrain" in run.source:
            keys = [(run.model, "layout", f"{run.chips} {run.count('gbs')}")]
        elif run.count("seq"):
            keys = [(size_of(run), "sequence", run.chips), (size_of(run), "chips", str(run.count("seq")))]
        else:
            keys = []
        for key in keys:
            groups.setdefault((run.source, *key, *same), []).append(row)
    return [
        RunSweep(source, model, varies, len(group), round(ordered, 4), round(_spread(group), 4))
        for (source, model, varies, *_), group in groups.items()
        if len(group) >= LEAST_ROWS and (ordered := rank_correlation(group)) is not None
    ]


def rank_correlation(rows: Sequence[ScoredRun]) -> float | None:
    """Return Spearman's rank correlation of predicted with published figures; None where all of one are equal."""
    published = _ranks([row.published for row in rows])
    predicted = _ranks([row.predicted or 0.0 for row in rows])
    return None if 1 in (len({*published}), len({*predicted})) else correlation(published, predicted)


def _spread(rows: Sequence[ScoredRun]) -> float:
    figures = [row.published for row in rows]
    return max(figures) / min(figures) - 1


def _ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value, equal ones with the mean of theirs."""
    order = sorted(values)
    return [order.index(value) + (order.count(value) - 1) / 2 for value in values]


def sweep_table(sweeps: Sequence[RunSweep]) -> str:
    """Return how many sweeps whose figures differ reach `GOAL`, and a Markdown table by source and what varies."""
    differ = [sweep for sweep in sweeps if sweep.spread > LEAST_SPREAD]
    reach = sum(sweep.correlation >= GOAL for sweep in differ)
    text = f"{reach} of {len(differ)} sweeps whose figures differ by more than {LEAST_SPREAD:.0%} reach {GOAL}\n\n"
    lines = []
    for source, varies in dict.fromkeys((sweep.source, sweep.varies) for sweep in sweeps):
        of = [sweep for sweep in sweeps if (sweep.source, sweep.varies) == (source, varies)]
        correlations = [sweep.correlation for sweep in of]
        numbers = str(len(of)), str(sum(sweep.rows for sweep in of))
        figures = f"{mean(correlations):.2f}", f"{min(correlations):.2f}"
        lines.append((source.split(" (")[0], varies, *numbers, *figures))
    head = ("source", "varies", "sweeps", "rows", "mean rank correlation", "least")
    return text + markdown_table(head, "llrrrr", lines)
