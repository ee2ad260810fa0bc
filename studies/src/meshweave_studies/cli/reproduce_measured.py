"""`meshweave reproduce kernels | nccl | published`: predictions beside measured kernels, collectives and runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshweave.base.outputs import claim_output, write_file
from meshweave.cli.options import OutputOption, print_json, progress_bar
from meshweave_studies.cli.reproduce_options import Json, Report


def kernels(
    cases: Annotated[
        Path | None,
        typer.Option(
            help="Measured products, attentions or collectives (CSV); which it is follows from the columns. "
            "Default: the rows of the catalog, to which its constants are fitted."
        ),
    ] = None,
    constants: Annotated[
        str,
        typer.Option(
            "--kernels",
            help="A kernels file to score for all devices of the file, instead of the catalog's by device.",
        ),
    ] = "",
    json: Json = False,
) -> None:
    """Score the times of products, attention and collectives by their shape against measured ones.

    Relative errors stand by device and dtype or kind of collective: mean, median and worst. Products are
    priced by the model of the chip's constants, and by a table of the measured products that the catalog has.
    Devices without constants are named and count nowhere. Times of TPUs are those that their compiler expects.

    Example: meshweave reproduce kernels --cases gemm.csv
    """
    from meshweave.describe.machine.kernels_file import load_kernels
    from meshweave.describe.machine.measured_file import (
        SHIPPED,
        TPU_PRODUCTS,
        read_measured,
        shipped_measured,
    )
    from meshweave_studies.kernels.score import Score, catalog_kernels, overall, score_kernels
    from meshweave_studies.kernels.tables import score_table

    given = load_kernels(constants) if constants else None
    files = {"": read_measured(cases)} if cases is not None else {x: shipped_measured(x) for x in SHIPPED}
    by_title: dict[str, list[Score]] = {}
    for name, measured in files.items():
        title = "products, TPU compiler" if name == TPU_PRODUCTS else measured.kind
        by_title.setdefault(title, []).extend(
            score_kernels(measured, (lambda _: given) if given else catalog_kernels)
        )
    scores = {title: [*scored, *overall(scored)] for title, scored in by_title.items()}
    if json:
        print_json({kind: [score.to_json() for score in scored] for kind, scored in scores.items()})
        return
    for kind, scored in scores.items():
        typer.echo(f"{kind}\n\n{score_table(scored)}")


def nccl(report: Report = None, json: Json = False) -> None:
    """Predict bus bandwidths of collectives across hosts beside those that nccl-tests printed.

    Published runs on hosts of A100 and H100, 16 to 256 GPUs, 1 MiB to 4 GiB. A row is a hit within 15 %.

    Example: meshweave reproduce nccl
    """
    from meshweave_studies.nccl.score import bandwidth_rows
    from meshweave_studies.nccl.tables import bandwidth_page, bandwidth_table, summary_line

    if report is not None:
        claim_output(report, "--report")
    rows = bandwidth_rows()
    if report is not None:
        write_file(report, bandwidth_page(rows))
    if json:
        print_json([row.to_json() for row in rows])
        return
    typer.echo(f"{bandwidth_table(rows)}\n{summary_line(rows)}")


def published(
    cases: Annotated[
        Path | None,
        typer.Option(
            help="Published training runs (CSV), one a row. Default: those that ship with the package."
        ),
    ] = None,
    worst: Annotated[
        int, typer.Option(help="How many of the rows with the largest errors to list.", min=0)
    ] = 10,
    report: Annotated[Path | None, OutputOption(help="Write the tables as a Markdown page here.")] = None,
    scores: Annotated[
        Path | None,
        OutputOption(
            help="Write the errors with their chips here (CSV), as the wheel ships them: those of all files that "
            "ship with the package, unless --cases names one."
        ),
    ] = None,
    experts: Annotated[
        bool, typer.Option("--experts", help="Predict the runs of models with experts, and no others.")
    ] = False,
    json: Json = False,
) -> None:
    """Predict published training runs, and score step time (or MFU, tokens/s) and memory by source.

    Each row states model, chips, degrees and a figure, with its source. What cannot be predicted is listed with
    the reason. Software stacks have at most five named constants each, fitted on half of the families of models.

    Example: meshweave reproduce published --cases runs.csv
    """
    from meshweave_studies.training_runs.best_of_sweeps import cells_line, cells_table, sweep_cells
    from meshweave_studies.training_runs.models import has_experts
    from meshweave_studies.training_runs.rows import ALSO_SHIPPED, read_runs, shipped_runs
    from meshweave_studies.training_runs.score import score_runs, source_scores, summary_of
    from meshweave_studies.training_runs.sweeps import sweep_table, sweeps_of
    from meshweave_studies.training_runs.tables import runs_page, runs_table, scores_csv

    runs = read_runs(cases) if cases is not None else shipped_runs()
    runs = tuple(run for run in runs if has_experts(run)) if experts else runs
    with progress_bar("runs") as progress:
        rows = score_runs(runs, progress=progress, experts=experts)
    sweeps = sweeps_of(runs, rows)
    with progress_bar("sweeps") as progress:
        cells = sweep_cells(runs, progress)
    cells_text = f"{cells_line(cells)}\n\n{cells_table(cells)}" if cells else ""
    if report is not None:
        write_file(report, runs_page(rows, sweep_table(sweeps), cells_text))
    if scores is not None:
        others = [run for name in ALSO_SHIPPED for run in shipped_runs(name)] if cases is None else []
        others = [run for run in others if has_experts(run)] if experts else others
        routed = [] if experts else [run for run in (*runs, *others) if has_experts(run)]
        every = [*rows, *score_runs(others, experts=experts), *score_runs(routed, experts=True)]
        write_file(scores, scores_csv(every))
    if json:
        sources = [score.to_json() for score in source_scores(rows)]
        print_json(
            {
                "summary": summary_of(rows).to_json(),
                "sources": sources,
                "sweeps": [sweep.to_json() for sweep in sweeps],
                "cells": [cell.to_json() for cell in cells],
                "rows": [row.to_json() for row in rows],
            }
        )
        return
    typer.echo(runs_table(rows, worst) + (f"\n\n{cells_text}" if cells_text else ""))
