"""`meshweave bench`: every algorithm and DTensor on real, rate-limited sockets."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshweave.algorithms.matmul2d import ALGORITHMS, DATAFLOWS, Dataflow
from meshweave.algorithms.matmul2d.common.passes import PASSES, PassName
from meshweave.base.errors import DescriptionError, LayoutError, nearest
from meshweave.cli.bench_tables import heading, report_results
from meshweave.cli.fidelity import fidelity
from meshweave.cli.options import (
    JSON_HELP,
    check_writable,
    read_algorithms,
    read_mesh,
    read_slices,
)
from meshweave.describe.files import printable
from meshweave.describe.machine.cluster import Cluster, load_cluster
from meshweave.report.provenance import describe

if TYPE_CHECKING:
    from meshweave.lab.lab import Lab

bench = typer.Typer(
    help="Measure rivals on the same operands in a lab of network namespaces.", no_args_is_help=True
)


OutOption = Annotated[
    Path | None, typer.Option(help="Write all times, yardsticks, machine and versions here as JSON.")
]
SlicesOption = Annotated[str, typer.Option(help="MeshSlice slice counts to run besides, such as 4,8.")]
RepeatOption = Annotated[int, typer.Option(help="Measured runs of each rival, after one to warm up.")]
DataflowOption = Annotated[
    str, typer.Option(help="os, ls or rs: which matrix of the forward product stays put.")
]


@bench.command()
def matmul(
    lab: Annotated[Path, typer.Option(help="LAB.toml: the interconnect to build, see `meshweave lab`.")],
    dataflow: DataflowOption = "os",
    m: Annotated[int, typer.Option("--m", help="Rows of Y and X.")] = 384,
    n: Annotated[int, typer.Option("--n", help="Columns of Y and W.")] = 384,
    k: Annotated[int, typer.Option("--k", help="Columns of X, rows of W.")] = 24576,
    passes: Annotated[
        str,
        typer.Option(
            "--pass",
            help="Products of the layer Y = X W: forward, backward_data (dY W^T), backward_weight (X^T dY), "
            "some of them separated by commas, or all.",
        ),
    ] = "forward",
    mesh: Annotated[str, typer.Option(help="Mesh shape, ROWSxCOLS; by default that of a torus lab.")] = "",
    ratio: Annotated[
        str,
        typer.Option(
            help="Compute time over communication time of each product, several separated by commas; sets the "
            "pace of products. 0: unpaced."
        ),
    ] = "1",
    unpaced: Annotated[
        bool,
        typer.Option(
            "--unpaced", help="Measure all rivals unpaced too, which tells of this machine's cores."
        ),
    ] = False,
    cluster: Annotated[
        Path | None,
        typer.Option(
            help="A cluster description with measured constants of this lab: configurations are chosen by "
            "estimates on it, and these stand beside the results. Default: the ideal lab, no latencies."
        ),
    ] = None,
    algorithms: Annotated[str, typer.Option(help="Names separated by commas, or 'all'.")] = "all",
    slices: SlicesOption = "",
    widths: Annotated[
        str, typer.Option(help="Relative widths of MeshSlice slices to run besides, such as 1:2:4:8,1:2:2:1.")
    ] = "",
    repeat: RepeatOption = 5,
    timeout: Annotated[float, typer.Option(help="Seconds after which everything is stopped.")] = 600.0,
    out: OutOption = None,
    svg: Annotated[Path | None, typer.Option(help="Write a picture here: bars of time over bound.")] = None,
    json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """Run every algorithm and PyTorch's DTensor, interleaved, in a lab that is built for it and taken down.

    Products are paced, so this measures how well communication is hidden, not this machine's arithmetic. Every
    result is checked against the dense product. Each time, from a common start to the last rank's end, stands
    beside max(compute, bytes per axis / rate), the algorithm's own theory without latency and, with --cluster,
    its estimate.

    Example: meshweave bench matmul --lab examples/labs/torus-4x4-50mbit.toml --ratio 0.5,1,2 --svg plot.svg
    """
    from meshweave.lab.bench.rounds import bench as measure
    from meshweave.lab.bench.rounds import layer_rounds
    from meshweave.lab.bench.rounds import unpaced as without_pace

    loaded, shape = _lab(lab, mesh)
    _check_runs(repeat, timeout)
    ratios = _ratios(ratio)
    names = _names(algorithms)
    besides = [_widths(text, False) for text in _listed(slices)] + [
        _widths(text, True) for text in _listed(widths)
    ]
    calibrated = None if cluster is None else _calibrated(cluster, loaded)
    for path in (out, svg):
        check_writable(path)
    lab_cluster = loaded.cluster()
    rounds = layer_rounds(
        (m, n, k),
        shape,
        _dataflow(dataflow),
        _passes(passes),
        ratios,
        lab_cluster,
        calibrated or lab_cluster,
        names,
        besides,
    )
    if unpaced and 0 not in ratios:
        rounds += without_pace(rounds)
    used = {case.algorithm for one in rounds for case in one.rivals}
    if left_out := [name for name in names if name not in used] if algorithms != "all" else []:
        mesh_text = "x".join(map(str, shape))
        typer.echo(f"left out: {', '.join(left_out)} cannot run this on a {mesh_text} mesh", err=True)
    with loaded.up() as running:
        measured = measure(running, rounds, calibrated=calibrated, repeat=repeat, timeout_s=timeout)
    record = {
        **_record("bench matmul", cluster, calibrated, repeat),
        "lab": _lab_record(loaded),
        "layer": {"m": m, "n": n, "k": k, "dataflow": dataflow, "mesh_shape": list(shape)},
        "rounds": [one.to_json() for one in measured],
    }
    title = f"layer Y = X W of {m} x {n} x {k}, {dataflow}, on {loaded.description.name}"
    report_results(record, measured, [heading(one) for one in measured], title, out, svg, json)


@bench.command()
def shapes(
    labs: Annotated[str, typer.Option(help="LAB.toml files of toruses, separated by commas; two at least.")],
    dataflow: DataflowOption = "os",
    m: Annotated[int, typer.Option("--m", help="Rows of C.")] = 768,
    n: Annotated[int, typer.Option("--n", help="Columns of C.")] = 192,
    k: Annotated[int, typer.Option("--k", help="Summed dim.")] = 24576,
    ratio: Annotated[
        float,
        typer.Option(help="Compute time over communication time on the first lab; sets the pace of all."),
    ] = 0.5,
    clusters: Annotated[
        str,
        typer.Option(help="Cluster descriptions with measured constants, one per lab, separated by commas."),
    ] = "",
    algorithms: Annotated[
        str, typer.Option(help="Names separated by commas, or 'all'.")
    ] = "meshslice,meshslice_tapered,collective",
    slices: SlicesOption = "",
    repeat: RepeatOption = 5,
    timeout: Annotated[float, typer.Option(help="Seconds for each lab.")] = 300.0,
    out: OutOption = None,
    svg: Annotated[Path | None, typer.Option(help="Write a picture here: bars of seconds.")] = None,
    json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """Run the same product on meshes of other shapes, one lab after another, at one pace.

    What the choice of the mesh shape is worth: each algorithm at its best by estimate on each lab, and how many
    times faster its fastest configuration is than on the first. Without --clusters estimates know no launch
    costs and choose very fine slices: give --slices too.

    Example: meshweave bench shapes --labs examples/labs/torus-4x4-50mbit.toml,examples/labs/torus-8x2-50mbit.toml
    """
    from meshweave.lab.bench.rounds import compare_shapes

    paths, described = _listed(labs), _listed(clusters)
    if len(paths) < 2:
        raise LayoutError("one lab has one shape; name two with --labs A.toml,B.toml")
    if described and len(described) != len(paths):
        raise LayoutError(f"{len(described)} clusters for {len(paths)} labs; give one per lab, or none")
    _check_runs(repeat, timeout)
    _check_ratio(ratio)
    if not ratio:
        raise LayoutError("without a pace this would compare cores; give a ratio over 0")
    for path in (out, svg):
        check_writable(path)
    found = [_lab(Path(path), "") for path in paths]
    if len({lab.num_ranks for lab, _ in found}) > 1:
        counts = ", ".join(str(lab.num_ranks) for lab, _ in found)
        raise LayoutError(f"the labs have {counts} ranks; shapes compare at the same number")
    constants: list[Cluster | None] = [None] * len(found)
    if described:
        constants = [_calibrated(Path(path), lab) for path, (lab, _) in zip(described, found, strict=True)]
    comparison = compare_shapes(
        [(lab, shape, known) for (lab, shape), known in zip(found, constants, strict=True)],
        (m, n, k),
        _dataflow(dataflow),
        ratio,
        _names(algorithms),
        [_widths(text, False) for text in _listed(slices)],
        repeat=repeat,
        timeout_s=timeout,
    )
    record = {
        **_record("bench shapes", None, None, repeat),
        "clusters": [None if known is None else known.name for known in constants],
        "labs": [_lab_record(lab) for lab, _ in found],
        "product": {"m": m, "n": n, "k": k, "dataflow": dataflow},
        **comparison.to_json(),
    }
    headings = [
        f"{name}: {heading(one)}" for name, one in zip(comparison.labs, comparison.measured, strict=True)
    ]
    title = f"{dataflow} {m} x {n} x {k} in {len(found)} mesh shapes, at one pace"
    report_results(
        record, comparison.measured, headings, title, out, svg, json, seconds=True, comparison=comparison
    )


# --- reading options --------------------------------------------------------------------------------------


def _lab(path: Path, mesh: str) -> tuple[Lab, tuple[int, ...]]:
    """The lab in a file and its mesh shape."""
    from meshweave.lab.lab import Lab

    loaded = Lab.load(path)
    shape: tuple[int, ...] | None = (
        read_mesh(mesh) if mesh else getattr(loaded.description.network, "shape", None)
    )
    if shape is None or len(shape) != 2:
        raise LayoutError(f"{path}: is no 2D torus; say --mesh ROWSxCOLS")
    return loaded, shape


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _names(algorithms: str) -> list[str]:
    return [name for name in read_algorithms(algorithms) if name in ALGORITHMS]


def _widths(text: str, relative: bool) -> tuple[int, ...]:
    """A slice count for --slices, relative widths for --widths."""
    if relative and ":" not in text:
        raise LayoutError(
            f"widths '{printable(text)}' are not written such as 1:2:4:8; --slices takes counts"
        )
    if not relative and ":" in text:
        raise LayoutError(f"'{printable(text)}' is no slice count; --widths takes relative widths")
    return read_slices(text)


def _dataflow(text: str) -> Dataflow:
    for known in DATAFLOWS:
        if text == known:
            return known
    raise LayoutError(f"dataflow '{printable(text)}' is none of {', '.join(DATAFLOWS)}")


def _passes(text: str) -> tuple[PassName, ...]:
    asked = list(PASSES) if text == "all" else _listed(text)
    if not asked:
        raise LayoutError(f"no pass named; give all or some of {', '.join(PASSES)}")
    for name in asked:
        if name not in PASSES:
            raise LayoutError(
                f"there is no pass '{printable(name)}'{nearest(name, PASSES)}; give all or {', '.join(PASSES)}"
            )
    return tuple(name for name in PASSES if name in asked)


def _ratios(text: str) -> list[float]:
    ratios = []
    for part in _listed(text):
        try:
            ratios.append(float(part))
        except ValueError:
            raise LayoutError(
                f"ratio '{printable(part)}' is no number; give one, or several such as 0.5,1,2"
            ) from None
        _check_ratio(ratios[-1])
    if not ratios:
        raise LayoutError("no ratio given; give one, such as 1, or several such as 0.5,1,2")
    return list(dict.fromkeys(ratios))


def _check_ratio(ratio: float) -> None:
    if not (ratio == 0 or 1e-3 <= ratio <= 1e3):
        raise LayoutError(f"a ratio of {ratio:g} makes no sense here; give 0.001 to 1000, or 0 for unpaced")


def _check_runs(repeat: int, timeout: float) -> None:
    if not (1 <= repeat <= 100 and 0 < timeout < 1e5):
        raise LayoutError("repeat must be 1 to 100, timeout positive seconds")


def _calibrated(path: Path, lab: Lab) -> Cluster:
    found = load_cluster(str(path))
    if found.num_chips != lab.num_ranks:
        raise DescriptionError(
            f"{printable(path)}: has {found.num_chips} chips, the lab {lab.num_ranks} ranks; "
            f"give a description of {lab.description.name}"
        )
    return found


# --- results ----------------------------------------------------------------------------------------------


def _record(kind: str, path: Path | None, calibrated: Cluster | None, repeat: int) -> dict[str, Any]:
    cluster = None if calibrated is None else {"name": calibrated.name, "source": calibrated.source}
    return {"kind": kind, "machine": describe(), "cluster": cluster, "repeat": repeat}


def _lab_record(lab: Lab) -> dict[str, Any]:
    described = asdict(lab.description)
    kind = type(lab.description.network).__name__.removesuffix("Lab").lower()
    return {**described, "network": {"kind": kind, **described["network"]}}


bench.command()(fidelity)
