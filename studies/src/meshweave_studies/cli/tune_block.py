"""`meshweave tune block`: the strategy that fits a machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshweave.algorithms.block.problem import Overlap
from meshweave.base.errors import LayoutError
from meshweave.base.outputs import write_file
from meshweave.base.units import format_bytes, format_s
from meshweave.cli.option_fields import option, with_options
from meshweave.cli.options import (
    OldSequenceOption,
    output,
    print_json,
    progress_bar,
    read_dtype,
    read_mesh,
    read_names,
    read_sequence,
    say_written,
)
from meshweave.cli.tune import JsonOption
from meshweave.describe.machine.cluster import load_cluster
from meshweave.report.tables import print_table

if TYPE_CHECKING:
    from meshweave_studies.blocks.ranking import BlockRanking, MeshShape

BatchOption = Annotated[int, typer.Option(min=1, help="Sequences of all chips together.")]
SequenceOption = Annotated[int, typer.Option(min=1, help="Tokens per sequence.")]
DtypeOption = Annotated[str, typer.Option(help="Element type of activations and weights.")]


@dataclass(frozen=True)
class BlockOptions:
    """The block that is ranked, the strategies, and how many are simulated and shown."""

    batch: BatchOption = 4
    sequence: SequenceOption = 2048
    seq: OldSequenceOption = None
    layers: int = option(1, "Layers that are one program.", min=1, max=64)
    dtype: DtypeOption = "bfloat16"
    algorithms: str = option("all", "Strategies to choose among, with commas, or 'all'.", "--algorithm")
    meshes: str = option(
        "all", "Meshes ROWSxCOLS or DEPTHxROWSxCOLS to choose among, with commas, or 'all'.", "--mesh"
    )
    simulated: int = option(
        4, "How many of the best to simulate; none where one is too large.", "--simulate", min=0, max=64
    )
    overlap: Overlap = option(
        "layers",
        "What communication may run beside: layers, all that a program of the layers has beside it; "
        "sites, its own product alone, as in a model of mw.parallelize.",
    )
    count: int = option(10, "How many to list, the fastest first.", min=1, max=1000)
    svg: Path | None = output("Draw the listed strategies into this SVG file.")
    json: JsonOption = False


@with_options
def block(
    model: Annotated[
        str,
        typer.Argument(
            help="A catalog model (gpt3), a TOML file, or a Hugging Face config.json or its folder."
        ),
    ],
    cluster: Annotated[
        str, typer.Option(help="A catalog cluster or a TOML file; ':N' sets the number of chips.")
    ],
    options: BlockOptions,
) -> None:
    """Rank the strategies for a model's layers on a machine: every strategy, mesh and number of slices.

    A strategy shards the layers of a transformer, forward and backward: ATP, Megatron's tensor parallelism, 2D
    products and others. All are estimated; then the best are simulated with contention, which decides their order.
    Strategies that exceed the memory of a chip are listed, marked "over memory".

    Example: meshweave tune block gpt3 --cluster atp-ic1
    """
    from meshweave.describe.model import load_model
    from meshweave.describe.model.workload import Workload
    from meshweave_studies.blocks.ranking import rank_blocks

    with progress_bar("ranking strategies") as progress:
        ranking = rank_blocks(
            load_model(model),
            Workload(options.batch, read_sequence(options.sequence, options.seq), read_dtype(options.dtype)),
            load_cluster(cluster),
            layers=options.layers,
            algorithms=read_names(options.algorithms),
            mesh_shapes=_meshes(options.meshes),
            max_simulated=options.simulated,
            overlap=options.overlap,
            progress=progress,
        )
    if options.svg is not None:
        write_file(options.svg, _picture(ranking, options.count))
    if options.json:
        print_json(_ranking_json(ranking, options.count))
        return
    _print_ranking(ranking, options.count)
    say_written(options.svg)


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
    from meshweave_studies.blocks.ranking import mesh_of
    from meshweave_studies.blocks.reasons import block_reason

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
        "note": ranking.note,
        "entries": rows,
    }


def _print_ranking(ranking: BlockRanking, count: int) -> None:
    from meshweave_studies.blocks.reasons import block_reason, next_strategy

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
    if ranking.note:
        typer.echo(f"{ranking.note}.")
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
    from meshweave_studies.blocks.reasons import name_of
    from meshweave_studies.stacks import Stack, stacked_chart

    stacks = [
        Stack(name_of(ranked), ((ranked.seconds - ranked.exposed_s) * 1e3, ranked.exposed_s * 1e3))
        for ranked in ranking.ranked[:count]
    ]
    title = f"{ranking.model.name} on {ranking.cluster.num_chips} chips of {ranking.cluster.name}"
    return stacked_chart(title, stacks, ("compute", "exposed"), "ms")
