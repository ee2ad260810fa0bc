"""`meshweave reproduce`: published results of papers, computed again and judged."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from meshweave.base.outputs import claim_output, write_file
from meshweave.cli.option_fields import with_options
from meshweave.cli.options import OutputOption, print_json, progress_bar
from meshweave.describe.machine.cluster import load_cluster
from meshweave_studies.cli.reproduce_options import Json, Out, Outputs, Png, Report, Rows, split_names
from meshweave_studies.published import reading_named

reproduce = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Compute the published results of papers again: tables with verdicts, and the papers' figures.",
)


class ProductTiming(StrEnum):
    """What gives the times of products: closed-form estimates, or simulation."""

    estimate = "estimate"
    simulate = "simulate"


@reproduce.callback()
def papers() -> None:
    """Compute the published results of papers again: tables with verdicts, and the papers' figures."""


@reproduce.command()
def meshslice(
    by: Annotated[
        ProductTiming,
        typer.Option(
            help="Time products by closed-form estimates (seconds) or by simulation of every chip (minutes). "
            "Estimates choose meshes and slice counts in both cases, as the paper's autotuner does."
        ),
    ] = ProductTiming.simulate,
    reading: Annotated[
        str,
        typer.Option(
            help="What the paper leaves open, by name: public, fitted-links, one-part or shared-links (the pod); "
            "public, fixed-batch or public-defaults (the real 4x4 mesh)."
        ),
    ] = "public",
    cluster: Annotated[
        str,
        typer.Option(
            help="The pod whose constants are judged: a catalog cluster or a TOML file. By default "
            "that of the reading."
        ),
    ] = "",
    rows: Rows = "",
    figures: Annotated[
        str, typer.Option(help="Compute only these figures: some of 9 to 14, separated by commas.")
    ] = "",
    out: Out = None,
    png: Png = False,
    report: Report = None,
    json: Json = False,
) -> None:
    """MeshSlice (ISCA '25): every number of its evaluation beside ours with a verdict, and figures 9 to 14.

    GPT-3 and Megatron-NLG run on 16 to 256 chips. MeshSlice is compared with Wang, Collective, SUMMA, Cannon, 1D
    tensor parallelism and FSDP, each at its own best mesh. A row holds within 3 points of a utilisation, a quarter
    of a gain, 3 % of other numbers; it is near up to 10 points, half of a gain or 10 %. What the paper leaves open
    is a reading with a name, and a table has one. Without --rows and --figures, all rows of the reading are
    computed, and with --out or --report all figures too.

    Example: meshweave reproduce meshslice --reading one-part --by estimate
    """
    from meshweave_studies.meshslice.readings import READINGS
    from meshweave_studies.papers import EVERYTHING, MESHSLICE, reproduce_meshslice, select

    outputs = Outputs(out, png, report, json)
    selection = select(MESHSLICE, split_names(rows), split_names(figures))
    if selection == EVERYTHING and out is None and report is None:
        selection = replace(selection, figures=None)
    pod = load_cluster(cluster) if cluster else None
    reading_named(READINGS, reading)
    outputs.check()
    outputs.write(
        reproduce_meshslice(pod, selection, reading=reading, by=by.value, progress_bar=progress_bar)
    )


@dataclass(frozen=True)
class SlicingOptions:
    """Which rows are reproduced, and what is written."""

    pvc: Annotated[str, typer.Option(help="The machine of figure 2: a catalog cluster or a TOML file.")] = (
        "pvc-node"
    )
    h100: Annotated[str, typer.Option(help="The machine of figure 3: a catalog cluster or a TOML file.")] = (
        "h100-node"
    )
    reading: Annotated[
        str,
        typer.Option(
            help="Which replication factors are tried, by name: all-factors, or cut (every matrix stays cut)."
        ),
    ] = "all-factors"
    rows: Rows = ""
    figures: Annotated[
        str, typer.Option(help="Compute only these figures: 2, 3 or both, separated by a comma.")
    ] = ""
    every: Annotated[
        bool, typer.Option("--all", help="Draw figures with all 28 partitionings instead of the paper's six.")
    ] = False
    out: Out = None
    png: Png = False
    report: Report = None
    json: Json = False


