"""`meshweave run`: execute a planned layer on local processes, check its numbers and its order of events."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from meshweave.algorithms.matmul2d import algorithm
from meshweave.algorithms.matmul2d.common.passes import pass_problem
from meshweave.base.errors import LayoutError, ProgramError, UnsupportedError
from meshweave.base.units import format_s
from meshweave.cli.options import JSON_HELP, check_writable, print_json
from meshweave.cli.planned import check_layer, product_title, products, read_passes
from meshweave.cost.machine import Machine
from meshweave.describe.machine.cluster import load_cluster
from meshweave.ir.analysis.dataflow import Dataflow, analyse
from meshweave.ir.analysis.validate import validate
from meshweave.ir.program.text import to_text
from meshweave.lower import lower_rings
from meshweave.nn.rehearse import Rehearsal, reduced
from meshweave.report.timeline import to_svg, write_chrome, write_text
from meshweave.report.timeline import to_text as timeline_text
from meshweave.simulate import simulate
from meshweave.trace import Trace, check_order, merge
from meshweave.tune import Plan, load_plan


def run(
    plan: Annotated[Path, typer.Argument(help="A plan written by `meshweave plan --out`.")],
    layer: Annotated[str, typer.Option(help="Layer of the plan (qkv, out, ff1, ff2).")] = "ff1",
    passes: Annotated[
        str, typer.Option("--pass", help="forward, backward_data, backward_weight or all.")
    ] = "all",
    algorithms: Annotated[
        str,
        typer.Option("--algorithm", help="Algorithms of the plan, separated by commas; 'best'; or 'all'."),
    ] = "best",
    ranks: Annotated[int, typer.Option(help="Local processes.")] = 4,
    max_dim: Annotated[
        int, typer.Option(help="Sizes are reduced in proportion until no dim is larger.")
    ] = 2048,
    repeat: Annotated[int, typer.Option(help="Measured runs of each program, after one to warm up.")] = 3,
    rings: Annotated[
        int, typer.Option(help="Run collectives as rings of 1 or 2 ways, or 0: as gloo's own.")
    ] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the operands.")] = 0,
    machine: Annotated[
        str, typer.Option(help="Cluster description that the prediction beside the measurement is made with.")
    ] = "local-cpu",
    trace: Annotated[
        Path | None, typer.Option(help="Write a Chrome / Perfetto trace, predicted beside measured.")
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="Write the timeline of rank 0 as a picture.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds after which everything is stopped.")] = 120.0,
    json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """Execute a planned layer at reduced size on local processes and check it.

    Each product runs as the planned program: same dataflow, slices and lanes, mesh shape in proportion.
    Checked are the numbers (exactly, against the dense product), and that the measured order of events
    satisfies every edge of the program. Shown are measured and predicted timelines.

    Example: meshweave run plan.json --layer ff1 --ranks 4 --trace trace.json
    """
    loaded = load_plan(plan)
    if not 1 <= ranks <= 64:
        raise LayoutError(f"{ranks} local processes: give 1 to 64")
    if not (1 <= repeat <= 1000 and 8 <= max_dim <= 1 << 20 and 0 < timeout < 1e6):
        raise LayoutError("repeat must be 1 to 1000, max-dim 8 to 2**20, timeout positive seconds")
    if rings not in (0, 1, 2):
        raise LayoutError(f"a ring has 1 or 2 ways, or 0 for none, not {rings}")
    for path in (trace, svg):
        check_writable(path)
    jobs = _jobs(loaded, layer, passes, algorithms, ranks, max_dim, rings)
    predicted_on = load_cluster(machine)
    if predicted_on.num_chips < ranks:
        predicted_on = predicted_on.with_chips(ranks)
    outcomes = _execute(jobs, predicted_on, ranks, repeat, seed, timeout)
    if not json:
        for outcome in outcomes:
            _print(outcome)
    if trace is not None:
        write_chrome(trace, [t for o in outcomes for t in (_titled(o, "predicted"), _titled(o, "measured"))])
    if svg is not None:
        write_text(svg, to_svg([pair for o in outcomes for pair in _pictures(o)]))
    if json:
        print_json([outcome.to_json() for outcome in outcomes])
    else:
        for path in (trace, svg):
            if path is not None:
                typer.echo(f"written: {path}")
    wrong = [outcome for outcome in outcomes if outcome.error != 0]
    if wrong:
        raise ProgramError(
            f"{wrong[0].job.title}: the result differs from the dense product by {wrong[0].error:g}"
        )


@dataclass(frozen=True)
class _Job:
    title: str
    rehearsal: Rehearsal
    flow: Dataflow


@dataclass(frozen=True)
class _Outcome:
    job: _Job
    error: float
    runs_s: tuple[float, ...]
    measured: Trace
    predicted: Trace
    orderings: int

    def to_json(self) -> dict[str, Any]:
        problem = self.job.rehearsal.problem
        ranks = sorted({span.rank for span in self.measured.spans})
        return {
            "title": self.job.title,
            "mesh_shape": list(problem.mesh_shape),
            "m_n_k": [problem.m, problem.n, problem.k],
            "dataflow": problem.dataflow,
            "max_abs_error": self.error,
            "orderings_checked": self.orderings,
            "measured_s": list(self.runs_s),
            "measured_median_s": statistics.median(self.runs_s),
            "predicted_s": self.predicted.duration_s,
            "overlap_s": [self.measured.overlap_s(rank) for rank in ranks],
            "exposed_s": [self.measured.exposed_s(rank) for rank in ranks],
        }


def _jobs(
    plan: Plan,
    layer: str,
    passes: str,
    algorithms: str,
    ranks: int,
    max_dim: int,
    rings: Literal[0, 1, 2] | int,
) -> list[_Job]:
    check_layer(plan, layer)
    wanted = read_passes(passes)
    planned = [candidate.algorithm for candidate in plan.candidates]
    if algorithms == "best":  # of those that have a mesh of so many ranks
        usable = [c.algorithm for c in plan.candidates if algorithm(c.entry).meshes(ranks)]
        names = usable[:1] or planned[:1]
    else:
        names = planned if algorithms == "all" else algorithms.split(",")
    jobs = []
    skipped: list[str] = []
    for name in names:
        candidate = plan.candidate(name)
        chosen = next(item for item in candidate.layers if item.name == layer)
        shapes = algorithm(candidate.entry).meshes(ranks)
        if not shapes and algorithms == "all":
            skipped.append(name)
            continue
        if not shapes:
            raise LayoutError(f"{name} has no mesh of {ranks} ranks; give another number of --ranks")
        sizes = chosen.tokens, chosen.in_features, chosen.out_features
        small = reduced(sizes, candidate.mesh_shape, shapes, max_dim)
        for _, item in products(candidate, layer, wanted):
            problem = pass_problem(
                chosen.stationary,
                item.name,
                small.tokens,
                small.in_features,
                small.out_features,
                small.mesh_shape,
                "float32",
                transposed=chosen.transposed,
            )
            # A small rehearsal may have fewer elements than the plan has slices.
            config = replace(item.config, slices=item.config.slices[: problem.sliced_size])
            program = algorithm(candidate.entry).program(problem, config)
            if rings:
                program = lower_rings(program, 1 if rings == 1 else 2)
            validate(program, labels=False)
            rehearsal = Rehearsal(to_text(program), problem, 0, 0, 0.0)
            jobs.append(_Job(product_title(layer, item.name, name, config), rehearsal, analyse(program)))
    if not jobs:
        raise LayoutError(f"no algorithm of the plan has a mesh of {ranks} ranks")
    for name in skipped:
        typer.echo(f"skipped: {name} has no mesh of {ranks} ranks", err=True)
    return jobs


def _execute(
    jobs: list[_Job], cluster: Any, ranks: int, repeat: int, seed: int, timeout: float
) -> list[_Outcome]:
    """Runs all jobs in one set of processes."""
    try:
        from meshweave.execute.ranks.launch import launch
    except ImportError:
        raise UnsupportedError("running needs torch: pip install 'meshweave[torch]'") from None
    rehearsals = [replace(job.rehearsal, repeat=repeat, seed=seed, deadline_s=timeout) for job in jobs]
    payload = {"rehearsals": [rehearsal.to_json() for rehearsal in rehearsals]}
    ranked = launch("meshweave.nn.rehearse:rehearse_all", ranks, payload, timeout_s=timeout)
    return [
        _outcome(job, [results[number] for results in ranked], cluster, repeat)
        for number, job in enumerate(jobs)
    ]


def _outcome(job: _Job, results: list[dict[str, Any]], cluster: Any, repeat: int) -> _Outcome:
    runs = [
        merge([Trace.from_json(result["traces"][number]) for result in results]) for number in range(repeat)
    ]
    orderings = sum(check_order(trace, job.flow) for trace in runs)
    runs.sort(key=lambda trace: trace.duration_s)
    return _Outcome(
        job,
        max(result["error"] for result in results),
        tuple(trace.duration_s for trace in runs),
        runs[(len(runs) - 1) // 2],
        simulate(job.flow.program, Machine.of(cluster, job.flow.program)).trace(),
        orderings,
    )


def _titled(outcome: _Outcome, source: str) -> Trace:
    of = outcome.predicted if source == "predicted" else outcome.measured
    return Trace(of.program, f"{outcome.job.title}, {source}", of.spans)


def _pictures(outcome: _Outcome) -> list[tuple[str, Trace]]:
    return [
        (f"{outcome.job.title}, predicted", outcome.predicted),
        (f"{outcome.job.title}, measured", outcome.measured),
    ]


def _print(outcome: _Outcome) -> None:
    problem = outcome.job.rehearsal.problem
    measured, predicted = outcome.measured, outcome.predicted
    typer.echo(
        f"\n{outcome.job.title}: {problem.dataflow} {problem.m} x {problem.n} x {problem.k} float32 on a "
        f"{'x'.join(map(str, problem.mesh_shape))} mesh"
    )
    exact = "exactly the dense product" if outcome.error == 0 else f"WRONG by {outcome.error:g}"
    typer.echo(f"  result    {exact}")
    typer.echo(
        f"  order     {outcome.orderings} orderings of the measured runs checked, all as the program demands"
    )
    low, high = min(outcome.runs_s), max(outcome.runs_s)
    typer.echo(
        f"  measured  {format_s(statistics.median(outcome.runs_s))} (of {len(outcome.runs_s)}: "
        f"{format_s(low)} to {format_s(high)}); rank 0 overlaps communication with products for "
        f"{format_s(measured.overlap_s(0))}, exposes {format_s(measured.exposed_s(0))}"
    )
    typer.echo(f"  predicted {format_s(predicted.duration_s)} with uncalibrated constants")
    for title, trace in (("measured", measured), ("predicted", predicted)):
        typer.echo(f"  rank 0, {title} (█ product, ▒ copy or add, ━ communication)")
        for line in timeline_text(trace, 0).splitlines():
            typer.echo(f"    {line}")
