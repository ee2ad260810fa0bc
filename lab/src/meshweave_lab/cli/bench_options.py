"""The options of `meshweave bench`, and what their texts mean."""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshweave.algorithms.matmul2d import DATAFLOWS, Dataflow
from meshweave.algorithms.matmul2d.common.passes import PASSES, PassName
from meshweave.algorithms.table import PRODUCTS_2D
from meshweave.base.errors import DescriptionError, LayoutError, printable, require_known
from meshweave.cli.options import JSON_HELP, OutputOption, read_algorithms, read_mesh, read_slices
from meshweave.describe.machine.cluster import Cluster, load_cluster

if TYPE_CHECKING:
    from meshweave_lab.lab import Lab

# --- of all benchmarks ------------------------------------------------------------------------------------

LabFile = Annotated[Path, typer.Option(help="LAB.toml: the interconnect to build, see `meshweave lab`.")]
Algorithms = Annotated[str, typer.Option(help="Names separated by commas, or 'all'.")]
Repeat = Annotated[int, typer.Option(help="Measured runs of each rival, after one to warm up.")]
Timeout = Annotated[float, typer.Option(help="Seconds after which everything is stopped.")]
MeshShape = Annotated[str, typer.Option(help="Mesh shape, ROWSxCOLS. Default: the shape of a torus lab.")]
Json = Annotated[bool, typer.Option("--json", help=JSON_HELP)]
Out = Annotated[
    Path | None, OutputOption(help="Write all times, yardsticks, machine and versions here as JSON.")
]
Slices = Annotated[str, typer.Option(help="Run MeshSlice at these slice counts too, such as 4,8.")]
DataflowName = Annotated[
    str,
    typer.Option(
        help="The matrix of the forward product that stays put: os (output), ls (left) or rs (right)."
    ),
]

# --- of `matmul` ------------------------------------------------------------------------------------------

Passes = Annotated[
    str,
    typer.Option(
        "--pass",
        help="Products of the layer Y = X W: forward, backward_data (dY W^T), backward_weight (X^T dY), "
        "some of them separated by commas, or all.",
    ),
]
CalibratedFile = Annotated[
    Path | None,
    typer.Option(
        help="Choose configurations by estimates on this cluster description, measured in this lab by "
        "`meshweave calibrate`, and show the estimates. Default: the ideal lab, without latencies."
    ),
]

# --- of `shapes` ------------------------------------------------------------------------------------------

LabFiles = Annotated[str, typer.Option(help="LAB.toml files of toruses, separated by commas; two at least.")]
ProductM = Annotated[int, typer.Option("--m", help="Rows of C.")]
ProductN = Annotated[int, typer.Option("--n", help="Columns of C.")]
ProductK = Annotated[int, typer.Option("--k", help="Summed dim.")]

# --- of `fidelity` ----------------------------------------------------------------------------------------


class FusedCollective(StrEnum):
    """What is fused with a product."""

    REDUCE_SCATTER = "reduce-scatter"
    ALL_GATHER = "all-gather"


Seed = Annotated[int, typer.Option(help="Seed of the cases and operands.")]
ResultsFile = Annotated[Path | None, OutputOption(help="Write the results of all cases as JSON here.")]


# --- what the texts mean ----------------------------------------------------------------------------------


def split_names(text: str) -> list[str]:
    """Return the parts of a comma-separated list."""
    return [part.strip() for part in text.split(",") if part.strip()]


def load_lab_and_mesh(path: Path, mesh: str) -> tuple[Lab, tuple[int, ...]]:
    """Return the lab in a file and its mesh shape: that of `mesh` (ROWSxCOLS), or if that is "" of a 2D torus.

    Raises LayoutError where `mesh` is "" and the lab is no 2D torus.
    """
    from meshweave_lab.lab import Lab

    lab = Lab.load(path)
    shape: tuple[int, ...] | None = (
        read_mesh(mesh) if mesh else getattr(lab.description.network, "shape", None)
    )
    if shape is None or len(shape) != 2:
        raise LayoutError(f"{path}: is no 2D torus; say --mesh ROWSxCOLS")
    return lab, shape


