"""`meshweave bench fidelity`: how far estimate and simulation are off, for random products in a lab."""

from __future__ import annotations

from dataclasses import dataclass, replace
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

import meshweave_lab.cli.bench_options as options
from meshweave.base.errors import DescriptionError, LayoutError, ProgramError
from meshweave.base.outputs import write_file
from meshweave.base.units import format_s
from meshweave.cli.option_fields import option, refuse_given, with_options
from meshweave.cli.options import output, print_json, say_written
from meshweave.describe.machine.cluster import Cluster, load_cluster
from meshweave.report.timeline import timeline_svg, write_chrome
from meshweave_lab.provenance import describe_environment

if TYPE_CHECKING:
    from meshweave_lab.fidelity.measure import FidelityReport


@dataclass(frozen=True)
class FidelityOptions:
    """What is measured beside its predictions, and what is written."""

    cluster: str = option(
        "", "Calibrated description of the lab. Default: its nominal rates and no other costs."
    )
    cases: int = option(40, "Number of random cases, 1 to 1000.")
    seed: options.Seed = 0
    algorithms: options.Algorithms = "all"
    repeat: int = option(3, "Measured runs of each case, after one to warm up.")
    mesh: options.MeshShape = ""
    trace: Path | None = output(
        "Write estimate, simulation and measurement of one case as a Chrome / Perfetto trace here."
    )
    svg: Path | None = output("Write these three timelines of rank 0 as a picture here.")
    trace_case: int = option(-1, "Number of the case to draw; -1: the case of median error.", min=-1)
    out: options.ResultsFile = None
    timeout: options.Timeout = 900.0
    json: options.Json = False


@with_options
def fidelity(lab: options.LabFile, given: FidelityOptions) -> None:
    """Run random products in a lab and show how far estimate and simulation are off.

    The seed decides algorithm, dataflow, sizes, slices and pace of each case. A case runs lowered and traced, as
    in `bench matmul`. Its estimate comes from its skeleton, its simulation from the lowered program, both on the
    given cluster description. Results are checked against the dense product.

    Example: meshweave bench fidelity --lab LAB.toml --cluster CALIBRATED.toml --trace trace.json
    """
    from meshweave_lab.fidelity.cases import reached_share_of_pace
    from meshweave_lab.fidelity.measure import run_fidelity

    described_lab, shape = options.load_lab_and_full_mesh(lab, given.mesh)
    _check_cases(given.cases, given.repeat, given.timeout, given.trace_case)
    options.check_run(given.repeat, given.timeout)
    if given.trace is None and given.svg is None:
        refuse_given(given, ("trace_case",), "the command", "writes neither --trace nor --svg")
    described = _cluster(given.cluster, described_lab.cluster())
    report = run_fidelity(
        described_lab,
        described,
        shape,
        num_cases=given.cases,
        names=options.read_algorithms_2d(given.algorithms),
        repeat=given.repeat,
        seed=given.seed,
        timeout_s=given.timeout,
        on_case=lambda line: typer.echo(line, err=True),
    )
    result = {
        "lab": described_lab.description.name,
        "cluster": described.name,
        "source": described.source,
        "calibrated": bool(given.cluster),
        "efficiency": reached_share_of_pace(described),
        "seed": given.seed,
        "repeat": given.repeat,
        "machine": describe_environment(),
        **report.to_json(),
    }
    _write_timelines(report, given.trace_case, described, given.trace, given.svg)
    _write_json(given.out, result)
    if given.json:
        print_json(result)
    else:
        _print(report, described_lab.description.name, described, bool(given.cluster))
        say_written(given.out, given.trace, given.svg)
    _refuse_wrong_results(report)


def _check_cases(cases: int, repeat: int, timeout: float, trace_case: int) -> None:
    if not (1 <= cases <= 1000 and 1 <= repeat <= 100 and 0 < timeout < 1e5):
        raise LayoutError("cases must be 1 to 1000, repeat 1 to 100, timeout positive seconds")
    if trace_case >= cases:
        raise LayoutError(f"there is no case {trace_case}; with {cases} cases give 0 to {cases - 1}")


def _write_json(path: Path | None, result: dict[str, Any]) -> None:
    if path is not None:
        write_file(path, dumps(result, indent=1) + "\n")


def _cluster(path: str, nominal: Cluster) -> Cluster:
    if not path:
        typer.echo(
            "no --cluster: predictions use the lab's nominal rates, which nobody has calibrated", err=True
        )
        return nominal
    cluster = load_cluster(path)
    if cluster.num_chips != nominal.num_chips:
        raise DescriptionError(
            f"{path}: describes {cluster.num_chips} chips, the lab has {nominal.num_chips} ranks; give the "
            "description that was calibrated on this lab"
        )
    return cluster


def _write_timelines(
    report: FidelityReport, number: int, cluster: Cluster, trace: Path | None, svg: Path | None
) -> None:
    """Write estimate, simulation and measurement of one case; -1 is the case of median error."""
    if trace is None and svg is None:
        return
    outcome = report.median_case if number < 0 else report.outcomes[number]
    title = f"case {outcome.case.number}, {outcome.case}"
    timelines = outcome.timelines(cluster)
    if trace is not None:
        write_chrome(trace, [replace(line, source=f"{name}, {title}") for name, line in timelines.items()])
    if svg is not None:
        write_file(svg, timeline_svg([(f"{title}, {name}", line) for name, line in timelines.items()]))


def _print(report: FidelityReport, lab: str, cluster: Cluster, is_calibrated: bool) -> None:
    kind = "calibrated" if is_calibrated else "uncalibrated"
    typer.echo(f"{lab}, {kind} description {cluster.name}; errors are predicted over measured, less one")
    typer.echo(f"{'case':>4} {'measured':>9} {'spread':>7} {'estimate':>9} {'simulated':>9}")
    for outcome in report.outcomes:
        spread = (max(outcome.runs_s) - min(outcome.runs_s)) / outcome.median_s
        notes = f"  {outcome.overruns} products overran their time" if outcome.overruns else ""
        notes += f"  WRONG by {outcome.error:g}" if outcome.error else ""
        typer.echo(
            f"{outcome.case.number:>4} {format_s(outcome.median_s):>9} {spread:>7.1%} "
            f"{outcome.estimate_error:>+9.1%} {outcome.simulation_error:>+9.1%}  {outcome.case}{notes}"
        )
    typer.echo(f"{'':20} {'estimate':>18} {'simulation':>18}")
    typer.echo(f"{'mean and worst error':20} {'mean':>9} {'worst':>8} {'mean':>9} {'worst':>8}")
    for name, errors in report.summary.items():
        numbers = [errors[what][key] for what in ("estimate", "simulation") for key in ("mean", "worst")]
        typer.echo(f"{name:20} " + " ".join(f"{n:>{9 - i % 2}.1%}" for i, n in enumerate(numbers)))
    for what in ("estimate", "simulation"):
        typer.echo(report.verdict(what))
    worst = sorted(report.outcomes, key=lambda outcome: -abs(outcome.estimate_error))[:3]
    typer.echo("furthest off by estimate: " + "; ".join(f"case {o.case.number}, {o.case}" for o in worst))
    late = max(outcome.late_s for outcome in report.outcomes)
    typer.echo(
        f"clocks known to {format_s(report.clock_uncertainty_s)}; ranks began at most {format_s(late)} late"
    )


def _refuse_wrong_results(report: FidelityReport) -> None:
    for outcome in report.outcomes:
        if outcome.error != 0:
            raise ProgramError(
                f"case {outcome.case.number}, {outcome.case}: the result differs from the dense product by "
                f"{outcome.error:g}"
            )
