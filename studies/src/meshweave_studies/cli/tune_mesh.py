"""`meshweave tune mesh`: the device meshes of a machine, ranked by ATP's equations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from meshweave.base.units import format_bytes, format_s
from meshweave.cli.options import OldSequenceOption, print_json, read_dtype, read_sequence
from meshweave.cli.tune import JsonOption
from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.model import load_model
from meshweave.describe.model.workload import Workload
from meshweave.report.tables import print_table
from meshweave_studies.cli.tune_block import BatchOption, DtypeOption, SequenceOption
from meshweave_studies.matrix.device_meshes import MeshTime, comes_in_shapes, rank_meshes
from meshweave_studies.matrix.hierarchy import CommunicationMatrix, GivenPairs, MatrixLayer, UniformPairs
from meshweave_studies.matrix.matrix_file import load_cluster_or_matrix


def mesh(
    source: Annotated[
        str,
        typer.Argument(
            metavar="CLUSTER_OR_MATRIX",
            help="A catalog cluster, its file, or the file of a communication matrix.",
        ),
    ],
    model: Annotated[str, typer.Option(help="A catalog model, or its file.")] = "gpt3",
    batch: BatchOption = 4,
    sequence: SequenceOption = 2048,
    seq: OldSequenceOption = None,
    dtype: DtypeOption = "bfloat16",
    printed: Annotated[
        bool, typer.Option("--printed", help="Divide B1' by d2 on every layer, as equation 3 is printed.")
    ] = False,
    corrected: Annotated[
        bool, typer.Option("--corrected/--uncorrected", help="Let point-to-point bandwidths limit groups.")
    ] = True,
    json: JsonOption = False,
) -> None:
    """Rank the device meshes of a machine by ATP's equations 2 to 4, from its hierarchical communication matrix.

    The matrix is read off the cluster. A file may give its layers instead, or all-reduce bandwidths that were
    measured. Times are those of all-reduces of one layer, forward and backward, without latency and overlap.

    Example: meshweave tune mesh atp-ic4
    """
    described, matrix = load_cluster_or_matrix(source)
    times = rank_meshes(
        described,
        load_model(model),
        Workload(batch, read_sequence(sequence, seq), read_dtype(dtype)),
        corrected=corrected,
        sharing="printed" if printed else "devices",
        measured=matrix.measured,
    )
    if json:
        print_json({"layers": _layers_json(matrix), "meshes": [_time_json(time) for time in times]})
        return
    _print_meshes(matrix, times, isinstance(described, Cluster) and comes_in_shapes(described))


def _layers_json(matrix: CommunicationMatrix) -> list[dict[str, Any]]:
    return [
        {
            "name": layer.name,
            "size": layer.size,
            **_pairs_json(layer),
            "flow_bytes_per_s": layer.flow_bytes_per_s or None,
        }
        for layer in matrix.layers
    ]


def _pairs_json(layer: MatrixLayer) -> dict[str, Any]:
    """Return rates of pairs and groups: numbers where all have the same. "pairs" says which pairs have links."""
    pairs = layer.pairs
    if isinstance(pairs, GivenPairs):
        data: dict[str, Any] = {"pairs": "given", "p2p_bytes_per_s": [list(row) for row in pairs.matrix]}
    else:
        kind = "all" if isinstance(pairs, UniformPairs) else "neighbours"
        data = {"pairs": kind, "p2p_bytes_per_s": pairs.least}
    groups = sorted(set(layer.group_bytes_per_s))
    return data | {"group_bytes_per_s": groups[0] if len(groups) == 1 else list(layer.group_bytes_per_s)}


def _time_json(time: MeshTime) -> dict[str, Any]:
    bandwidth = time.bandwidth
    rates = {
        name: None if value is None else float(value)
        for name, value in (
            ("first_link_bytes_per_s", bandwidth.first_link),
            ("second_link_bytes_per_s", bandwidth.second_link),
            ("first_bytes_per_s", bandwidth.first),
            ("second_bytes_per_s", bandwidth.second),
        )
    }
    seconds = {
        "first_s": float(time.first_s),
        "second_s": float(time.second_s),
        "total_s": float(time.total_s),
    }
    layers = {"first_layer": bandwidth.first_layer, "second_layer": bandwidth.second_layer}
    return {"mesh": list(time.mesh_shape), "measured": bandwidth.measured, **rates, **layers, **seconds}


def _print_meshes(matrix: CommunicationMatrix, times: Sequence[MeshTime], in_shapes: bool) -> None:
    typer.echo(f"{matrix.name}, {matrix.num_devices} devices, layers from the outermost")
    if in_shapes:
        shape = "x".join(str(layer.size) for layer in matrix.layers)
        typer.echo(f"layers of the {shape} torus; each mesh is ranked on a torus of its own shape")
    rows: list[tuple[str, ...]] = []
    for layer in matrix.layers:
        flow = f"{format_bytes(layer.flow_bytes_per_s)}/s" if layer.flow_bytes_per_s else "-"
        group = f"{format_bytes(min(layer.group_bytes_per_s))}/s"
        rows.append((layer.name, str(layer.size), f"{format_bytes(layer.pairs.least)}/s", group, flow))
    print_table(("layer", "members", "one pair", "one to all", "one ring"), rows, num_left=1)
    rows = []
    for time in times:
        data = _time_json(time)
        rates = [
            "-" if data[key] is None else f"{format_bytes(data[key])}/s"
            for key in (
                "first_link_bytes_per_s",
                "second_link_bytes_per_s",
                "first_bytes_per_s",
                "second_bytes_per_s",
            )
        ]
        limits = [
            data[key] or ("measured" if data["measured"] else "-") for key in ("first_layer", "second_layer")
        ]
        seconds = [format_s(data[key]) for key in ("first_s", "second_s", "total_s")]
        rows.append(("x".join(map(str, data["mesh"])), f"ATP-{data['mesh'][1]}", *limits, *rates, *seconds))
    limited = ("B1' limited by", "B2' limited by")
    print_table(("mesh", "name", *limited, "B1'", "B2'", "B1", "B2", "T1", "T2", "T"), rows, num_left=4)
    typer.echo(
        "B1', B2': bytes per second into a device along the first and second mesh dimension (ATP, equation 3). "
        "B1, B2: bytes of the reduced tensor per second (equation 4). T1, T2: seconds of all-reduces of one "
        "transformer layer, forward and backward (equation 2); T = T1 + T2."
    )