def load_labs_and_clusters(labs: str, clusters: str) -> list[tuple[Lab, tuple[int, ...], Cluster | None]]:
    """Return the torus labs in a comma-separated list of files, each with its shape and calibrated cluster.

    Raises LayoutError for fewer than two labs, and where there are clusters, but not one per lab.
    """
    paths, cluster_paths = split_names(labs), split_names(clusters)
    if len(paths) < 2:
        raise LayoutError("one lab has one shape; name two with --labs A.toml,B.toml")
    if cluster_paths and len(cluster_paths) != len(paths):
        raise LayoutError(f"{len(cluster_paths)} clusters for {len(paths)} labs; give one per lab, or none")
    described = [load_lab_and_mesh(Path(path), "") for path in paths]
    if not cluster_paths:
        return [(lab, shape, None) for lab, shape in described]
    pairs = zip(described, cluster_paths, strict=True)
    return [(lab, shape, load_calibrated(Path(path), lab)) for (lab, shape), path in pairs]


def load_lab_and_full_mesh(path: Path, mesh: str) -> tuple[Lab, tuple[int, ...]]:
    """Return what `load_lab_and_mesh` does. Raises LayoutError unless the mesh has as many ranks as the lab."""
    lab, shape = load_lab_and_mesh(path, mesh)
    if math.prod(shape) != lab.num_ranks:
        raise LayoutError(f"mesh {'x'.join(map(str, shape))} is not one of {path}'s {lab.num_ranks} ranks")
    return lab, shape


def read_algorithms_2d(text: str) -> list[str]:
    """Return the names of 2D algorithms that `read_algorithms` returns; raises what it raises."""
    return [name for name in read_algorithms(text) if name in PRODUCTS_2D]


def read_extra_slices(slices: str, widths: str) -> list[tuple[int, ...]]:
    """Return the relative widths of slices: for each count in "4,8" equal ones, then each list in "1:2:1,1:4:1".

    Raises LayoutError, also where a count stands among the widths or the other way round.
    """
    for text in split_names(slices):
        if ":" in text:
            raise LayoutError(f"'{printable(text)}' is no slice count; --widths takes relative widths")
    for text in split_names(widths):
        if ":" not in text:
            raise LayoutError(
                f"widths '{printable(text)}' are not written such as 1:2:4:8; --slices takes counts"
            )
    return [read_slices(text) for text in (*split_names(slices), *split_names(widths))]


def read_dataflow(text: str) -> Dataflow:
    """Return the dataflow of this name. Raises LayoutError."""
    for known in DATAFLOWS:
        if text == known:
            return known
    raise LayoutError(f"dataflow '{printable(text)}' is none of {', '.join(DATAFLOWS)}")


def read_passes(text: str) -> tuple[PassName, ...]:
    """Return the passes in a comma-separated list, or in "all", in their usual order. Raises LayoutError."""
    names = list(PASSES) if text == "all" else split_names(text)
    if not names:
        raise LayoutError(f"no pass named; give all or some of {', '.join(PASSES)}")
    for name in names:
        require_known(name, PASSES, "there is no pass", LayoutError, "give all or")
    return tuple(name for name in PASSES if name in names)


def read_ratios(text: str) -> list[float]:
    """Return the ratios in a comma-separated list, each once. Raises LayoutError."""
    ratios = []
    for part in split_names(text):
        try:
            ratios.append(float(part))
        except ValueError:
            raise LayoutError(
                f"ratio '{printable(part)}' is no number; give one, or several such as 0.5,1,2"
            ) from None
        check_ratio(ratios[-1])
    if not ratios:
        raise LayoutError("no ratio given; give one, such as 1, or several such as 0.5,1,2")
    return list(dict.fromkeys(ratios))


def check_ratio(ratio: float) -> None:
    """Raise LayoutError unless a ratio is 0 or 0.001 to 1000."""
    if not (ratio == 0 or 1e-3 <= ratio <= 1e3):
        raise LayoutError(f"a ratio of {ratio:g} makes no sense here; give 0.001 to 1000, or 0 for unpaced")


def check_run(repeat: int, timeout: float) -> None:
    """Raise LayoutError unless `repeat` is 1 to 100, and `timeout` positive and under 100,000 seconds."""
    if not (1 <= repeat <= 100 and 0 < timeout < 1e5):
        raise LayoutError("repeat must be 1 to 100, timeout positive seconds")


def load_calibrated(path: Path, lab: Lab) -> Cluster:
    """Return the cluster in a file. Raises DescriptionError unless it has as many chips as the lab has ranks."""
    cluster = load_cluster(str(path))
    if cluster.num_chips != lab.num_ranks:
        raise DescriptionError(
            f"{printable(path)}: has {cluster.num_chips} chips, the lab {lab.num_ranks} ranks; "
            f"give a description of {lab.description.name}"
        )
    return cluster
