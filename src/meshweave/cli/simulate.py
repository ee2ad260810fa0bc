"""`meshweave simulate`: a program on a machine, op by op, and what bounds it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshweave.base.errors import DescriptionError, LayoutError, ProgramError, UnsupportedError, printable
from meshweave.base.limits import SIMULATED_RANKS
from meshweave.base.outputs import write_file
from meshweave.base.units import format_bytes, format_s, to_s
from meshweave.cli.entries import ConfigOption, SettingsOption, is_plan_file, read_program_or_entry
from meshweave.cli.option_fields import option, refuse_given, with_options
from meshweave.cli.options import (
    JSON_HELP,
    output,
    print_json,
    read_mesh,
    read_names,
    read_plan,
    read_ranks,
    say_written,
)
from meshweave.report.tables import text_console, text_table
from meshweave.report.timeline import write_chrome
from meshweave.trace import Trace

if TYPE_CHECKING:
    from rich.table import Table

    from meshweave.tune.cases import SimulatedCase, SimulationCase


# --- options ----------------------------------------------------------------------------------------------

# The options of `meshweave simulate`.


class Lowering(StrEnum):
    """What collectives are lowered to before a simulation: nothing, rings of permutes, or chains of messages."""

    none = "none"
    rings = "rings"
    chains = "chains"


class Comparison(StrEnum):
    """What a simulation is compared with: the estimate in closed form, without contention."""

    estimate = "estimate"


ProgramArgument = Annotated[
    str,
    typer.Argument(
        help="A plan.json of `meshweave plan`, a program text file, '-' for one on stdin, or an algorithm."
    ),
]


@dataclass(frozen=True)
class MachineOptions:
    """The machine on which programs run, how it carries them, and which program of an algorithm is taken."""

    cluster: str | None = option(
        None,
        "A catalog cluster, a TOML file or words; ':N' sets the number of chips. Default: the plan's "
        "own, or as many chips as the program has ranks.",
    )
    logical: bool = option(
        False, "Lay meshes on a torus that does not carry them, over links of several hops."
    )
    lower: Lowering = option(
        Lowering.none,
        "Write collectives out first: as rings of permutes, or broadcasts as chains of messages. The "
        "simulator runs them step by step either way.",
    )
    settings: SettingsOption = field(default_factory=list)
    config: ConfigOption = 0
    limits: bool = option(
        True, "Of a program: refuse one that takes more than seconds.", "--limits/--no-limits"
    )


@dataclass(frozen=True)
class PlannedOptions:
    """Which products of a plan are simulated, or which step of its ranking, and which ranks are shown."""

    layer: str = option("ff1", "Of a plan: the layer (qkv, out, ff1, ff2).")
    passes: str = option("all", "Of a plan: forward, backward_data, backward_weight or all.", "--pass")
    algorithms: str = option(
        "best", "Of a plan: algorithms separated by commas; 'best'; or 'all'.", "--algorithm"
    )
    mesh: str | None = option(
        None, "Of a plan: another mesh for all algorithms, ROWSxCOLS; slices are tuned for it."
    )
    place: int = option(1, "Of a plan of a step: the place of the configuration in its ranking.")
    against: Comparison | None = option(None, "Show the closed form, which knows no contention, beside it.")
    fast: bool = option(
        False,
        "On a cluster whose chip has a GPU in detail: take the rates of the cluster, as on other clusters.",
    )
    ranks: str = option(
        "",
        "Ranks to tell about, separated by commas; pictures of several runs show the first. Default: the "
        "one in the middle of the mesh, the one that ends last, and the first.",
    )


@dataclass(frozen=True)
class SimulateOutputs:
    """The files that a simulation writes, and whether it prints JSON."""

    trace: Path | None = output("Write a Chrome / Perfetto trace of these ranks.")
    svg: Path | None = output("Write the timeline as a picture.")
    png: Path | None = output("Write the same picture as PNG (needs meshweave[png]).")
    report: Path | None = output(
        "Write a page here: timelines, parts, links, critical path; self-contained HTML."
    )
    json: bool = option(False, JSON_HELP)


# --- simulate ---------------------------------------------------------------------------------------------

_TOP_LINKS = 5
_OF_PRODUCTS = ("layer", "passes", "algorithms", "mesh")
"""The options that choose among the products of a plan."""


@with_options
def simulate(
    what: ProgramArgument, machine: MachineOptions, options: PlannedOptions, outputs: SimulateOutputs
) -> None:
    """Simulate programs on a machine, op by op on every rank, and say what bounds them.

    Collectives run as ring steps and chains of packets; messages share links and memory. Shown are the duration,
    where each rank's time goes, the busiest links, and the critical path with lower bounds beside it. On a cluster
    whose chip has a GPU in detail (t3-8), `simulate-gpu` simulates programs down to caches and memory controllers.

    Example: meshweave simulate plan.json --layer ff1 --pass forward --algorithm wang,meshslice --svg timeline.svg

    More:    meshweave simulate 1f1b --set rows=32 --cluster dgx-h100:8

    More:    meshweave simulate step.json --against estimate
    """
    if outputs.png is not None:
        from meshweave.report.png import require_png

        require_png()
    shown = read_ranks(options.ranks)
    limits = machine.limits
    if what.endswith(".json") or is_plan_file(what):
        limits = False  # sizes of a plan agree with each other
        cases = _plan_cases(what, machine, options)
    else:
        refuse_given(options, (*_OF_PRODUCTS, "place"), what, "is no plan")
        cases = [read_program_case(what, machine)]
        cluster = cases[0].machine.cluster
        if not cluster.chip.gpu:
            refuse_given(options, ("fast",), cluster.name, "describes no GPU in detail")
        if not options.fast:
            _refuse_in_detail(cases[0])
    for case in cases:
        _check_ranks(case, shown)
    closed_form = options.against is not None
    simulated = _all_simulated(what, cases, shown, closed_form=closed_form, limited=limits)
    _write(simulated, outputs)
    if outputs.json:
        print_json([item.to_json(_TOP_LINKS) for item in simulated])
    else:
        for item in simulated:
            _print(item)
        say_written(outputs.trace, outputs.svg, outputs.png, outputs.report)


def _refuse_in_detail(case: SimulationCase) -> None:
    """Raise UnsupportedError where the chip has a GPU in detail, which would give other times than these."""
    cluster = case.machine.cluster
    if cluster.chip.gpu:
        raise UnsupportedError(
            f"{printable(cluster.name)} describes its GPU in detail: `meshweave simulate-gpu` simulates that, and "
            "--fast takes the rates of the cluster, as on others"
        )


def _plan_cases(what: str, machine: MachineOptions, options: PlannedOptions) -> list[SimulationCase]:
    """Return the products of a plan, each on its machine, or the step of a plan."""
    from meshweave.tune.cases import plan_cases
    from meshweave.tune.step_cases import step_case

    plan = read_plan(what)
    refuse_given(machine, ("settings", "config"), what, "is a plan, and no algorithm")
    refuse_given(machine, ("limits",), what, "is a plan, which has no such limits")
    refuse_given(options, ("fast",), what, "is a plan, which has the rates of its cluster")
    if plan.kind == "step":
        refuse_given(options, _OF_PRODUCTS, what, "is the plan of a step, and has no products")
        refuse_given(
            machine, ("logical", "lower"), what, "is the plan of a step, whose program is written as it runs"
        )
        return [step_case(plan, machine.cluster, options.place)]
    refuse_given(options, ("place",), what, "is a plan of products, and ranks no steps")
    best = [plan.best.algorithm]
    return plan_cases(
        plan,
        machine.cluster,
        layer=options.layer,
        passes=read_names(options.passes),
        algorithms=best if options.algorithms == "best" else read_names(options.algorithms),
        mesh_shape=read_mesh(options.mesh) if options.mesh else None,
        logical=machine.logical,
        lowered_to=machine.lower.value,
    )


def read_program_case(what: str, machine: MachineOptions) -> SimulationCase:
    """Return the program of a file, of stdin for "-" or of an algorithm, on its machine, ready to be simulated.

    Args:
        what: a file, "-", or the name of an algorithm, as for `read_program_or_entry`.
        machine: the cluster, which must be given, and the options of the program.

    Raises:
        DescriptionError: no cluster is given, or a file or the cluster is wrong.
        ProgramError: the program is wrong, does not fit the machine or, with limits, has too many ranks.
        LayoutError, UnsupportedError: there is no such algorithm or config, a setting is wrong, or the cluster
            does not carry the program's meshes.
    """
    from meshweave.tune.cases import program_case

    if machine.cluster is None:
        raise DescriptionError("a program says nothing about a machine; give --cluster NAME[:N] or FILE")
    program = read_program_or_entry(what, machine.settings, machine.config)
    if machine.limits and len(program.ranks) > SIMULATED_RANKS.most:
        raise ProgramError(f"{printable(what)}: {SIMULATED_RANKS.refusal(len(program.ranks))}")
    try:
        return program_case(program, machine.cluster, logical=machine.logical, lowered_to=machine.lower.value)
    except ProgramError as error:
        raise ProgramError(f"{printable(what)}: {error}") from None


def _check_ranks(case: SimulationCase, shown: tuple[int, ...]) -> None:
    known = case.program.ranks
    for rank in shown:
        if rank not in known:
            raise LayoutError(
                f"program {printable(case.program.name)} has ranks {known[0]} to {known[-1]}, not {rank}"
            )


def _all_simulated(
    what: str, cases: Sequence[SimulationCase], ranks: tuple[int, ...], *, closed_form: bool, limited: bool
) -> list[SimulatedCase]:
    from meshweave.tune.cases import simulate_case

    simulated = []
    try:
        for case in cases:
            with _status(case):
                simulated.append(simulate_case(case, ranks, closed_form=closed_form, limited=limited))
    except ProgramError as error:
        raise ProgramError(f"{printable(what)}: {error}") from None
    return simulated


@contextmanager
def _status(case: SimulationCase) -> Iterator[None]:
    """Show a line on stderr while a case is simulated; nothing where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    text = f"simulating {case.title}: about {case.num_ops:,} ops on {len(case.program.ranks)} ranks"
    with Console(stderr=True).status(text):
        yield