@reproduce.command()
@with_options
def slicing(options: SlicingOptions) -> None:
    """Slicing Is All You Need: figures 2 and 3, and what its text says of them with a verdict.

    A, B and C of the universal product are cut into row blocks, column blocks and 2D blocks. Each partitioning is
    simulated at its best replication and data movement, beside DTensor and COSMA (about a minute). The text states
    relations; a row holds where ours is on the same side. Without --rows and --figures, all rows and both figures
    are computed.

    Example: meshweave reproduce slicing --report slicing.html
    """
    from meshweave_studies.papers import SLICING, reproduce_slicing, select
    from meshweave_studies.slicing.readings import READINGS

    outputs = Outputs(options.out, options.png, options.report, options.json)
    selection = select(SLICING, split_names(options.rows), split_names(options.figures))
    machines = load_cluster(options.pvc), load_cluster(options.h100)
    reading_named(READINGS, options.reading)
    outputs.check()
    outputs.write(
        reproduce_slicing(
            *machines,
            selection,
            reading=options.reading,
            all_partitionings=options.every,
            progress_bar=progress_bar,
        )
    )


@reproduce.command()
def alpacomm(
    cluster: Annotated[
        str,
        typer.Option(
            help="A cluster of hosts with four chips or more and one NIC: a catalog cluster or a TOML file. "
            "Five hosts are taken. By default that of the reading."
        ),
    ] = "",
    reading: Annotated[
        str,
        typer.Option(
            help="What the paper leaves open, by name: bandwidth, messages (launches and packing cost time), alpa "
            "(rivals by their public code) or alpa-messages."
        ),
    ] = "bandwidth",
    rows: Rows = "",
    figures: Annotated[
        str, typer.Option(help="Compute only these figures: some of 5 to 9, separated by commas.")
    ] = "",
    out: Out = None,
    png: Png = False,
    report: Report = None,
    json: Json = False,
) -> None:
    """AlpaComm (MLSys '23): its resharding microbenchmarks, training runs and ablations, figures 5 to 9.

    One device sends to several, and the nine cases of table 2 are resharded, by send/recv, all-gather and
    broadcast, in the orders that the paper compares. GPT and a U-Transformer train in two pipeline stages
    under 1F1B and eager-1F1B, with transfers beside the stages and without. All are simulated at full size
    (half a minute). The text states relations; a row holds where ours is on the same side. Without --rows and
    --figures, all rows and figures are computed.

    Example: meshweave reproduce alpacomm --report alpacomm.html
    """
    from meshweave_studies.alpacomm.readings import READINGS
    from meshweave_studies.papers import ALPACOMM, reproduce_alpacomm, select

    outputs = Outputs(out, png, report, json)
    selection = select(ALPACOMM, split_names(rows), split_names(figures))
    hosts = load_cluster(cluster) if cluster else None
    reading_named(READINGS, reading)
    outputs.check()
    outputs.write(reproduce_alpacomm(hosts, selection, reading=reading, progress_bar=progress_bar))


@reproduce.command()
def atp(
    rows: Rows = "",
    figures: Annotated[
        str, typer.Option(help="Compute only these figures: some of 10 to 12, separated by commas.")
    ] = "",
    out: Out = None,
    png: Png = False,
    report: Report = None,
    json: Json = False,
) -> None:
    """ATP: equations 2 to 4, the meshes that it chooses, figures 10 to 12 and table 3, beside ours with a verdict.

    Layers of four GPT models run on the paper's interconnects, which the catalog has as atp-ic1 to atp-ic6 (half
    a minute). Readings that the paper leaves open have rows of their own. Without --rows and --figures, all rows
    and figures are computed.

    Example: meshweave reproduce atp --report atp.html
    """
    from meshweave_studies.papers import ATP, reproduce_atp, select

    outputs = Outputs(out, png, report, json)
    selection = select(ATP, split_names(rows), split_names(figures))
    outputs.check()
    outputs.write(reproduce_atp(selection, progress_bar=progress_bar))


