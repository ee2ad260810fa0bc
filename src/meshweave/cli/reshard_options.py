"""The options of `meshweave reshard`: their types and help texts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from meshweave.algorithms.reshard import STRATEGIES
from meshweave.algorithms.reshard.order import ORDERS
from meshweave.cli.options import JSON_HELP, OutputOption

SourceMesh = Annotated[
    str,
    typer.Option(
        "--from",
        help="The mesh that has it, and a spec of how it lies there: '2x4 S0RR' shards dim 0 of three along "
        "mesh axis 0, R replicates. Of a model the mesh alone, FSDP x TP: 8x8.",
    ),
]

DestinationMesh = Annotated[
    str,
    typer.Option(
        "--to",
        help="The mesh that gets it, and a spec: '2x4 RS01R'. Of a model the mesh alone, replicas x TP: 4x2.",
    ),
]

ClusterName = Annotated[
    str,
    typer.Option(
        help="A catalog cluster, a TOML file or words; ':N' sets the number of chips (p3.8xlarge:16). Default of "
        "N: as many as the meshes need."
    ),
]


@dataclass(frozen=True)
class ReshardOptions:
    """What is moved, where its meshes lie, which plans are compared, and what is written."""

    model: Annotated[
        str | None,
        typer.Argument(
            help="A Llama-like model whose state dict is moved: a catalog name (llama-2-7b), a TOML file, or a "
            "Hugging Face config.json or its folder. Left out: one tensor, given by --shape."
        ),
    ] = None
    shape: Annotated[
        str | None, typer.Option(help="Sizes of the tensor, separated by commas: 1024,1024,512.")
    ] = None
    dtype: Annotated[str, typer.Option(help="Element type.")] = "bfloat16"
    at: Annotated[int, typer.Option(help="First rank of the mesh that has it; rank r is chip r.")] = 0
    to_at: Annotated[
        int | None,
        typer.Option(
            help="First rank of the mesh that gets it; meshes may overlap. Default: behind the other one."
        ),
    ] = None
    row_per_host: Annotated[
        bool,
        typer.Option("--row-per-host", help="Start each row of a mesh (its last axis) in a host of its own."),
    ] = False
    strategies: Annotated[
        str,
        typer.Option(
            "--strategy", help=f"How copies spread: {', '.join(STRATEGIES)}, with commas between, or 'all'."
        ),
    ] = "all"
    orders: Annotated[
        str,
        typer.Option(
            "--order",
            help=f"Who sends and in which order: {', '.join(ORDERS)}, with commas between. exact needs "
            "meshweave[exact] and up to 10 s.",
        ),
    ] = "best,naive"
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Run every plan in the simulator, message by message.")
    ] = False
    ranks: Annotated[
        str,
        typer.Option(
            help="Ranks in picture and trace, with commas between. Default: of each host the one that moves most "
            "bytes between hosts, of up to 8 hosts."
        ),
    ] = ""
    svg: Annotated[
        Path | None, OutputOption(help="Write the simulated timeline of the chosen plan as a picture.")
    ] = None
    trace: Annotated[
        Path | None, OutputOption(help="Write a Chrome / Perfetto trace of the same simulation.")
    ] = None
    out: Annotated[
        Path | None,
        OutputOption(help="Write the chosen plan as a program, for `meshweave show` and `simulate`."),
    ] = None
    json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False
