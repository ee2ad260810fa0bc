"""`meshweave bench`: every algorithm and DTensor on real, rate-limited sockets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

import meshweave.cli.bench_options as options
from meshweave.base.errors import LayoutError
from meshweave.cli.bench_tables import heading, report_results
from meshweave.cli.fidelity import fidelity
from meshweave.cli.options import check_writable
from meshweave.describe.machine.cluster import Cluster
from meshweave.report.provenance import describe

bench = typer.Typer(
    help="Measure rivals on the same operands in a lab of network namespaces.", no_args_is_help=True
)


@bench.command()
def matmul(
    lab: options.LabFile,
    dataflow: options.DataflowName = "os",
    m: options.LayerM = 384,
    n: options.LayerN = 384,
    k: options.LayerK = 24576,
    passes: options.Passes = "forward",
    mesh: options.MeshShape = "",
    ratio: options.Ratios = "1",
    unpaced: options.Unpaced = False,
    cluster: options.CalibratedFile = None,
    algorithms: options.Algorithms = "all",
    slices: options.Slices = "",
    widths: options.Widths = "",
    repeat: options.Repeat = 5,
    timeout: options.Timeout = 600.0,
    out: options.Out = None,
    svg: options.OverBoundPicture = None,
    json: options.Json = False,
) -> None:
    """Run every algorithm and PyTorch's DTensor, interleaved, in a lab that is built for it and taken down.

    Products are paced, so this measures how well communication is hidden, not this machine's arithmetic. Every
    result is checked against the dense product. Each time, from a common start to the last rank's end, stands
    beside max(compute, bytes per axis / rate), the algorithm's own theory without latency and, with --cluster,
    its estimate.

    Example: meshweave bench matmul --lab examples/labs/torus-4x4-50mbit.toml --ratio 0.5,1,2 --svg plot.svg
    """
    from meshweave.lab.bench.rounds import bench_layer

    described, shape = options.load_lab_and_mesh(lab, mesh)
    options.check_repeat_and_timeout(repeat, timeout)
    ratios, names = options.read_ratios(ratio), options.read_algorithms_2d(algorithms)
    extra_slices = options.read_extra_slices(slices, widths)
    calibrated = None if cluster is None else options.load_calibrated(cluster, described)
    for path in (out, svg):
        check_writable(path)
    measured = bench_layer(
        described,
        (m, n, k),
        shape,
        options.read_dataflow(dataflow),
        options.read_passes(passes),
        ratios,
        names,
        extra_slices,
        also_unpaced=unpaced,
        calibrated=calibrated,
        repeat=repeat,
        timeout_s=timeout,
    )
    used = {rival.algorithm for one in measured for rival in one.round.rivals}
    if left_out := [name for name in names if name not in used] if algorithms != "all" else []:
        mesh_text = "x".join(map(str, shape))
        typer.echo(f"left out: {', '.join(left_out)} cannot run this on a {mesh_text} mesh", err=True)
    record = {
        **_record("bench matmul", calibrated, repeat),
        "lab": described.description.to_json(),
        "layer": {"m": m, "n": n, "k": k, "dataflow": dataflow, "mesh_shape": list(shape)},
        "rounds": [one.to_json() for one in measured],
    }
    title = f"layer Y = X W of {m} x {n} x {k}, {dataflow}, on {described.description.name}"
    report_results(record, measured, [heading(one) for one in measured], title, out, svg, json)


@bench.command()
def shapes(
    labs: options.LabFiles,
    dataflow: options.DataflowName = "os",
    m: options.ProductM = 768,
    n: options.ProductN = 192,
    k: options.ProductK = 24576,
    ratio: options.FirstRatio = 0.5,
    clusters: options.CalibratedFiles = "",
    algorithms: options.Algorithms = "meshslice,meshslice_tapered,collective",
    slices: options.Slices = "",
    repeat: options.Repeat = 5,
    timeout: options.TimeoutOfEach = 300.0,
    out: options.Out = None,
    svg: options.SecondsPicture = None,
    json: options.Json = False,
) -> None:
    """Run the same product on meshes of other shapes, one lab after another, at one pace.

    What the choice of the mesh shape is worth: each algorithm at its best by estimate on each lab, and how many
    times faster its fastest configuration is than on the first. Without --clusters estimates know no launch
    costs and choose very fine slices: give --slices too.

    Example: meshweave bench shapes --labs examples/labs/torus-4x4-50mbit.toml,examples/labs/torus-8x2-50mbit.toml
    """
    from meshweave.lab.bench.shapes import compare_shapes

    paths, cluster_paths = options.split_names(labs), options.split_names(clusters)
    if len(paths) < 2:
        raise LayoutError("one lab has one shape; name two with --labs A.toml,B.toml")
    if cluster_paths and len(cluster_paths) != len(paths):
        raise LayoutError(f"{len(cluster_paths)} clusters for {len(paths)} labs; give one per lab, or none")
    options.check_repeat_and_timeout(repeat, timeout)
    options.check_ratio(ratio)
    for path in (out, svg):
        check_writable(path)
    described = [options.load_lab_and_mesh(Path(path), "") for path in paths]
    calibrated: list[Cluster | None] = [None] * len(described)
    if cluster_paths:
        pairs = zip(cluster_paths, described, strict=True)
        calibrated = [options.load_calibrated(Path(path), lab) for path, (lab, _) in pairs]
    comparison = compare_shapes(
        [(lab, shape, cluster) for (lab, shape), cluster in zip(described, calibrated, strict=True)],
        (m, n, k),
        options.read_dataflow(dataflow),
        ratio,
        options.read_algorithms_2d(algorithms),
        options.read_extra_slices(slices, ""),
        repeat=repeat,
        timeout_s=timeout,
    )
    record = {
        **_record("bench shapes", None, repeat),
        "clusters": [None if cluster is None else cluster.name for cluster in calibrated],
        "labs": [lab.description.to_json() for lab, _ in described],
        "product": {"m": m, "n": n, "k": k, "dataflow": dataflow},
        **comparison.to_json(),
    }
    title = f"{dataflow} {m} x {n} x {k} in {len(described)} mesh shapes, at one pace"
    rounds = zip(comparison.labs, comparison.measured, strict=True)
    headings = [f"{name}: {heading(one)}" for name, one in rounds]
    report_results(record, comparison.measured, headings, title, out, svg, json, comparison=comparison)


def _record(kind: str, calibrated: Cluster | None, repeat: int) -> dict[str, Any]:
    cluster = None if calibrated is None else {"name": calibrated.name, "source": calibrated.source}
    return {"kind": kind, "machine": describe(), "cluster": cluster, "repeat": repeat}


bench.command()(fidelity)
