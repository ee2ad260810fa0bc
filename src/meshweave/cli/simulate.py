"""`meshweave simulate`: a program on a machine, op by op, and what bounds it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshweave.base.errors import DescriptionError, LayoutError
from meshweave.base.units import format_bytes, format_s, to_s
from meshweave.cli.options import JSON_HELP, check_writable, print_json, read_ranks
from meshweave.cli.simulate_jobs import Job, Lower, read_jobs
from meshweave.describe.files import printable
from meshweave.report.timeline import write_chrome, write_text
from meshweave.trace import Trace

if TYPE_CHECKING:
    from meshweave.report.simulation import Found

_TOP_LINKS = 5


class Against(StrEnum):
    estimate = "estimate"


def simulate(
    what: Annotated[
        str,
        typer.Argument(help="A program text file, '-' for one on stdin, or a plan.json of `meshweave plan`."),
    ],
    cluster: Annotated[
        str | None,
        typer.Option(
            help="A catalog cluster or a TOML file; ':N' sets the number of chips. Default: the plan's own, or as "
            "many chips as the program has ranks."
        ),
    ] = None,
    logical: Annotated[
        bool,
        typer.Option(
            "--logical", help="Lay meshes on a torus that does not carry them, over links of several hops."
        ),
    ] = False,
    layer: Annotated[str, typer.Option(help="Of a plan: the layer (qkv, out, ff1, ff2).")] = "ff1",
    passes: Annotated[
        str, typer.Option("--pass", help="Of a plan: forward, backward_data, backward_weight or all.")
    ] = "all",
    algorithms: Annotated[
        str, typer.Option("--algorithm", help="Of a plan: algorithms separated by commas; 'best'; or 'all'.")
    ] = "best",
    mesh: Annotated[
        str | None,
        typer.Option(help="Of a plan: another mesh for all algorithms, ROWSxCOLS; slices are tuned for it."),
    ] = None,
    lower: Annotated[
        Lower,
        typer.Option(
            help="Write collectives out first: as rings of permutes, or broadcasts as chains of messages. The "
            "simulator runs them step by step either way."
        ),
    ] = Lower.none,
    against: Annotated[
        Against | None, typer.Option(help="Show the closed form, which knows no contention, beside it.")
    ] = None,
    ranks: Annotated[
        str,
        typer.Option(
            help="Ranks to tell about, separated by commas; pictures of several runs show the first. Default: the "
            "one in the middle of the mesh, the one that ends last, and 0."
        ),
    ] = "",
    trace: Annotated[
        Path | None, typer.Option(help="Write a Chrome / Perfetto trace of these ranks.")
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="Write the timeline as a picture.")] = None,
    png: Annotated[
        Path | None, typer.Option(help="Write the same picture as PNG (needs meshweave[png]).")
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(help="Write a page here: timelines, parts, links, critical path; self-contained HTML."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """Simulate programs on a machine, op by op on every rank, and say what bounds them.

    Collectives run as ring steps and chains of packets; messages share links and memory. Shown are the duration,
    where each rank's time goes, the busiest links, and the critical path with lower bounds beside it.

    Example: meshweave simulate plan.json --layer ff1 --pass forward --algorithm wang,meshslice --svg timeline.svg
    """
    for path in (trace, svg, png, report):
        check_writable(path)
    if png is not None:
        from meshweave.report.png import check_png

        check_png()
    asked = read_ranks(ranks)
    jobs = read_jobs(what, cluster, logical, lower, layer, passes, algorithms, mesh)
    if not jobs:
        raise LayoutError(f"no algorithm of the plan has a {mesh} mesh")
    for job in jobs:
        _check_ranks(job, asked)
    found = [_simulated(job, asked, against is not None) for job in jobs]
    _write(found, trace, svg, png, report)
    if json:
        from meshweave.report.simulation import to_json

        print_json([to_json(one, _TOP_LINKS) for one in found])
        return
    for one in found:
        _print(one)
    for path in (trace, svg, png, report):
        if path is not None:
            typer.echo(f"written: {path}")


def _check_ranks(job: Job, asked: tuple[int, ...]) -> None:
    known = job.program.ranks
    for rank in asked:
        if rank not in known:
            raise LayoutError(f"program {job.program.name} has ranks {known[0]} to {known[-1]}, not {rank}")


def _simulated(job: Job, asked: tuple[int, ...], against: bool) -> Found:
    from meshweave.report.simulation import Found
    from meshweave.simulate import simulate as run_simulation
    from meshweave.simulate.critical import critical_path

    with _status(f"simulating {job.title}: about {job.num_ops:,} ops on {len(job.program.ranks)} ranks"):
        run = run_simulation(job.program, job.machine)
        path = critical_path(run)
        closed_form_s = job.closed_form_s() if against else None
    last = path.steps[-1].rank if path.steps else job.program.ranks[0]
    shown = asked or tuple(dict.fromkeys((job.centre, last, job.program.ranks[0])))
    return Found(job.title, job.name, job.note, job.what, run, path, shown, closed_form_s)


@contextmanager
def _status(text: str) -> Iterator[None]:
    """A line on stderr while work goes on; nothing where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield


# --- files ----------------------------------------------------------------------------------------------


