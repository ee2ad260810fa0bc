"""Rows as Markdown, and rows with pictures as one HTML page."""

from __future__ import annotations

from html import escape

from meshweave.report.page import page, table
from meshweave_studies.markdown import markdown_table, markdown_words
from meshweave_studies.pictures import pictures
from meshweave_studies.reproduction import CheckedOrdering, Reproduction
from meshweave_studies.verdict import DIFFERS, HOLDS, NEAR, JudgedRow, count_verdicts

ORDERINGS_HEAD = ("ordering", "holds in", "of", "where", "not in")
HEAD = ("what", "model", "published", "ours", "unit", "verdict", "where", "remark")
_COLOURS = {HOLDS: "#2a9d76", NEAR: "#b8860b", DIFFERS: "#c23b3b"}


def format_number(value: float | None) -> str:
    """Return a number with four digits, "-" for None."""
    return "-" if value is None else f"{value:.4g}"


def cells(row: JudgedRow) -> tuple[str, ...]:
    """Return the cells of a row, in the order of `HEAD`."""
    published, ours = format_number(row.published), format_number(row.ours)
    return row.what, row.model, published, ours, row.unit, row.verdict, row.where, row.remark


def ordering_cells(one: CheckedOrdering) -> tuple[str, ...]:
    """Return the cells of an ordering, in the order of `ORDERINGS_HEAD`."""
    return one.statement, str(one.holds), str(one.cases), one.where, "; ".join(one.wrong)


def verdict_summary(reproduction: Reproduction) -> str:
    """Return a sentence: how many rows there are, how many count, and how many of these have each verdict."""
    rows, summary = reproduction.rows, reproduction.summary
    counts = ", ".join(f"{count} {verdict}" for verdict, count in count_verdicts(rows).items())
    counted = sum(row.counts for row in rows)
    return f"{len(rows)} rows on {summary.names}, by {summary.method}. {counted} count; {counts}."


def markdown(reproduction: Reproduction) -> str:
    """Return the rows as a Markdown table, with orderings and findings below."""
    findings = reproduction.summary.findings
    lines = [markdown_words(verdict_summary(reproduction)), ""]
    lines.append(markdown_table(HEAD, "llrrllll", map(cells, reproduction.rows)).rstrip())
    if reproduction.orderings:
        orderings = map(ordering_cells, reproduction.orderings)
        lines += ["", markdown_table(ORDERINGS_HEAD, "lrrll", orderings).rstrip()]
    lines += ["", *(f"- {markdown_words(finding)}" for finding in findings)] if findings else []
    return "\n".join(lines) + "\n"


def html(reproduction: Reproduction) -> str:
    """Return one self-contained page: the table, then all pictures, each with its data."""
    summary = reproduction.summary
    title = f"{summary.title}, reproduced on {summary.names}"
    lines = []
    for row in reproduction.rows:
        colour = _COLOURS.get(row.verdict, "#5a6673")
        spans = [escape(cell) for cell in cells(row)]
        spans[HEAD.index("verdict")] = f'<span style="color:{colour}">{escape(row.verdict)}</span>'
        lines.append([f'<span style="white-space:normal">{span}</span>' for span in spans])
    left = ("what", "model", "unit", "verdict", "where", "remark")
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="quiet">{escape(summary.citation)}</p>',
        f'<p class="lead">{escape(verdict_summary(reproduction))}</p>',
        table(HEAD, lines, left) if reproduction.rows else "",
        _orderings(reproduction),
        *(f"<p>{escape(finding)}</p>" for finding in summary.findings),
    ]
    for figure in reproduction.figures:
        parts.append(f"<h2>Figure {figure.number}: {escape(figure.title)}</h2>")
        svgs = pictures(figure)
        for panel in figure.panels:
            body = [[escape(_cell(cell)) for cell in row] for row in panel.rows]
            data = table(panel.columns, body, panel.columns[:1])
            parts.append(f'<div class="wide">{svgs[panel.model]}</div>')
            notes = "".join(f'<p class="quiet">{escape(note)}</p>' for note in panel.notes)
            parts.append(f"<details><summary>{escape(panel.model)}: data</summary>{data}{notes}</details>")
    for name, source in summary.machines:
        parts.append(f'<p class="quiet">Constants of {escape(name)}: {escape(source)}</p>')
    return page(title, "\n".join(parts))


def _orderings(reproduction: Reproduction) -> str:
    if not reproduction.orderings:
        return ""
    lines = [list(map(escape, ordering_cells(one))) for one in reproduction.orderings]
    return f"<h2>Orderings</h2>{table(ORDERINGS_HEAD, lines, ('ordering', 'where', 'not in'))}"


def _cell(cell: str | float | None) -> str:
    return cell if isinstance(cell, str) else format_number(cell)
