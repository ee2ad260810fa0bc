"""Every paper under every reading, one after the other, and the page that counts how their rows come out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from meshweave.base.errors import UnsupportedError, require_known
from meshweave_studies import papers
from meshweave_studies.alpacomm.readings import READINGS as ALPACOMM_READINGS
from meshweave_studies.atp.readings import READINGS as ATP_READINGS
from meshweave_studies.meshslice.readings import READINGS as MESHSLICE_READINGS
from meshweave_studies.meshslice.times import Reading
from meshweave_studies.papers import ProgressBar
from meshweave_studies.reproduction import Reproduction
from meshweave_studies.slicing.readings import READINGS as SLICING_READINGS
from meshweave_studies.t3.readings import READINGS as T3_READINGS
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
    for reading, of in MESHSLICE_READINGS.items():
        by: Reading = "estimate" if of.rule == "pooled" else "simulate"
        yield _run(papers.MESHSLICE, reading, partial(papers.reproduce_meshslice, reading=reading, by=by))
    for reading in SLICING_READINGS:
        yield _run(papers.SLICING, reading, partial(papers.reproduce_slicing, reading=reading))
    for reading in ALPACOMM_READINGS:
        yield _run(papers.ALPACOMM, reading, partial(papers.reproduce_alpacomm, reading=reading))
    for reading in ATP_READINGS:
        yield _run(papers.ATP, reading, partial(papers.reproduce_atp, reading=reading))
    yield _run(papers.ZERO_BUBBLE, "", papers.reproduce_zero_bubble)
    for reading in T3_READINGS:
        yield _run(papers.T3, reading, partial(papers.reproduce_t3, reading=reading))


def _run(paper: str, reading: str, compute: Callable[..., Reproduction]) -> PaperRun:
    return PaperRun(paper, reading, lambda progress_bar: compute(progress_bar=progress_bar))


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
