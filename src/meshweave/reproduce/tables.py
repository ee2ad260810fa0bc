"""Rows as Markdown, and rows with pictures as one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from meshweave.report.page import page, table
from meshweave.reproduce.figures import Figure
from meshweave.reproduce.pictures import pictures
from meshweave.reproduce.times import By
from meshweave.reproduce.verdict import DIFFERS, HOLDS, NEAR, Row, count_verdicts

HEAD = ("what", "model", "published", "ours", "unit", "verdict", "where", "remark")
_COLOURS = {HOLDS: "#2a9d76", NEAR: "#b8860b", DIFFERS: "#c23b3b"}


def shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def cells(row: Row) -> tuple[str, ...]:
    """In the order of `HEAD`."""
    published, ours = shown(row.published), shown(row.ours)
    return row.what, row.model, published, ours, row.unit, row.verdict, row.where, row.remark


def lead(rows: Sequence[Row], cluster: str, by: By) -> str:
    counts = ", ".join(f"{count} {verdict}" for verdict, count in count_verdicts(list(rows)).items())
    way = "estimates" if by == "estimate" else "simulation; meshes and slice counts chosen by estimate"
    return f"{len(rows)} numbers on {cluster}, by {way}: {counts}."


def markdown(rows: Sequence[Row], cluster: str, by: By) -> str:
    lines = [lead(rows, cluster, by), ""]
    lines += [f"| {' | '.join(HEAD)} |", "|---|---|---:|---:|---|---|---|---|"]
    lines += [f"| {' | '.join(cells(row))} |" for row in rows]
    return "\n".join(lines) + "\n"


def row_json(row: Row) -> dict[str, Any]:
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


def html(rows: Sequence[Row], figures: Sequence[Figure], cluster: str, source: str, by: By) -> str:
    """One self-contained page: the table, then all pictures, each with its data."""
    title = f"MeshSlice, reproduced on {cluster}"
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
        '<p class="quiet">Nam, Gerogiannis, Torrellas: MeshSlice (ISCA \'25, doi 10.1145/3695053.3731077).</p>',
        f'<p class="lead">{escape(lead(rows, cluster, by))}</p>',
        table(HEAD, lines, left) if rows else "",
    ]
    for figure in figures:
        parts.append(f"<h2>Figure {figure.number}: {escape(figure.title)}</h2>")
        for panel in figure.panels:
            drawn = pictures(figure)[panel.model]
            body = [("", [escape(_cell(cell)) for cell in row]) for row in panel.rows]
            data = table(panel.columns, body, panel.columns[:1])
            parts.append(f'<div class="wide">{drawn}</div>')
            parts.append(f"<details><summary>{escape(panel.model)}: data</summary>{data}</details>")
    parts.append(f'<p class="quiet">Constants of {escape(cluster)}: {escape(source)}</p>')
    return page(title, "\n".join(parts))


def _cell(cell: str | float | None) -> str:
    return cell if isinstance(cell, str) else shown(cell)
