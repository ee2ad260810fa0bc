"""`meshweave bench matmul`: every algorithm and DTensor on real, rate-limited sockets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshweave.algorithms.matmul import ALGORITHMS, MatmulProblem
from meshweave.cli.options import JSON_HELP, print_json, read_algorithms, read_mesh, read_slices
from meshweave.errors import LayoutError
from meshweave.units import format_s

bench = typer.Typer(
    help="Measure rivals on the same operands in a lab of network namespaces.", no_args_is_help=True
)


@bench.callback()
def _group() -> None:
    """Keeps `matmul` a sub-command although it is the only one."""


@bench.command()
def matmul(
    lab: Annotated[Path, typer.Option(help="LAB.toml: the interconnect to build, see `meshweave lab`.")],
    dataflow: Annotated[str, typer.Option(help="os, ls or rs: which matrix stays put.")] = "os",
    m: Annotated[int, typer.Option("--m", help="Rows of C.")] = 384,
    n: Annotated[int, typer.Option("--n", help="Columns of C.")] = 384,
    k: Annotated[int, typer.Option("--k", help="Summed dim.")] = 24576,
    mesh: Annotated[str, typer.Option(help="Mesh shape, ROWSxCOLS; by default that of a torus lab.")] = "",
    ratio: Annotated[
        float, typer.Option(help="Compute time over communication time; sets the pace. 0: unpaced.")
    ] = 1.0,
    algorithms: Annotated[str, typer.Option(help="Names separated by commas, or 'all'.")] = "all",
    slices: Annotated[str, typer.Option(help="MeshSlice slice counts to run besides, such as 4,8.")] = "",
    repeat: Annotated[int, typer.Option(help="Measured runs of each rival, after one to warm up.")] = 5,
    timeout: Annotated[float, typer.Option(help="Seconds after which everything is stopped.")] = 600.0,
    json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """Run every algorithm and PyTorch's DTensor, interleaved, in a lab that is built for it and taken down.

    Configurations are chosen by estimates on the described lab, which has no launch costs as long as
    nobody has measured them: give --slices to see coarser ones. Products are paced, so this measures how
    well communication is hidden, not this machine's arithmetic. Each time stands beside
    max(compute, bytes per axis / rate) and beside the algorithm's own theory without latency.

    Example: meshweave bench matmul --lab examples/labs/torus-4x4-50mbit.toml --ratio 1
    """
    from meshweave.lab.bench import balanced_flops_per_s, cases
    from meshweave.lab.bench import bench as measure
    from meshweave.lab.lab import Lab

    loaded = Lab.load(lab)
    shape = read_mesh(mesh) if mesh else getattr(loaded.description.network, "shape", None)
    if shape is None or len(shape) != 2:
        raise LayoutError(f"{lab}: is no 2D torus; say --mesh ROWSxCOLS")
    if not (1 <= repeat <= 100 and ratio >= 0 and 0 < timeout < 1e5):
        raise LayoutError("repeat must be 1 to 100, ratio not negative, timeout positive seconds")
    problem = MatmulProblem(m, n, k, shape, dataflow)  # type: ignore[arg-type]
    names = [name for name in read_algorithms(algorithms) if name in ALGORITHMS]
    flops_per_s = balanced_flops_per_s(problem, loaded.cluster(), ratio) if ratio else 0.0
    rivals = cases(
        problem, loaded.cluster(), names, [len(read_slices(count)) for count in slices.split(",") if count]
    )
    with loaded.up() as running:
        results, pace = measure(
            running, problem, rivals, flops_per_s=flops_per_s, repeat=repeat, timeout_s=timeout
        )
    if json:
        print_json({"results": [result.to_json() for result in results], "pace": pace})
        return
    typer.echo(
        f"{dataflow} {m} x {n} x {k} float32 on {'x'.join(map(str, shape))} of {loaded.description.name}, "
        f"bound {format_s(results[0].bound_s)}"
    )
    for result in sorted(results, key=lambda found: found.median_s):
        theory = "" if result.over_theory is None else f"{result.over_theory:6.2f} x its theory"
        wrong = "" if result.error == 0 else f"  WRONG by {result.error:g}"
        typer.echo(
            f"  {result.name:<30} {format_s(result.median_s):>8}  {result.over_bound:5.2f} x bound  "
            f"{theory}{wrong}"
        )
    if pace[0] is not None:
        overruns = sum(report["num_overruns"] for report in pace)
        typer.echo(
            f"pace: {overruns} of {sum(report['num_products'] for report in pace)} products overran their time"
        )
