"""Every paper under every reading, one after the other, and the page that counts how their rows come out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from meshweave.base.errors import UnsupportedError, require_known
from meshweave_studies import papers
from meshweave_studies.papers import ProgressBar
from meshweave_studies.reproduction import Reproduction
from meshweave_studies.verdict import DIFFERS, HOLDS, NEAR


@dataclass(frozen=True)
class PaperRun:
    """A paper under one of its readings.

    Attributes:
        paper: the paper's short name.
        reading: "" where the paper has one.
        compute: returns the rows and figures; takes what shows how many are done.
    """

    paper: str
    reading: str
    compute: Callable[[ProgressBar], Reproduction]

    @property
    def name(self) -> str:
        """Return the paper and the reading, for people."""
        return f"{self.paper}, {self.reading}" if self.reading else self.paper


def every_run() -> Iterator[PaperRun]:
    """Yield the papers under all their readings, the longest run last."""
    for paper, (compute, readings) in papers.STUDIES.items():
        for name, reading in readings.items():
            # Of links that both axes share there is no simulation.
            more = {"by": "estimate"} if getattr(reading, "rule", "") == "pooled" else {}
            yield PaperRun(paper, name, partial(_run, partial(compute, reading=name, **more)))
        if not readings:
            yield PaperRun(paper, "", partial(_run, compute))


def _run(compute: Callable[..., Reproduction], progress_bar: ProgressBar) -> Reproduction:
    return compute(progress_bar=progress_bar)


def runs_of(names: Sequence[str] = ()) -> tuple[PaperRun, ...]:
    """Return the runs of some papers, or of all where none is named. Raises UnsupportedError for others."""
    runs = tuple(every_run())
    known = list(dict.fromkeys(run.paper for run in runs))
    for name in names:
        require_known(name, known, "there is no paper", UnsupportedError, "papers:")
    return tuple(run for run in runs if not names or run.paper in names)


def counts_page(runs: Iterable[tuple[PaperRun, Reproduction]]) -> str:
    """Return a page in Markdown: how many rows of each run count, hold, are near, differ and are listed.

    Rows that differ follow by name, with what they come from.
    """
    head = ["| | rows | count | hold | near | differ | listed |", "|---|---:|---:|---:|---:|---:|---:|"]
    lines, missed = [], []
    for run, reproduction in runs:
        counted = [row for row in reproduction.rows if row.counts]
        of = [sum(row.verdict == verdict for row in counted) for verdict in (HOLDS, NEAR, DIFFERS)]
        listed = sum(bool(row.listed) for row in reproduction.rows)
        numbers = (len(reproduction.rows), len(counted), *of, listed)
        lines.append(f"| [{run.name}]({reproduction.stem}.md) | {' | '.join(map(str, numbers))} |")
        for row in counted:
            if row.verdict == DIFFERS:
                values = f"{row.published:.4g} | {row.ours:.4g} {row.unit}"
                missed.append(f"| {run.name} | {row.id} | {row.model} | {values} | {row.why} |")
    return "\n".join(
        (
            "# Every paper, computed again\n",
            *head,
            *lines,
            "\n## Rows that count and differ\n",
            "| run | row | of | published | ours | comes from |",
            "|---|---|---|---:|---:|---|",
            *missed,
            "",
        )
    )
