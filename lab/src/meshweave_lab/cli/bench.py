"""`meshweave bench`: every algorithm and DTensor on real, rate-limited sockets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

import meshweave_lab.cli.bench_options as options
from meshweave.cli.option_fields import option, with_options
from meshweave.cli.options import output
from meshweave.describe.machine.cluster import Cluster
from meshweave_lab.cli.bench_fused import fused
from meshweave_lab.cli.bench_tables import heading, report_results
from meshweave_lab.cli.fidelity import fidelity
from meshweave_lab.provenance import describe_environment

if TYPE_CHECKING:
    from meshweave_lab.bench.results import MeasuredRound

bench = typer.Typer(
    help="Measure algorithms and DTensor on the same operands in a lab of network namespaces.",
    no_args_is_help=True,
)


@dataclass(frozen=True)
class LayerBenchOptions:
    """The layer that is measured, the algorithms, and what is written."""

    dataflow: options.DataflowName = "os"
    m: int = option(384, "Rows of Y and X.")
    n: int = option(384, "Columns of Y and W.")
    k: int = option(24576, "Columns of X, rows of W.")
    passes: options.Passes = "forward"
    mesh: options.MeshShape = ""
    ratio: str = option(
        "1",
        "Pace each product so that compute takes this many times as long as communication; several ratios "
        "are separated by commas. 0: unpaced.",
    )
    unpaced: bool = option(
        False, "Measure all algorithms unpaced too, which shows how fast this machine's cores are."
    )
    cluster: options.CalibratedFile = None
    algorithms: options.Algorithms = "all"
    slices: options.Slices = ""
    widths: str = option(
        "", "Run MeshSlice with slices of these relative widths too, such as 1:2:4:8,1:2:2:1."
    )
    repeat: options.Repeat = 5
    timeout: options.Timeout = 600.0
    out: options.Out = None
    svg: Path | None = output("Write a picture with bars of time over bound here.")
    json: options.Json = False


@bench.command()
@with_options
def matmul(lab: options.LabFile, given: LayerBenchOptions) -> None:
    """Build a lab, run every algorithm and PyTorch's DTensor in it by turns, and take it down.

    Products are paced, so the times show how well communication is hidden, not how fast this machine multiplies.
    Every result is checked against the dense product. A time runs from a common start to the last rank's end.
    Beside it stand the bound max(compute, bytes per axis / rate), the algorithm's own theory without latency and,
    with --cluster, its estimate.

    Example: meshweave bench matmul --lab examples/labs/torus-4x4-50mbit.toml --ratio 0.5,1,2 --svg plot.svg
    """
    from meshweave_lab.bench.rounds import LayerCase, bench_layer

    described, shape = options.load_lab_and_mesh(lab, given.mesh)
    options.check_run(given.repeat, given.timeout)
    names = options.read_algorithms_2d(given.algorithms)
    calibrated = None if given.cluster is None else options.load_calibrated(given.cluster, described)
    measured = bench_layer(
        described,
        LayerCase(
            (given.m, given.n, given.k),
            shape,
            options.read_dataflow(given.dataflow),
            options.read_passes(given.passes),
            options.read_ratios(given.ratio),
            names,
            options.read_extra_slices(given.slices, given.widths),
        ),
        also_unpaced=given.unpaced,
        calibrated=calibrated,
        repeat=given.repeat,
        timeout_s=given.timeout,
    )
    if given.algorithms != "all":
        _print_left_out(names, measured, shape)
    record = {
        **_record("bench matmul", calibrated, given.repeat),
        "lab": described.description.to_json(),
        "layer": {
            "m": given.m,
            "n": given.n,
            "k": given.k,
            "dataflow": given.dataflow,
            "mesh_shape": list(shape),
        },
        "rounds": [round_.to_json() for round_ in measured],
    }
    sizes = f"{given.m} x {given.n} x {given.k}"
    title = f"layer Y = X W of {sizes}, {given.dataflow}, on {described.description.name}"
    report_results(
        record, measured, [heading(round_) for round_ in measured], title, given.out, given.svg, given.json
    )


def _print_left_out(names: Sequence[str], measured: Sequence[MeasuredRound], shape: tuple[int, ...]) -> None:
    used = {rival.algorithm for round_ in measured for rival in round_.round.rivals}
    if left_out := [name for name in names if name not in used]:
        mesh_text = "x".join(map(str, shape))
        typer.echo(f"left out: {', '.join(left_out)} cannot run this on a {mesh_text} mesh", err=True)


@dataclass(frozen=True)
class ShapesBenchOptions:
    """The product that is measured on each lab, the algorithms, and what is written."""

    dataflow: options.DataflowName = "os"
    m: options.ProductM = 768
    n: options.ProductN = 192
    k: options.ProductK = 24576
    ratio: float = option(
        0.5,
        "Pace products in all labs so that on the first compute takes this many times as long as "
        "communication.",
    )
    clusters: str = option(
        "", "Cluster descriptions with measured constants, one per lab, separated by commas."
    )
    algorithms: options.Algorithms = "meshslice,meshslice_tapered,collective"
    slices: options.Slices = ""
    repeat: options.Repeat = 5
    timeout: float = option(300.0, "Seconds after which each lab is stopped.")
    out: options.Out = None
    svg: Path | None = output("Write a picture with bars of seconds here.")
    json: options.Json = False


@bench.command()
@with_options
def shapes(labs: options.LabFiles, given: ShapesBenchOptions) -> None:
    """Run the same product on meshes of other shapes, one lab after another, at one pace.

    The result shows what the choice of the mesh shape is worth. Each algorithm runs at its best by estimate on
    each lab; the table says how many times faster its fastest configuration is there than on the first lab.
    Without --clusters, estimates know no launch costs and choose very fine slices: give --slices too.

    Example: meshweave bench shapes --labs examples/labs/torus-4x4-50mbit.toml,examples/labs/torus-8x2-50mbit.toml
    """
    from meshweave_lab.bench.shapes import compare_shapes

    options.check_run(given.repeat, given.timeout)
    options.check_ratio(given.ratio)
    described = options.load_labs_and_clusters(labs, given.clusters)
    comparison = compare_shapes(
        described,
        (given.m, given.n, given.k),
        options.read_dataflow(given.dataflow),
        given.ratio,
        options.read_algorithms_2d(given.algorithms),
        options.read_extra_slices(given.slices, ""),
        repeat=given.repeat,
        timeout_s=given.timeout,
    )
    record = {
        **_record("bench shapes", None, given.repeat),
        "clusters": [None if cluster is None else cluster.name for _, _, cluster in described],
        "labs": [lab.description.to_json() for lab, _, _ in described],
        "product": {"m": given.m, "n": given.n, "k": given.k, "dataflow": given.dataflow},
        **comparison.to_json(),
    }
    title = f"{given.dataflow} {given.m} x {given.n} x {given.k} in {len(described)} mesh shapes, at one pace"
    rounds = zip(comparison.labs, comparison.measured, strict=True)
    headings = [f"{name}: {heading(round_)}" for name, round_ in rounds]
    report_results(
        record, comparison.measured, headings, title, given.out, given.svg, given.json, comparison=comparison
    )


def _record(kind: str, calibrated: Cluster | None, repeat: int) -> dict[str, Any]:
    cluster = None if calibrated is None else {"name": calibrated.name, "source": calibrated.source}
    return {"kind": kind, "machine": describe_environment(), "cluster": cluster, "repeat": repeat}


bench.command()(fidelity)
bench.command()(fused)
