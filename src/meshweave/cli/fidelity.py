"""`meshweave bench fidelity`: estimate and simulation beside measurement, on shapes that nothing was fitted on."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshweave.algorithms.matmul2d import ALGORITHMS
from meshweave.base.errors import DescriptionError, LayoutError, ProgramError
from meshweave.base.units import format_s
from meshweave.cli.options import JSON_HELP, check_writable, print_json, read_algorithms, read_mesh
from meshweave.describe.machine.cluster import Cluster, load_cluster
from meshweave.report.provenance import describe
from meshweave.report.timeline import to_svg, write_chrome, write_text

if TYPE_CHECKING:
    from meshweave.lab.fidelity.measure import FidelityReport
    from meshweave.trace import Trace


def fidelity(
    lab: Annotated[Path, typer.Option(help="LAB.toml: the interconnect to build, see `meshweave lab`.")],
    cluster: Annotated[
        str,
        typer.Option(help="Calibrated description of the lab; left out: its nominal rates, no other costs."),
    ] = "",
    cases: Annotated[int, typer.Option(help="How many cases to draw, 1 to 1000.")] = 40,
    seed: Annotated[int, typer.Option(help="Seed of the cases and operands.")] = 0,
    algorithms: Annotated[str, typer.Option(help="Names separated by commas, or 'all'.")] = "all",
    repeat: Annotated[int, typer.Option(help="Measured runs of each case, after one to warm up.")] = 3,
    mesh: Annotated[str, typer.Option(help="Mesh shape, ROWSxCOLS; by default that of a torus lab.")] = "",
    trace: Annotated[
        Path | None,
        typer.Option(help="Write a Chrome / Perfetto trace of one case: estimate, simulation, measurement."),
    ] = None,
    svg: Annotated[
        Path | None, typer.Option(help="Write these three timelines of rank 0 as a picture.")
    ] = None,
    trace_case: Annotated[
        int, typer.Option(help="Number of that case; -1: the one of median error.", min=-1)
    ] = -1,
    out: Annotated[Path | None, typer.Option(help="Write the results of all cases as JSON.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds after which everything is stopped.")] = 900.0,
    json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """Run random products in a lab and show how far estimate and simulation are off.

    Cases are drawn by the seed: algorithm, dataflow, sizes, slices, and the pace of products. Each runs as
    bench does, lowered and traced. Its estimate is that of its skeleton, its simulation that of the lowered
    program, both on the given description. Results are checked against the dense product.

    Example: meshweave bench fidelity --lab LAB.toml --cluster CALIBRATED.toml --trace trace.json
    """
    from meshweave.lab.fidelity.cases import efficiency, seeded_cases
    from meshweave.lab.fidelity.measure import fidelity as measure
    from meshweave.lab.lab import Lab

    loaded = Lab.load(lab)
    shape = read_mesh(mesh) if mesh else getattr(loaded.description.network, "shape", None)
    if shape is None or len(shape) != 2:
        raise LayoutError(f"{lab}: is no 2D torus; say --mesh ROWSxCOLS")
    if math.prod(shape) != loaded.num_ranks:
        raise LayoutError(f"mesh {'x'.join(map(str, shape))} is not one of {lab}'s {loaded.num_ranks} ranks")
    if not (1 <= cases <= 1000 and 1 <= repeat <= 100 and 0 < timeout < 1e5):
        raise LayoutError("cases must be 1 to 1000, repeat 1 to 100, timeout positive seconds")
    if trace_case >= cases:
        raise LayoutError(f"there is no case {trace_case}; with {cases} cases give 0 to {cases - 1}")
    for path in (trace, svg, out):
        check_writable(path)
    described = _described(cluster, loaded.cluster())
    names = [name for name in read_algorithms(algorithms) if name in ALGORITHMS]
    drawn = seeded_cases(seed, cases, described, shape, names)
    with loaded.up() as running:
        report = measure(
            running,
            drawn,
            described,
            repeat=repeat,
            seed=seed,
            timeout_s=timeout,
            say=lambda line: typer.echo(line, err=True),
        )
    result = {
        "lab": loaded.description.name,
        "cluster": described.name,
        "source": described.source,
        "calibrated": bool(cluster),
        "efficiency": efficiency(described),
        "seed": seed,
        "repeat": repeat,
        "machine": describe(),
        **report.to_json(),
    }
    if out is not None:
        write_text(out, _json(result))
    if trace is not None or svg is not None:
        title, traces = _three(report, trace_case, described)
        if trace is not None:
            write_chrome(trace, [replace(one, source=f"{name}, {title}") for name, one in traces])
        if svg is not None:
            write_text(svg, to_svg([(f"{title}, {name}", one) for name, one in traces]))
    if json:
        print_json(result)
    else:
        _print(report, loaded.description.name, described, bool(cluster))
        for path in (out, trace, svg):
            if path is not None:
                typer.echo(f"written: {path}")
    wrong = [outcome for outcome in report.outcomes if outcome.error != 0]
    if wrong:
        raise ProgramError(
            f"case {wrong[0].case.number}, {wrong[0].case}: the result differs from the dense product by "
            f"{wrong[0].error:g}"
        )


def _described(given: str, nominal: Cluster) -> Cluster:
    if not given:
        typer.echo(
            "no --cluster: predictions use the lab's nominal rates, which nobody has calibrated", err=True
        )
        return nominal
    found = load_cluster(given)
    if found.num_chips != nominal.num_chips:
        raise DescriptionError(
            f"{given}: describes {found.num_chips} chips, the lab has {nominal.num_chips} ranks; give the "
            "description that was calibrated on this lab"
        )
    return found


def _three(report: FidelityReport, number: int, cluster: Cluster) -> tuple[str, list[tuple[str, Trace]]]:
    from meshweave.lab.fidelity.measure import predicted

    chosen = report.median_case if number < 0 else report.outcomes[number]
    estimated, simulated = predicted(chosen.case, cluster)
    return f"case {number if number >= 0 else chosen.case.number}, {chosen.case}", [
        ("estimate", estimated),
        ("simulation", simulated),
        ("measurement", chosen.measured),
    ]


def _json(data: object) -> str:
    import json

    return json.dumps(data, indent=1) + "\n"


def _print(report: FidelityReport, lab: str, cluster: Cluster, is_calibrated: bool) -> None:
    kind = "calibrated" if is_calibrated else "uncalibrated"
    typer.echo(f"{lab}, {kind} description {cluster.name}; errors are predicted over measured, less one")
    typer.echo(f"{'case':>4} {'measured':>9} {'spread':>7} {'estimate':>9} {'simulated':>9}")
    for found in report.outcomes:
        spread = (max(found.runs_s) - min(found.runs_s)) / found.median_s
        notes = f"  {found.overruns} products overran their time" if found.overruns else ""
        notes += f"  WRONG by {found.error:g}" if found.error else ""
        typer.echo(
            f"{found.case.number:>4} {format_s(found.median_s):>9} {spread:>7.1%} {found.estimate_error:>+9.1%} "
            f"{found.simulation_error:>+9.1%}  {found.case}{notes}"
        )
    typer.echo(f"{'':20} {'estimate':>18} {'simulation':>18}")
    typer.echo(f"{'mean and worst error':20} {'mean':>9} {'worst':>8} {'mean':>9} {'worst':>8}")
    for name, errors in report.summary.items():
        numbers = [errors[what][key] for what in ("estimate", "simulation") for key in ("mean", "worst")]
        typer.echo(f"{name:20} " + " ".join(f"{n:>{9 - i % 2}.1%}" for i, n in enumerate(numbers)))
    for what in ("estimate", "simulation"):
        typer.echo(report.verdict(what))
    worst = sorted(report.outcomes, key=lambda o: -abs(o.estimate_error))[:3]
    typer.echo("furthest off by estimate: " + "; ".join(f"case {o.case.number}, {o.case}" for o in worst))
    late = max(found.late_s for found in report.outcomes)
    typer.echo(
        f"clocks known to {format_s(report.clock_uncertainty_s)}; ranks began at most {format_s(late)} late"
    )
