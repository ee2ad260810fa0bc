"""`meshweave reproduce slicing`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from meshweave.cli.options import progress_bar
from meshweave.cli.reproduced import Json, Out, Outputs, Png, Report, Rows, listed
from meshweave.describe.machine.cluster import load_cluster

if TYPE_CHECKING:
    from meshweave.reproduce.figures import Figure
    from meshweave.reproduce.verdict import JudgedRow


def slicing(
    pvc: Annotated[
        str, typer.Option(help="The machine of figure 2: a catalog cluster or a TOML file.")
    ] = "pvc-node",
    h100: Annotated[
        str, typer.Option(help="The machine of figure 3: a catalog cluster or a TOML file.")
    ] = "h100-node",
    rows: Rows = "",
    figures: Annotated[str, typer.Option(help="Only these figures: 2, 3 or both, with a comma.")] = "",
    every: Annotated[
        bool, typer.Option("--all", help="Figures with all 28 partitionings, not only those of the paper's.")
    ] = False,
    out: Out = None,
    png: Png = False,
    report: Report = None,
    json: Json = False,
) -> None:
    """Slicing Is All You Need: figures 2 and 3, and what its text says of them with a verdict.

    The universal product under row block, column block and 2D block partitionings of A, B and C, each at its best
    replication and data movement, beside DTensor and COSMA, by simulation (about a minute). The text states
    relations; a row holds where ours is on the same side. Without --rows and --figures: all rows and both figures.

    Example: meshweave reproduce slicing --report slicing.html
    """
    from meshweave.reproduce.figures import parse_figure_numbers
    from meshweave.reproduce.published import published_rows, select_rows
    from meshweave.reproduce.slicing.figures import MACHINES
    from meshweave.reproduce.slicing.figures import figures as compute_figures
    from meshweave.reproduce.slicing.partitionings import NAMED, every_partitioning
    from meshweave.reproduce.slicing.rows import PAPER
    from meshweave.reproduce.slicing.rows import rows as compute_rows
    from meshweave.reproduce.slicing.study import BATCHES, SlicingStudy
    from meshweave.reproduce.tables import PaperSummary

    outputs = Outputs(out, png, report, json)
    ids, numbers = listed(rows), parse_figure_numbers(listed(figures), MACHINES)
    select_rows(published_rows(PAPER), ids)
    machines = {"pvc": load_cluster(pvc), "h100": load_cluster(h100)}
    outputs.check()
    all_of_it = not (ids or numbers)
    study = SlicingStudy(machines, partitionings=every_partitioning() if every else NAMED)
    computed: list[JudgedRow] = []
    drawn: list[Figure] = []
    if ids or all_of_it:
        with progress_bar("rows") as progress:
            computed = compute_rows(study, ids, progress)
    if numbers or all_of_it:
        with progress_bar("figures") as progress:
            drawn = compute_figures(study, numbers or tuple(MACHINES), progress)
    about = PaperSummary(
        "Slicing Is All You Need",
        "Brock, Golin: Slicing Is All You Need: Towards A Universal One-Sided Algorithm for Distributed Matrix "
        "Multiplication.",
        tuple((cluster.name, cluster.source) for cluster in machines.values()),
        f"simulation, batches of {', '.join(map(str, BATCHES))}, fp32",
    )
    head = {
        "paper": PAPER,
        "clusters": [{"name": name, "source": source} for name, source in about.machines],
        "batches": list(BATCHES),
    }
    stem = f"{PAPER}-{about.machines[0][0]}-{about.machines[1][0]}"
    outputs.present(computed, drawn, about, stem, head, of="case")
