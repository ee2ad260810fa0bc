"""`meshweave run`: execute a planned layer on local processes, check its numbers and its order of events."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshweave.base.errors import ProgramError
from meshweave.base.outputs import write_file
from meshweave.base.units import format_s
from meshweave.cli.option_fields import option, with_options
from meshweave.cli.options import JSON_HELP, output, print_json, read_names, read_plan, say_written
from meshweave.describe.machine.cluster import load_cluster
from meshweave.report.timeline import timeline_svg, timeline_text, write_chrome
from meshweave.trace import Trace

if TYPE_CHECKING:
    from meshweave.check import MeasuredProduct, RunReport


@dataclass(frozen=True)
class RunOptions:
    """Which products of a plan run, at which size, and what is written."""

    layer: str = option("ff1", "Layer of the plan (qkv, out, ff1, ff2).")
    passes: str = option("all", "forward, backward_data, backward_weight or all.", "--pass")
    algorithms: str = option(
        "best", "Algorithms of the plan, separated by commas; 'best'; or 'all'.", "--algorithm"
    )
    ranks: int = option(4, "Local processes.")
    max_dim: int = option(2048, "Sizes are reduced in proportion until no dim is larger.")
    repeat: int = option(25, "Measured runs of each program, after one to warm up.")
    rings: int = option(1, "Run collectives as rings in 1 or 2 directions, or 0: as gloo's own.")
    seed: int = option(0, "Seed of the operands.")
    machine: str = option(
        "",
        "Cluster description that the prediction beside the measurement is made with. Default: constants "
        "of these processes, measured in turns with the runs.",
    )
    trace: Path | None = output("Write a Chrome / Perfetto trace, predicted beside measured.")
    svg: Path | None = output("Write the timeline of rank 0 as a picture.")
    timeout: float = option(120.0, "Seconds after which everything is stopped.")
    json: bool = option(False, JSON_HELP)


@with_options
def run(
    plan: Annotated[Path, typer.Argument(help="A plan written by `meshweave plan --out`.")],
    options: RunOptions,
) -> None:
    """Execute a planned layer at reduced size on local processes and check it.

    Each product runs as the planned program: same dataflow, slices and lanes, mesh shape in proportion.
    Checked are the numbers (exactly, against the dense product), and that the measured order of events
    satisfies every edge of the program. Shown are measured and predicted timelines. Without --machine the
    constants of the prediction are measured in the same processes, on three quarters of the product: once its
    transfers alone, once with its multiplications.

    Example: meshweave run plan.json --layer ff1 --ranks 4 --trace trace.json
    """
    from meshweave import check

    loaded = read_plan(plan)
    report = check.run(
        loaded,
        load_cluster(options.machine) if options.machine else None,
        layer=options.layer,
        passes=read_names(options.passes),
        algorithms=options.algorithms
        if options.algorithms == "best"
        else read_names(options.algorithms) or "all",
        num_ranks=options.ranks,
        max_dim=options.max_dim,
        repeat=options.repeat,
        num_ring_directions=options.rings,  # type: ignore[arg-type]
        seed=options.seed,
        timeout_s=options.timeout,
    )
    for name in report.skipped:
        typer.echo(f"skipped: {name} has no mesh of {options.ranks} ranks", err=True)
    if options.json:
        print_json([product.to_json() for product in report.products])
    else:
        for product in report.products:
            _print(product)
    _write(report, options.trace, options.svg, quiet=options.json)
    for product in report.products:
        if product.error != 0:
            raise ProgramError(
                f"{product.title}: the result differs from the dense product by {product.error:g}"
            )


def _write(report: RunReport, trace: Path | None, svg: Path | None, *, quiet: bool) -> None:
    named = [
        (f"{product.title}, {source}", record)
        for product in report.products
        for source, record in (("predicted", product.predicted), ("measured", product.measured))
    ]
    if trace is not None:
        write_chrome(trace, [Trace(record.program, title, record.spans) for title, record in named])
    if svg is not None:
        write_file(svg, timeline_svg(named))
    if not quiet:
        say_written(trace, svg)


def _print(product: MeasuredProduct) -> None:
    problem = product.product.problem
    assert problem is not None
    measured, predicted = product.measured, product.predicted
    typer.echo(
        f"\n{product.title}: {problem.dataflow} {problem.m} x {problem.n} x {problem.k} float32 on a "
        f"{'x'.join(map(str, problem.mesh_shape))} mesh"
    )
    exact = "exactly the dense product" if product.error == 0 else f"WRONG by {product.error:g}"
    typer.echo(f"  result    {exact}")
    typer.echo(
        f"  order     {product.num_orderings} orderings of the measured runs checked, all as the program demands"
    )
    typer.echo(
        f"  measured  {format_s(product.median_s)} (of {len(product.runs_s)}: "
        f"{format_s(min(product.runs_s))} to {format_s(max(product.runs_s))}); rank 0 overlaps communication "
        f"with products for {format_s(measured.overlap_s(0))}, exposes {format_s(measured.exposed_s(0))}"
    )
    error = predicted.duration_s / product.median_s - 1
    source = (
        "the given description" if product.constants is None else f"measured constants: {product.constants}"
    )
    typer.echo(f"  predicted {format_s(predicted.duration_s)} ({error:+.0%}) with {source}")
    for title, record in (("measured", measured), ("predicted", predicted)):
        typer.echo(f"  rank 0, {title} (█ product, ▒ copy or add, ━ communication)")
        for line in timeline_text(record, 0).splitlines():
            typer.echo(f"    {line}")
