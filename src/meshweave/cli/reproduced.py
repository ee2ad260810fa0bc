"""What `meshweave reproduce` writes and prints, whatever the paper."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshweave.base.errors import DescriptionError, UnsupportedError
from meshweave.cli.options import JSON_HELP, check_writable, print_json
from meshweave.describe.files import printable
from meshweave.report.timeline import write_text

if TYPE_CHECKING:
    from meshweave.reproduce.figures import Figure
    from meshweave.reproduce.tables import PaperSummary
    from meshweave.reproduce.verdict import JudgedRow

# The options that every paper has.
Rows = Annotated[
    str, typer.Option(help="Only these rows of the table: ids separated by commas, as in --json.")
]
Out = Annotated[
    Path | None,
    typer.Option(help="Write tables (Markdown and JSON) and pictures (SVG) into this directory."),
]
Png = Annotated[bool, typer.Option("--png", help="With --out: pictures as PNG too (needs meshweave[png]).")]
Report = Annotated[
    Path | None,
    typer.Option(help="Write one page here: the table and all pictures, self-contained HTML."),
]
Json = Annotated[bool, typer.Option("--json", help=JSON_HELP)]


def listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


@dataclass(frozen=True)
class Outputs:
    """Where the results go."""

    out: Path | None
    png: bool
    report: Path | None
    json: bool

    def check(self) -> None:
        """Before any work is done. Raises DescriptionError, UnsupportedError."""
        from meshweave.report.png import check_png

        if self.png and self.out is None:
            raise UnsupportedError("--png writes beside the SVG pictures; give --out DIR too")
        if self.png:
            check_png()
        try:
            if self.out is not None:
                self.out.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            reason = getattr(error, "strerror", None) or "not a path"
            raise DescriptionError(
                f"{printable(self.out)}: cannot be a directory to write into: {reason}"
            ) from None
        check_writable(self.report)  # may lie in the directory

    def present(
        self,
        rows: list[JudgedRow],
        figures: list[Figure],
        about: PaperSummary,
        stem: str,
        head: dict[str, Any],
        of: str = "model",
    ) -> None:
        """Writes files named after `stem`, and prints: JSON under `head`, or tables in which `of` heads the column
        that says what a row is of."""
        written = _write(self.out, self.png, self.report, rows, figures, about, stem, head)
        if self.json:
            print_json(_to_json(head, rows, figures))
            return
        _print(rows, figures, about, of)
        for path in written:
            typer.echo(f"written: {path}")


def _write(
    out: Path | None,
    png: bool,
    report: Path | None,
    rows: list[JudgedRow],
    figures: list[Figure],
    about: PaperSummary,
    stem: str,
    head: dict[str, Any],
) -> list[Path]:
    """Rows and figures go into files of their own, named after `stem`, so that computing one leaves the other."""
    from meshweave.reproduce.tables import html, markdown

    written: list[Path] = []

    def write(path: Path, text: str) -> None:
        write_text(path, text)
        written.append(path)

    if report is not None:
        write(report, html(rows, figures, about))
    if out is None:
        return written
    if rows:
        write(out / f"{stem}.md", markdown(rows, about))
        write(out / f"{stem}.json", _text(_to_json(head, rows, [])))
    for figure in figures:
        name = f"{stem}-figure-{figure.number}"
        links = _draw(out, name, figure, png, written)
        write(out / f"{name}.md", f"{figure.markdown()}\n{links}")
        write(out / f"{name}.json", _text(_to_json(head, [], [figure])))
    return written


def _to_json(head: dict[str, Any], rows: list[JudgedRow], figures: list[Figure]) -> dict[str, Any]:
    from meshweave.reproduce.tables import row_json

    return {**head, "rows": [row_json(row) for row in rows], "figures": [one.to_json() for one in figures]}


def _draw(out: Path, name: str, figure: Figure, png: bool, written: list[Path]) -> str:
    """Writes the pictures of a figure; the Markdown that shows them."""
    from meshweave.report.png import to_png
    from meshweave.reproduce.pictures import pictures

    links = ""
    for model, svg in pictures(figure).items():
        path = out / f"{name}-{model}.svg"
        write_text(path, svg)
        written.append(path)
        if png:
            path.with_suffix(".png").write_bytes(to_png(svg))
            written.append(path.with_suffix(".png"))
        links += f"![{model}]({path.name})\n"
    return links


def _text(data: Any) -> str:
    import json

    return json.dumps(data, indent=1) + "\n"


_STYLES = {"holds": "green", "near": "yellow", "differs": "red"}


def _print(rows: list[JudgedRow], figures: list[Figure], about: PaperSummary, of: str) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from meshweave.reproduce.tables import format_number, verdict_summary

    console = Console(width=max(Console().width, 160) if not Console().is_terminal else None, highlight=False)
    if rows:
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for column in ("row", of, "published", "ours", "unit", "verdict", "remark"):
            right = column in ("published", "ours")
            table.add_column(
                column, justify="right" if right else "left", no_wrap=column not in ("unit", "remark")
            )
        for row in rows:
            verdict = Text(row.verdict, style=_STYLES.get(row.verdict, ""))
            numbers = format_number(row.published), format_number(row.ours)
            table.add_row(row.id, row.model, *numbers, row.unit, verdict, Text(row.remark))
        console.print(table)
        console.print(verdict_summary(rows, about))
    for figure in figures:
        typer.echo(figure.markdown())
    for finding in about.findings:
        console.print(f"- {finding}", markup=False)
