"""`meshweave reproduce alpacomm`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from meshweave.cli.options import progress_bar
from meshweave.cli.reproduced import Json, Out, Outputs, Png, Report, Rows, listed
from meshweave.describe.machine.cluster import load_cluster

if TYPE_CHECKING:
    from meshweave.reproduce.figures import Figure
    from meshweave.reproduce.verdict import JudgedRow


def alpacomm(
    cluster: Annotated[
        str,
        typer.Option(
            help="Hosts of four chips or more and one NIC: a catalog cluster or a TOML file. Five are taken."
        ),
    ] = "p3.8xlarge",
    rows: Rows = "",
    figures: Annotated[
        str, typer.Option(help="Only these figures: some of 5, 6 and 8, separated by commas.")
    ] = "",
    out: Out = None,
    png: Png = False,
    report: Report = None,
    json: Json = False,
) -> None:
    """AlpaComm (MLSys '23): its resharding microbenchmarks and load-balance ablation, figures 5, 6 and 8.

    One device to several, and the nine cases of table 2, by send/recv, all-gather and broadcast, in the orders
    that the paper compares, by simulation at full size (seconds). The text states relations; a row holds where
    ours is on the same side. Without --rows and --figures: all rows and figures.

    Example: meshweave reproduce alpacomm --report alpacomm.html
    """
    from meshweave.reproduce.alpacomm.figures import FIGURES
    from meshweave.reproduce.alpacomm.figures import figures as compute_figures
    from meshweave.reproduce.alpacomm.rows import PAPER, findings
    from meshweave.reproduce.alpacomm.rows import rows as compute_rows
    from meshweave.reproduce.alpacomm.study import AlpaCommStudy
    from meshweave.reproduce.figures import parse_figure_numbers
    from meshweave.reproduce.published import published_rows, select_rows
    from meshweave.reproduce.tables import PaperSummary

    outputs = Outputs(out, png, report, json)
    ids, numbers = listed(rows), parse_figure_numbers(listed(figures), FIGURES)
    select_rows(published_rows(PAPER), ids)
    found = load_cluster(cluster)
    study = AlpaCommStudy(found)
    outputs.check()
    all_of_it = not (ids or numbers)
    computed: list[JudgedRow] = []
    drawn: list[Figure] = []
    if ids or all_of_it:
        with progress_bar("rows") as progress:
            computed = compute_rows(study, ids, progress)
    if numbers or all_of_it:
        with progress_bar("figures") as progress:
            drawn = compute_figures(study, numbers or tuple(FIGURES), progress)
    about = PaperSummary(
        "AlpaComm",
        "Zhuang, Zhao, Zheng, Li, Xing, Ho, Gonzalez, Stoica, Zhang: On Optimizing the Communication of Model "
        "Parallelism (MLSys '23).",
        ((found.name, found.source),),
        "simulation at full size, fp32",
        findings(study),
    )
    head = {
        "paper": PAPER,
        "cluster": {"name": found.name, "source": found.source},
        "findings": list(about.findings),
    }
    outputs.present(computed, drawn, about, f"{PAPER}-{found.name}", head, of="of")
