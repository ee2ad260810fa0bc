"""`meshweave reproduce`: published results of papers, computed again and judged."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from meshweave.cli.options import progress_bar
from meshweave.cli.reproduce_alpacomm import alpacomm
from meshweave.cli.reproduce_slicing import slicing
from meshweave.cli.reproduced import Json, Out, Outputs, Png, Report, Rows, listed
from meshweave.describe.machine.cluster import load_cluster

if TYPE_CHECKING:
    from meshweave.reproduce.figures import Figure
    from meshweave.reproduce.verdict import JudgedRow

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
    rows: Rows = "",
    figures: Annotated[
        str, typer.Option(help="Only these figures: some of 9 to 14, separated by commas.")
    ] = "",
    out: Out = None,
    png: Png = False,
    report: Report = None,
    json: Json = False,
) -> None:
    """MeshSlice (ISCA '25): every number of its evaluation beside ours with a verdict, and figures 9 to 14.

    GPT-3 and Megatron-NLG on 16 to 256 chips against Wang, Collective, SUMMA, Cannon, 1D tensor parallelism
    and FSDP, each at its own best mesh. A row holds within 3 points of a utilisation, 6 points of a gain over
    Wang, 3 % of other numbers; it is near up to 10 points or 10 %. Without --rows and --figures: all rows, and
    with --out or --report all figures.

    Example: meshweave reproduce meshslice --cluster tpu-v4-pod-fitted --report meshslice.html
    """
    from meshweave.reproduce.figures import parse_figure_numbers
    from meshweave.reproduce.meshslice.figures import FIGURES
    from meshweave.reproduce.meshslice.figures import figures as compute_figures
    from meshweave.reproduce.meshslice.rows import PAPER
    from meshweave.reproduce.meshslice.rows import rows as compute_rows
    from meshweave.reproduce.meshslice.study import MeshSliceStudy
    from meshweave.reproduce.meshslice.times import Timer
    from meshweave.reproduce.published import published_rows, select_rows
    from meshweave.reproduce.tables import PaperSummary

    outputs = Outputs(out, png, report, json)
    ids, numbers = listed(rows), parse_figure_numbers(listed(figures), FIGURES)
    select_rows(published_rows(PAPER), ids)
    found = load_cluster(cluster)
    outputs.check()
    if not (ids or numbers):
        numbers = tuple(FIGURES) if out is not None or report is not None else ()
        all_rows = True
    else:
        all_rows = False
    study = MeshSliceStudy(cluster, Timer(by.value))
    computed: list[JudgedRow] = []
    drawn: list[Figure] = []
    if ids or all_rows:
        with progress_bar("rows") as progress:
            computed = compute_rows(study, ids, progress)
    if numbers:
        with progress_bar("figures") as progress:
            drawn = compute_figures(study, numbers, progress)
    way = "estimates" if by == Reading.estimate else "simulation; meshes and slice counts chosen by estimate"
    about = PaperSummary(
        "MeshSlice",
        "Nam, Gerogiannis, Torrellas: MeshSlice (ISCA '25, doi 10.1145/3695053.3731077).",
        ((found.name, found.source),),
        way,
    )
    head = {
        "paper": PAPER,
        "cluster": {"name": found.name, "source": found.source},
        "by": by.value,
    }
    outputs.present(computed, drawn, about, f"{PAPER}-{found.name}", head)


reproduce.command()(slicing)
reproduce.command()(alpacomm)