# --- files ----------------------------------------------------------------------------------------------


def _write(simulated: Sequence[SimulatedCase], outputs: SimulateOutputs) -> None:
    if outputs.trace is not None:
        titled = [(item.case.title, item.run.trace(item.ranks).spans) for item in simulated]
        write_chrome(outputs.trace, [Trace(title, title, spans) for title, spans in titled])
    if outputs.svg is not None or outputs.png is not None:
        from meshweave.report.simulation_picture import draw_cases

        picture = draw_cases(simulated)
        if outputs.svg is not None:
            write_file(outputs.svg, picture)
        if outputs.png is not None:
            from meshweave.report.png import write_png

            write_png(outputs.png, picture)
    if outputs.report is not None:
        from meshweave.report.simulation_page import simulation_page

        write_file(outputs.report, simulation_page(simulated))


# --- text -----------------------------------------------------------------------------------------------


def _print(simulated: SimulatedCase) -> None:
    case, run, path = simulated.case, simulated.run, simulated.path
    console = text_console()
    console.print(f"\n{case.title}", style="bold", markup=False)
    console.print(f"  {case.subject}", markup=False)
    console.print(f"  {len(run.ranks)} ranks, {run.num_ops:,} ops, {run.num_events:,} events")
    beside = ""
    if simulated.closed_form_s is not None:
        beside = f"; closed form {format_s(simulated.closed_form_s)}"
        if simulated.over_closed_form is not None:
            beside += f" ({100 * simulated.over_closed_form:+.1f} %)"
    console.print(f"  duration {format_s(run.duration_s)}{beside}")
    console.print(f"  {path.verdict}", markup=False)
    parts = ", ".join(f"{name} {format_s(to_s(ps))}" for name, ps in path.ps_by_category.items() if ps)
    slowed = format_s(to_s(path.slowed_ps))
    console.print(f"  critical path: {parts or 'empty'}; {slowed} of it by sharing and neighbours")
    bounds = ", ".join(f"{bound.name} {format_s(to_s(bound.time_ps))}" for bound in path.bounds)
    console.print(f"  no order of the same work takes less than: {bounds}")
    console.print(_parts_table(simulated))
    if run.links:
        console.print(_links_table(simulated))


def _parts_table(simulated: SimulatedCase) -> Table:
    mean = simulated.mean_parts()
    head = ("rank", *(name.removesuffix("_s") for name in mean), "exposed")
    rows = []
    for rank in simulated.ranks:
        values = (*simulated.run.parts(rank).values(), simulated.run.exposed_s(rank))
        rows.append((str(rank), *map(format_s, values)))
    rows.append(("mean of all", *map(format_s, mean.values()), ""))
    return text_table(head, rows, ("rank",), title="seconds by rank", whole=head)


def _links_table(simulated: SimulatedCase) -> Table:
    head = ("links", "number", "used", "most used", "bytes")
    rows = [
        (
            links.name,
            str(links.count),
            f"{100 * links.mean_utilisation:.1f} %",
            f"{100 * links.max_utilisation:.1f} %",
            format_bytes(links.carried_bytes),
        )
        for links in simulated.link_classes()[:_TOP_LINKS]
    ]
    for use in simulated.busiest_links(_TOP_LINKS):
        rows.append((use.name, "1", f"{100 * use.utilisation:.1f} %", "", format_bytes(use.carried_bytes)))
    return text_table(head, rows, ("links",), title="links by use", whole=head)
