"""Rows as Markdown, and rows with pictures as one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from meshweave.report.page import page, table
from meshweave.reproduce.figures import Figure
from meshweave.reproduce.pictures import pictures
from meshweave.reproduce.verdict import DIFFERS, HOLDS, NEAR, JudgedRow, count_verdicts


@dataclass(frozen=True)
class PaperSummary:
    """What the head of a table says of its rows and figures.

    Attributes:
        machines: names of the clusters, each with the source of its constants.
        method: how our values were computed.
        findings: sentences about what the numbers say together.
    """

    title: str
    citation: str
    machines: tuple[tuple[str, str], ...]
    method: str
    findings: tuple[str, ...] = ()

    @property
    def names(self) -> str:
        """The names of the machines."""
        return " and ".join(name for name, _ in self.machines)


HEAD = ("what", "model", "published", "ours", "unit", "verdict", "where", "remark")
_COLOURS = {HOLDS: "#2a9d76", NEAR: "#b8860b", DIFFERS: "#c23b3b"}


def format_number(value: float | None) -> str:
    """Return a number with four digits, "-" for None."""
    return "-" if value is None else f"{value:.4g}"


def cells(row: JudgedRow) -> tuple[str, ...]:
    """Return the cells of a row, in the order of `HEAD`."""
    published, ours = format_number(row.published), format_number(row.ours)
    return row.what, row.model, published, ours, row.unit, row.verdict, row.where, row.remark


def verdict_summary(rows: Sequence[JudgedRow], about: PaperSummary) -> str:
    """Return a sentence: how many rows there are, and how many have each verdict."""
    counts = ", ".join(f"{count} {verdict}" for verdict, count in count_verdicts(list(rows)).items())
    return f"{len(rows)} numbers on {about.names}, by {about.method}: {counts}."


def markdown(rows: Sequence[JudgedRow], about: PaperSummary) -> str:
    """Return the rows as a Markdown table, with the findings below."""
    lines = [verdict_summary(rows, about), ""]
    lines += [f"| {' | '.join(HEAD)} |", "|---|---|---:|---:|---|---|---|---|"]
    lines += [f"| {' | '.join(cells(row))} |" for row in rows]
    lines += ["", *(f"- {finding}" for finding in about.findings)] if about.findings else []
    return "\n".join(lines) + "\n"


def row_json(row: JudgedRow) -> dict[str, Any]:
    """Return a row as plain values."""
    return {
        "id": row.id,
        "model": row.model,
        "what": row.what,
        "where": row.where,
        "unit": row.unit,
        "published": row.published,
        "ours": row.ours,
        "verdict": row.verdict,
        "fitted": row.fitted,
        "why": row.why,
        "detail": row.detail,
        "reason": row.reason,
    }


def html(rows: Sequence[JudgedRow], figures: Sequence[Figure], about: PaperSummary) -> str:
    """Return one self-contained page: the table, then all pictures, each with its data."""
    title = f"{about.title}, reproduced on {about.names}"
    lines = []
    for row in rows:
        colour = _COLOURS.get(row.verdict, "#5a6673")
        told = [escape(cell) for cell in cells(row)]
        told[5] = f'<span style="color:{colour}">{told[5]}</span>'
        told = [f'<span style="white-space:normal">{cell}</span>' for cell in told]
        lines.append(("", told))
    left = ("what", "model", "unit", "verdict", "where", "remark")
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="quiet">{escape(about.citation)}</p>',
        f'<p class="lead">{escape(verdict_summary(rows, about))}</p>',
        table(HEAD, lines, left) if rows else "",
        *(f"<p>{escape(finding)}</p>" for finding in about.findings),
    ]
    for figure in figures:
        parts.append(f"<h2>Figure {figure.number}: {escape(figure.title)}</h2>")
        for panel in figure.panels:
            drawn = pictures(figure)[panel.model]
            body = [("", [escape(_cell(cell)) for cell in row]) for row in panel.rows]
            data = table(panel.columns, body, panel.columns[:1])
            parts.append(f'<div class="wide">{drawn}</div>')
            notes = "".join(f'<p class="quiet">{escape(note)}</p>' for note in panel.notes)
            parts.append(f"<details><summary>{escape(panel.model)}: data</summary>{data}{notes}</details>")
    for name, source in about.machines:
        parts.append(f'<p class="quiet">Constants of {escape(name)}: {escape(source)}</p>')
    return page(title, "\n".join(parts))


def _cell(cell: str | float | None) -> str:
    return cell if isinstance(cell, str) else format_number(cell)
