"""`meshweave reproduce`: published results of papers, computed again and judged."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshweave.cli.options import JSON_HELP, check_writable, print_json, progress_bar
from meshweave.describe.cluster import Cluster, load_cluster
from meshweave.describe.files import printable
from meshweave.errors import DescriptionError, UnsupportedError
from meshweave.report.timeline import write_text

if TYPE_CHECKING:
    from meshweave.reproduce.figures import Figure
    from meshweave.reproduce.verdict import Row

reproduce = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Published results of papers, computed again: tables with verdicts, and the papers' figures.",
)


class Reading(StrEnum):
    estimate = "estimate"
    simulate = "simulate"


@reproduce.callback()
def papers() -> None:
    """Published results of papers, computed again: tables with verdicts, and the papers' figures."""


@reproduce.command()
def meshslice(
    by: Annotated[
        Reading,
        typer.Option(
            help="How products are timed: closed-form estimates (seconds), or simulation of every chip (minutes). "
            "Meshes and slice counts are chosen by estimate either way, as the paper's autotuner does."
        ),
    ] = Reading.simulate,
    cluster: Annotated[
        str,
        typer.Option(help="The pod whose constants are judged: a catalog cluster or a TOML file."),
    ] = "tpu-v4-pod",
    rows: Annotated[
        str, typer.Option(help="Only these rows of the table: ids separated by commas, as in --json.")
    ] = "",
    figures: Annotated[
        str, typer.Option(help="Only these figures: some of 9 to 14, separated by commas.")
    ] = "",
    out: Annotated[
        Path | None,
        typer.Option(help="Write tables (Markdown and JSON) and pictures (SVG) into this directory."),
    ] = None,
    png: Annotated[
        bool, typer.Option("--png", help="With --out: pictures as PNG too (needs meshweave[png]).")
    ] = False,
    report: Annotated[
        Path | None,
        typer.Option(help="Write one page here: the table and all pictures, self-contained HTML."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """MeshSlice (ISCA '25): every number of its evaluation beside ours with a verdict, and figures 9 to 14.

    GPT-3 and Megatron-NLG on 16 to 256 chips against Wang, Collective, SUMMA, Cannon, 1D tensor parallelism
    and FSDP, each at its own best mesh. A row holds within 3 points of a utilisation, 6 points of a gain over
    Wang, 3 % of other numbers; it is near up to 10 points or 10 %. Without --rows and --figures: all rows, and
    with --out or --report all figures.

    Example: meshweave reproduce meshslice --cluster tpu-v4-pod-fitted --report meshslice.html
    """
    from meshweave.reproduce.block import Study
    from meshweave.reproduce.figures import FIGURES, figures_named
    from meshweave.reproduce.figures import figures as compute_figures
    from meshweave.reproduce.meshslice import PAPER
    from meshweave.reproduce.meshslice import rows as compute_rows
    from meshweave.reproduce.published import published, wanted_rows
    from meshweave.reproduce.times import Timer

    ids, numbers = _listed(rows), figures_named(_listed(figures))
    wanted_rows(published(PAPER), ids)
    found = load_cluster(cluster)
    _check_outputs(out, png, report)
    if not (ids or numbers):
        numbers = tuple(FIGURES) if out is not None or report is not None else ()
        all_rows = True
    else:
        all_rows = False
    study = Study(cluster, Timer(by.value))
    computed: list[Row] = []
    drawn: list[Figure] = []
    if ids or all_rows:
        with progress_bar("rows") as progress:
            computed = compute_rows(study, ids, progress)
    if numbers:
        with progress_bar("figures") as progress:
            drawn = compute_figures(study, numbers, progress)
    written = _write(out, png, report, computed, drawn, found, by)
    if json:
        print_json(_json(computed, drawn, found, by))
        return
    _print(computed, drawn, found, by)
    for path in written:
        typer.echo(f"written: {path}")


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _check_outputs(out: Path | None, png: bool, report: Path | None) -> None:
    """Before any work is done."""
    from meshweave.report.png import check_png

    if png and out is None:
        raise UnsupportedError("--png writes beside the SVG pictures; give --out DIR too")
    if png:
        check_png()
    try:
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or "not a path"
        raise DescriptionError(f"{printable(out)}: cannot be a directory to write into: {reason}") from None
    check_writable(report)  # may lie in the directory


def _json(rows: list[Row], figures: list[Figure], cluster: Cluster, by: Reading) -> dict[str, Any]:
    from meshweave.reproduce.tables import row_json

    return {
        "paper": "meshslice",
        "cluster": {"name": cluster.name, "source": cluster.source},
        "by": by.value,
        "rows": [row_json(row) for row in rows],
        "figures": [figure.to_json() for figure in figures],
    }


def _write(
    out: Path | None,
    png: bool,
    report: Path | None,
    rows: list[Row],
    figures: list[Figure],
    cluster: Cluster,
    by: Reading,
) -> list[Path]:
    """Rows and figures go into files of their own, so that computing one leaves the other."""
    from meshweave.reproduce.tables import html, markdown

    written: list[Path] = []

    def write(path: Path, text: str) -> None:
        write_text(path, text)
        written.append(path)

    if report is not None:
        write(report, html(rows, figures, cluster.name, cluster.source, by.value))
    if out is None:
        return written
    stem = f"meshslice-{cluster.name}"
    if rows:
        write(out / f"{stem}.md", markdown(rows, cluster.name, by.value))
        write(out / f"{stem}.json", _text(_json(rows, [], cluster, by)))
    for figure in figures:
        name = f"{stem}-figure-{figure.number}"
        links = _draw(out, name, figure, png, written)
        write(out / f"{name}.md", f"{figure.markdown()}\n{links}")
        write(out / f"{name}.json", _text(_json([], [figure], cluster, by)))
    return written


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


def _print(rows: list[Row], figures: list[Figure], cluster: Cluster, by: Reading) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from meshweave.reproduce.tables import lead, shown

    console = Console(width=max(Console().width, 160) if not Console().is_terminal else None, highlight=False)
    if rows:
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for column in ("row", "model", "published", "ours", "unit", "verdict", "remark"):
            right = column in ("published", "ours")
            table.add_column(
                column, justify="right" if right else "left", no_wrap=column not in ("unit", "remark")
            )
        for row in rows:
            verdict = Text(row.verdict, style=_STYLES.get(row.verdict, ""))
            numbers = shown(row.published), shown(row.ours)
            table.add_row(row.id, row.model, *numbers, row.unit, verdict, Text(row.remark))
        console.print(table)
        console.print(lead(rows, cluster.name, by.value))
    for figure in figures:
        typer.echo(figure.markdown())