@reproduce.command()
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
    from meshweave_studies.kernels.score import catalog_kernels, overall, score_kernels
    from meshweave_studies.kernels.tables import score_table

    given = load_kernels(constants) if constants else None
    files = {"": read_measured(cases)} if cases is not None else {x: shipped_measured(x) for x in SHIPPED}
    scores = {}
    for name, measured in files.items():
        scored = score_kernels(measured, (lambda _: given) if given else catalog_kernels)
        title = "products, TPU compiler" if name == TPU_PRODUCTS else measured.kind
        scores[title] = [*scored, *overall(scored)]
    if json:
        print_json({kind: [score.to_json() for score in scored] for kind, scored in scores.items()})
        return
    for kind, scored in scores.items():
        typer.echo(f"{kind}\n\n{score_table(scored)}")


@reproduce.command()
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


@reproduce.command()
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
        OutputOption(help="Write the errors with their chips here (CSV), as the wheel ships them."),
    ] = None,
    json: Json = False,
) -> None:
    """Predict published training runs, and score step time (or MFU, tokens/s) and memory by source.

    Each row states model, chips, degrees and a figure, with its source. What cannot be predicted is listed with
    the reason. Software stacks have at most five named constants each, fitted on half of the families of models.

    Example: meshweave reproduce published --cases runs.csv
    """
    from meshweave_studies.training_runs.best_of_sweeps import cells_line, cells_table, sweep_cells
    from meshweave_studies.training_runs.rows import read_runs, shipped_runs
    from meshweave_studies.training_runs.score import score_runs, source_scores, summary_of
    from meshweave_studies.training_runs.sweeps import sweep_table, sweeps_of
    from meshweave_studies.training_runs.tables import runs_page, runs_table, scores_csv

    runs = read_runs(cases) if cases is not None else shipped_runs()
    with progress_bar("runs") as progress:
        rows = score_runs(runs, progress=progress)
    sweeps = sweeps_of(runs, rows)
    with progress_bar("sweeps") as progress:
        cells = sweep_cells(runs, progress)
    cells_text = f"{cells_line(cells)}\n\n{cells_table(cells)}" if cells else ""
    if report is not None:
        write_file(report, runs_page(rows, sweep_table(sweeps), cells_text))
    if scores is not None:
        write_file(scores, scores_csv(rows))
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


@reproduce.command(name="zero-bubble")
def zero_bubble(
    rows: Rows = "",
    out: Out = None,
    png: Png = False,
    report: Report = None,
    json: Json = False,
) -> None:
    """Zero Bubble: table 4, the gains of its schedules over 1F1B and their memory, beside ours with a verdict.

    Four GPT models run on 8 to 32 A100s under our 1F1B, interleaved 1F1B, ZB-1p and ZB-2p, simulated by three
    readings of the times of stages: FLOPs at one rate, kernels by shape, and the authors' profile (a minute).
    Without --rows, all rows are computed.

    Example: meshweave reproduce zero-bubble --rows zb_1p_profiled,memory_order
    """
    from meshweave_studies.papers import ZERO_BUBBLE, reproduce_zero_bubble, select

    outputs = Outputs(out, png, report, json)
    selection = select(ZERO_BUBBLE, split_names(rows))
    outputs.check()
    outputs.write(reproduce_zero_bubble(selection, progress_bar=progress_bar))


@reproduce.command()
def t3(
    rows: Rows = "",
    figures: Annotated[
        str, typer.Option(help="Compute only these figures: 4, 6, or some of 14 to 20, separated by commas.")
    ] = "",
    out: Out = None,
    png: Png = False,
    report: Report = None,
    json: Json = False,
) -> None:
    """T3 (ASPLOS '24): a product overlapped with its reduce-scatter in hardware, figures 4, 6 and 14 to 20.

    Sliced sub-layers of five models and one of a trillion parameters run sequentially, under T3 and under
    T3-MCA on a GPU that is simulated down to its memory controllers, one standing for a ring of 8 to 64
    (minutes; two simulations at a time). A gain holds within a quarter of itself. Without --rows and --figures,
    all rows and figures are computed.

    Example: meshweave reproduce t3 --rows mca,traffic
    """
    from meshweave_studies.papers import T3, reproduce_t3, select

    outputs = Outputs(out, png, report, json)
    selection = select(T3, split_names(rows), split_names(figures))
    outputs.check()
    bar = partial(progress_bar, plain_lines=True)
    outputs.write(reproduce_t3(selection, progress_bar=bar))
