"""`meshweave reproduce all`: every paper under every reading, into one folder."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from meshweave.base.outputs import write_file
from meshweave.cli.options import print_json, progress_bar
from meshweave_studies.cli.reproduce_options import Json, split_names


def every_paper(
    out: Annotated[
        Path,
        typer.Option(help="Write tables, pictures and README.md, which counts them, into this directory."),
    ],
    papers: Annotated[
        str | None, typer.Option(help="Only these papers, separated by commas: meshslice, atp, t3, ...")
    ] = None,
    json: Json = False,
) -> None:
    """Every paper under every reading: tables and pictures, and a page that counts how the rows come out.

    What is done stays in the directory if the command is stopped. T3 takes longest, and comes last.

    Example: meshweave reproduce all --out results
    """
    from meshweave_studies.every_paper import counts_page, runs_of
    from meshweave_studies.output import prepare_directory, write_directory

    runs = runs_of(split_names(papers))
    prepare_directory(out)
    done = []
    for run in runs:
        reproduction = run.compute(partial(progress_bar, plain_lines=True))
        done.append((run, reproduction))
        write_directory(reproduction, out)
        write_file(out / "README.md", counts_page(done))
        typer.echo(f"{run.name}: written to {out}", err=json)
    if json:
        print_json([{"reading": run.reading, **reproduction.to_json()} for run, reproduction in done])
