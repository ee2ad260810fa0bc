"""`meshweave reproduce alpacomm`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshweave.cli.options import JSON_HELP, print_json, progress_bar
from meshweave.cli.reproduced import check_outputs, listed, print_all, to_json, write_all
from meshweave.describe.cluster import load_cluster

if TYPE_CHECKING:
    from meshweave.reproduce.figures import Figure
    from meshweave.reproduce.verdict import Row


def alpacomm(
    cluster: Annotated[
        str,
        typer.Option(
            help="Hosts of four chips or more and one NIC: a catalog cluster or a TOML file. Five are taken."
        ),
    ] = "p3.8xlarge",
    rows: Annotated[
        str, typer.Option(help="Only these rows of the table: ids separated by commas, as in --json.")
    ] = "",
    figures: Annotated[
        str, typer.Option(help="Only these figures: some of 5, 6 and 8, separated by commas.")
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
    """AlpaComm (MLSys '23): its resharding microbenchmarks and load-balance ablation, figures 5, 6 and 8.

    One device to several, and the nine cases of table 2, by send/recv, all-gather and broadcast, in the orders
    that the paper compares, by simulation at full size (seconds). The text states relations; a row holds where
    ours is on the same side. Without --rows and --figures: all rows and figures.

    Example: meshweave reproduce alpacomm --report alpacomm.html
    """
    from meshweave.reproduce.alpacomm import PAPER, findings
    from meshweave.reproduce.alpacomm import rows as compute_rows
    from meshweave.reproduce.alpacomm_figures import FIGURES, figures_named
    from meshweave.reproduce.alpacomm_figures import figures as compute_figures
    from meshweave.reproduce.alpacomm_study import AlpaCommStudy
    from meshweave.reproduce.published import published, wanted_rows
    from meshweave.reproduce.tables import About

    ids, numbers = listed(rows), figures_named(listed(figures))
    wanted_rows(published(PAPER), ids)
    found = load_cluster(cluster)
    study = AlpaCommStudy(found)
    check_outputs(out, png, report)
    all_of_it = not (ids or numbers)
    computed: list[Row] = []
    drawn: list[Figure] = []
    if ids or all_of_it:
        with progress_bar("rows") as progress:
            computed = compute_rows(study, ids, progress)
    if numbers or all_of_it:
        with progress_bar("figures") as progress:
            drawn = compute_figures(study, numbers or tuple(FIGURES), progress)
    about = About(
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
    written = write_all(out, png, report, computed, drawn, about, f"{PAPER}-{found.name}", head)
    if json:
        print_json(to_json(head, computed, drawn))
        return
    print_all(computed, drawn, about, of="of")
    for path in written:
        typer.echo(f"written: {path}")
