"""`meshweave tune block` and `meshweave tune mesh`: the strategy and the mesh that fit a machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshweave.algorithms.block.problem import Overlap
from meshweave.base.errors import LayoutError
from meshweave.base.outputs import write_file
from meshweave.base.units import format_bytes, format_s
from meshweave.cli.options import (
    JSON_HELP,
    OutputOption,
    print_json,
    print_table,
    progress_bar,
    read_dtype,
    read_mesh,
    read_names,
)
from meshweave.describe.machine.cluster import Cluster, load_cluster

if TYPE_CHECKING:
    from meshweave.cost.device_meshes import MeshTime
    from meshweave.describe.machine.hierarchy import CommunicationMatrix, MatrixLayer
    from meshweave.tune.blocks import BlockRanking, MeshShape

ModelArgument = Annotated[
    str,
    typer.Argument(help="A catalog model (gpt3), a TOML file, or a Hugging Face config.json or its folder."),
]
BatchOption = Annotated[int, typer.Option(min=1, help="Sequences of all chips together.")]
SequenceOption = Annotated[int, typer.Option("--seq", min=1, help="Tokens per sequence.")]
DtypeOption = Annotated[str, typer.Option(help="Element type of activations and weights.")]
JsonOption = Annotated[bool, typer.Option("--json", help=JSON_HELP)]


def block(
    model: ModelArgument,
    cluster: Annotated[
        str, typer.Option(help="A catalog cluster or a TOML file; ':N' sets the number of chips.")
    ],
    batch: BatchOption = 4,
    seq: SequenceOption = 2048,
    layers: Annotated[int, typer.Option(min=1, max=64, help="Layers that are one program.")] = 1,
    dtype: DtypeOption = "bfloat16",
    algorithms: Annotated[
        str, typer.Option("--algorithm", help="Strategies to choose among, with commas, or 'all'.")
    ] = "all",
    meshes: Annotated[
        str,
        typer.Option(
            "--mesh", help="Meshes ROWSxCOLS or DEPTHxROWSxCOLS to choose among, with commas, or 'all'."
        ),
    ] = "all",
    simulated: Annotated[
        int, typer.Option("--simulate", min=0, max=64, help="How many of the best to simulate.")
    ] = 4,
    overlap: Annotated[
        Overlap,
        typer.Option(
            help="What communication may run beside: layers, all that a program of the layers has beside it; "
            "sites, its own product alone, as in a model of mw.parallelize."
        ),
    ] = "layers",
    count: Annotated[int, typer.Option(min=1, max=1000, help="How many to list, the fastest first.")] = 10,
    svg: Annotated[Path | None, OutputOption(help="Draw the listed strategies into this SVG file.")] = None,
    json: JsonOption = False,
) -> None:
    """Rank the strategies for a model's layers on a machine: every strategy, mesh and number of chunks.

    A strategy shards the layers of a transformer, forward and backward: ATP, Megatron's tensor parallelism, 2D
    products and others. All are estimated; then the best are simulated with contention, which decides their order.
    Strategies that exceed the memory of a chip are listed, marked "over memory".

    Example: meshweave tune block gpt3 --cluster atp-ic1
    """
    from meshweave.describe.model import load_model
    from meshweave.describe.model.workload import Workload
    from meshweave.tune.blocks import rank_blocks

    with progress_bar("ranking strategies") as progress:
        ranking = rank_blocks(
            load_model(model),
            Workload(batch, seq, read_dtype(dtype)),
            load_cluster(cluster),
            layers=layers,
            algorithms=read_names(algorithms),
            mesh_shapes=_meshes(meshes),
            max_simulated=simulated,
            overlap=overlap,
            progress=progress,
        )
    if svg is not None:
        write_file(svg, _picture(ranking, count))
    if json:
        print_json(_ranking_json(ranking, count))
        return
    _print_ranking(ranking, count)
    if svg is not None:
        typer.echo(f"written: {svg}")


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
    seq: SequenceOption = 2048,
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
    from meshweave.cost.device_meshes import comes_in_shapes, rank_meshes
    from meshweave.describe.machine.matrix_file import load_cluster_or_matrix
    from meshweave.describe.model import load_model
    from meshweave.describe.model.workload import Workload

    described, matrix = load_cluster_or_matrix(source)
    times = rank_meshes(
        described,
        load_model(model),
        Workload(batch, seq, read_dtype(dtype)),
        corrected=corrected,
        sharing="printed" if printed else "devices",
        measured=matrix.measured,
    )
    if json:
        print_json({"layers": _layers_json(matrix), "meshes": [_time_json(time) for time in times]})
        return
    _print_meshes(matrix, times, isinstance(described, Cluster) and comes_in_shapes(described))


def _meshes(text: str) -> tuple[MeshShape, ...] | None:
    names = read_names(text)
    if names is None:
        return None
    shapes = []
    for name in names:
        shape = read_mesh(name)
        if len(shape) not in (2, 3):
            raise LayoutError(
                f"a block runs on a mesh of two or three axes, such as 2x4 or 2x2x2, not {name}"
            )
        shapes.append(shape)
    return tuple(shapes)


# --- strategies -------------------------------------------------------------------------------------------------


def _ranking_json(ranking: BlockRanking, count: int) -> dict[str, Any]:
    from meshweave.tune.block_reasons import block_reason
    from meshweave.tune.blocks import mesh_of

    rows = []
    for position, ranked in enumerate(ranking.ranked[:count]):
        rows.append(
            {
                "algorithm": ranked.algorithm.name,
                "mesh": list(mesh_of(ranked)),
                "config": str(ranked.config),
                "seconds": ranked.seconds,
                "exposed_s": ranked.exposed_s,
                "estimate_s": ranked.estimate.total_s,
                "simulated_s": ranked.simulated[0] if ranked.simulated else None,
                "traffic_bytes": ranked.traffic_bytes,
                "peak_bytes": ranked.peak_bytes,
                "block_fits": ranked.peak_bytes <= ranking.cluster.chip.memory_bytes,
                "margin": ranking.margin(position),
                "reason": block_reason(ranking, position),
            }
        )
    return {
        "model": ranking.model.name,
        "cluster": ranking.cluster.name,
        "num_chips": ranking.cluster.num_chips,
        "layers": ranking.layers,
        "num_priced": ranking.num_priced,
        "entries": rows,
    }


def _print_ranking(ranking: BlockRanking, count: int) -> None:
    from meshweave.tune.block_reasons import block_reason, next_strategy

    data = _ranking_json(ranking, count)
    model, load = ranking.model, ranking.workload
    layers = "a layer" if ranking.layers == 1 else f"{ranking.layers} layers"
    typer.echo(
        f"{layers} of {model.name}, {load.batch} x {load.sequence} tokens, {load.dtype}, on "
        f"{ranking.cluster.num_chips} chips of {ranking.cluster.name}; {ranking.num_priced} configs priced"
    )
    head = ("strategy", "mesh", "config", "simulated", "estimate", "exposed", "peak", "next is slower by")
    rows = []
    for entry in data["entries"]:
        simulated = "-" if entry["simulated_s"] is None else format_s(entry["simulated_s"])
        margin = "-" if entry["margin"] is None else f"{100 * entry['margin']:+.1f} %"
        peak = format_bytes(entry["peak_bytes"]) + ("" if entry["block_fits"] else " over memory")
        mesh_text = "x".join(map(str, entry["mesh"]))
        times = (simulated, format_s(entry["estimate_s"]), format_s(entry["exposed_s"]))
        rows.append((entry["algorithm"], mesh_text, entry["config"], *times, peak, margin))
    print_table(head, rows, num_left=3)
    if data["entries"][0]["reason"]:
        typer.echo(f"Why the first is ahead of the second: {data['entries'][0]['reason']}.")
    other = next_strategy(ranking)
    if other is not None and other > 1:
        typer.echo(f"Ahead of the next strategy: {block_reason(ranking, 0, other)}.")
    typer.echo(
        "Exposed: time in which the first chip computes nothing. Peak: most bytes at once on the first chip for "
        "these layers alone: weights, gradients and activations, no optimizer states, no other layers."
    )


def _picture(ranking: BlockRanking, count: int) -> str:
    from meshweave.report.stacks import Stack, stacked_chart
    from meshweave.tune.block_reasons import name_of

    stacks = [
        Stack(name_of(ranked), ((ranked.seconds - ranked.exposed_s) * 1e3, ranked.exposed_s * 1e3))
        for ranked in ranking.ranked[:count]
    ]
    title = f"{ranking.model.name} on {ranking.cluster.num_chips} chips of {ranking.cluster.name}"
    return stacked_chart(title, stacks, ("compute", "exposed"), "ms")


# --- meshes -----------------------------------------------------------------------------------------------------


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
    from meshweave.describe.machine.hierarchy import GivenPairs, UniformPairs

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