def _write(
    found: Sequence[Found], trace: Path | None, svg: Path | None, png: Path | None, report: Path | None
) -> None:
    if trace is not None:
        write_chrome(trace, [Trace(f.title, f.title, f.run.trace(f.ranks).spans) for f in found])
    if svg is not None or png is not None:
        picture = _picture(found)
        if svg is not None:
            write_text(svg, picture)
        if png is not None:
            from meshweave.report.png import to_png

            try:
                png.write_bytes(to_png(picture))
            except OSError as error:
                raise DescriptionError(f"{printable(png)}: cannot write: {error.strerror}") from None
    if report is not None:
        from meshweave.report.simulation import simulation_page

        title = (
            found[0].title if len(found) == 1 else f"{len(found)} runs, {found[0].run.machine.cluster.name}"
        )
        write_text(report, simulation_page(title, found, _chip(found[0])))


def _picture(found: Sequence[Found]) -> str:
    """Of one run all ranks asked for; of several the first rank of each, named by what tells them apart."""
    from meshweave.report.simulation_picture import draw_strips, strip_of

    first = found[0]
    if len(found) == 1:
        strips = [strip_of(first.run, rank, f"rank {rank}") for rank in first.ranks]
        return draw_strips(first.title, strips, subtitle=first.what)
    # `what` ends in the mesh: one product on several meshes is still one product.
    products, meshes = zip(*(f.what.rpartition(", ")[::2] for f in found), strict=True)
    alike = len(set(products)) == 1 and len({f.name for f in found}) == len(found)
    if not alike:
        strips = [strip_of(f.run, f.ranks[0], f.title) for f in found]
        return draw_strips(f"{len(found)} simulated runs", strips, subtitle=_chip(first))
    title, _, sizes = products[0].partition(": ")
    if len(set(meshes)) == 1:
        notes = [f.note for f in found]
        where = f"{meshes[0]}; {_chip(first)}"
    else:
        notes = [
            ", ".join(filter(None, (f.note, mesh.partition(" mesh of ")[0])))
            for f, mesh in zip(found, meshes, strict=True)
        ]
        chips = {f.ranks[0] for f in found}
        which = f"rank {chips.pop()} of each" if len(chips) == 1 else "on each mesh the chip in the middle"
        where = f"{meshes[0].partition(' mesh of ')[2]}; {which}"
    strips = [strip_of(f.run, f.ranks[0], f.name, note) for f, note in zip(found, notes, strict=True)]
    return draw_strips(title, strips, subtitle=f"{sizes}, {where}")


def _chip(found: Found) -> str:
    """`chip (8, 8)`: where the first rank shown stands."""
    rank = found.ranks[0]
    mesh = next(mesh for mesh in found.run.program.meshes if rank in mesh)
    return f"chip ({', '.join(map(str, mesh.coords(rank)))})"


# --- text -----------------------------------------------------------------------------------------------


def _print(found: Found) -> None:
    from rich.console import Console

    run, path = found.run, found.path
    console = Console(width=max(Console().width, 124) if not Console().is_terminal else None, highlight=False)
    console.print(f"\n{found.title}", style="bold", markup=False)
    console.print(f"  {found.what}", markup=False)
    console.print(f"  {len(run.ranks)} ranks, {run.num_ops:,} ops, {run.num_events:,} events")
    beside = ""
    if found.closed_form_s is not None:
        beside = f"; closed form {format_s(found.closed_form_s)}"
        if found.closed_form_s:
            beside += f" ({100 * (run.duration_s / found.closed_form_s - 1):+.1f} %)"
    console.print(f"  duration {format_s(run.duration_s)}{beside}")
    console.print(f"  {path.verdict}", markup=False)
    parts = ", ".join(f"{name} {format_s(to_s(ps))}" for name, ps in path.parts_ps.items() if ps)
    slowed = format_s(to_s(path.slowed_ps))
    console.print(f"  critical path: {parts or 'empty'}; {slowed} of it by sharing and neighbours")
    bounds = ", ".join(f"{bound.name} {format_s(to_s(bound.ps))}" for bound in path.bounds)
    console.print(f"  no order of the same work takes less than: {bounds}")
    console.print(_parts_table(found))
    if run.links:
        console.print(_links_table(found))


def _parts_table(found: Found) -> object:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from meshweave.report.simulation import mean_parts
    from meshweave.simulate.result import PARTS

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title="seconds by rank", title_justify="left")
    for column in ("rank", *(name.removesuffix("_s") for name in PARTS), "exposed"):
        table.add_column(column, justify="left" if column == "rank" else "right", no_wrap=True)
    for rank in found.ranks:
        values = (*found.run.parts(rank).values(), found.run.exposed_s(rank))
        table.add_row(str(rank), *map(format_s, values))
    table.add_row("mean of all", *map(format_s, mean_parts(found.run).values()), "")
    return table


def _links_table(found: Found) -> object:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from meshweave.report.simulation import busiest_links, link_classes
    from meshweave.simulate.critical import link_name

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title="links by use", title_justify="left")
    for column in ("links", "number", "used", "most used", "bytes"):
        table.add_column(column, justify="left" if column == "links" else "right", no_wrap=True)
    for one in link_classes(found.run)[:_TOP_LINKS]:
        table.add_row(
            one.name,
            str(one.count),
            f"{100 * one.mean:.1f} %",
            f"{100 * one.most:.1f} %",
            format_bytes(one.carried_bytes),
        )
    for use in busiest_links(found.run, _TOP_LINKS):
        table.add_row(
            link_name(use), "1", f"{100 * use.utilisation:.1f} %", "", format_bytes(use.carried_bytes)
        )
    return table
