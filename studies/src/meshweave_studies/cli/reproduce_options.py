"""The options that all verbs of `meshweave reproduce` share, and what they print."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshweave.base.errors import DescriptionError, UnsupportedError, printable
from meshweave.base.outputs import claim_output
from meshweave.cli.option_fields import option
from meshweave.cli.options import JSON_HELP, print_json
from meshweave.report.tables import text_console, text_table

if TYPE_CHECKING:
    from meshweave_studies import Reproduction, Selection

Report = Annotated[
    Path | None,
    typer.Option(help="Write the table and all pictures as one self-contained HTML page here."),
]
Json = Annotated[bool, typer.Option("--json", help=JSON_HELP)]


def split_names(text: str | None) -> tuple[str, ...]:
    """Return the names in a comma-separated list; of None none. Raises UnsupportedError where a text has none."""
    names = tuple(part.strip() for part in (text or "").split(",") if part.strip())
    if text is not None and not names:
        raise UnsupportedError(f"'{printable(text)}' names nothing; without the option, all are computed")
    return names


@dataclass(frozen=True)
class Outputs:
    """Which rows of a paper are computed, and where they and its figures are written."""

    rows: str | None = option(None, "Compute only these rows: ids separated by commas, as --json shows them.")
    out: Path | None = option(
        None, "Write tables (Markdown and JSON) and pictures (SVG) into this directory."
    )
    png: bool = option(False, "With --out, write the pictures as PNG too (needs meshweave[png]).")
    report: Report = None
    json: Json = False

    def check(self) -> None:
        """Check the options and make the directory, before anything is computed.

        Raises:
            DescriptionError: a file or directory cannot be written.
            UnsupportedError: PNG pictures are wanted without a directory, or without the package that draws them.
        """
        from meshweave.report.png import require_png
        from meshweave_studies.output import prepare_directory

        if self.png and self.out is None:
            raise UnsupportedError("--png writes beside the SVG pictures; give --out DIR too")
        if self.png:
            require_png()
        prepare_directory(self.out)
        if self.report is not None:  # may lie in the directory
            if self.out is not None and self.report.suffix != ".html" and _in(self.out, self.report):
                raise DescriptionError(
                    f"{printable(self.report)}: lies among the tables of --out; name the page *.html"
                )
            claim_output(self.report, "--report")

    def selection(self, paper: str, reading: str = "", figures: str | None = None) -> Selection:
        """Return the rows and figures of a paper that are to be computed, once all options are checked.

        Raises what `check` raises, and UnsupportedError for a row, figure or reading that the paper does not have.
        """
        from meshweave_studies.papers import STUDIES, select
        from meshweave_studies.published import reading_named

        selected = select(paper, split_names(self.rows), split_names(figures))
        if reading:
            reading_named(STUDIES[paper][1], reading)
        self.check()
        return selected

    def write(self, reproduction: Reproduction) -> None:
        """Write the files that the options name, and print JSON or tables."""
        from meshweave_studies.output import write_directory, write_page

        written = []
        if self.report is not None:
            written.append(write_page(reproduction, self.report))
        if self.out is not None:
            written += write_directory(reproduction, self.out, self.png)
        if self.json:
            print_json(reproduction.to_json())
            return
        _print_tables(reproduction)
        for path in written:
            typer.echo(f"written: {path}")


def _in(directory: Path, path: Path) -> bool:
    return path.resolve().parent == directory.resolve()


_STYLES = {"holds": "green", "near": "yellow", "differs": "red"}


def _print_tables(reproduction: Reproduction) -> None:
    from rich.text import Text

    from meshweave_studies.tables import format_number, verdict_summary

    console = text_console(160)
    if reproduction.rows:
        head = ("row", reproduction.summary.subject, "published", "ours", "unit", "verdict", "remark")
        rows = []
        for row in reproduction.rows:
            verdict = Text(row.verdict, style=_STYLES.get(row.verdict, ""))
            numbers = format_number(row.published), format_number(row.ours)
            rows.append((row.id, row.model, *numbers, row.unit, verdict, Text(row.remark)))
        left = {*head} - {"published", "ours"}
        console.print(text_table(head, rows, left, whole={*head} - {"unit", "remark"}))
        console.print(verdict_summary(reproduction))
    for figure in reproduction.figures:
        typer.echo(figure.markdown())
    for finding in reproduction.summary.findings:
        console.print(f"- {finding}", markup=False)
