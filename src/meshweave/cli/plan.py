"""`meshweave plan`: choose mesh shape, dataflow and slice counts, and say why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshweave.cli.options import JSON_HELP, print_json, progress_bar, read_algorithms
from meshweave.describe.cluster import load_cluster
from meshweave.describe.model import load_model
from meshweave.describe.workload import Workload
from meshweave.tune import Plan, plan_model
from meshweave.units import format_bytes, format_s

if TYPE_CHECKING:
    from rich.console import Console


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="A catalog model (gpt3), a TOML file, or a Hugging Face config.json or its folder."
        ),
    ],
    cluster: Annotated[
        str,
        typer.Option(
            help="A catalog cluster or a TOML file; ':N' sets the number of chips (tpu-v4-pod:256)."
        ),
    ],
    batch: Annotated[
        int | None,
        typer.Option(help="Sequences per step. Default: half the number of chips, as in MeshSlice."),
    ] = None,
    seq: Annotated[int, typer.Option(help="Tokens per sequence.")] = 2048,
    dtype: Annotated[str, typer.Option(help="Element type of activations and weights.")] = "bfloat16",
    algorithms: Annotated[str, typer.Option(help="Names separated by commas, or 'all'.")] = "all",
    out: Annotated[
        Path | None, typer.Option(help="Write the plan here as JSON, for `meshweave run`.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """Choose mesh shape, dataflow and slice counts for a model's fully connected layers.

    Each algorithm is tuned to its own best over all mesh shapes of the cluster. Times are estimates of one
    transformer block, forward and both backward products of every layer.

    Example: meshweave plan gpt3 --cluster tpu-v4-pod:256 --out plan.json
    """
    found = load_cluster(cluster)
    workload = Workload(batch if batch is not None else max(found.num_chips // 2, 1), seq, dtype)
    names = read_algorithms(algorithms)
    with progress_bar("tuning") as progress:
        chosen = plan_model(load_model(model), found, workload, names, progress)
    if out is not None:
        chosen.save(out)
    if json:
        print_json(chosen.model_dump(mode="json"))
        return
    _print(chosen, out)


def _print(plan: Plan, out: Path | None) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if Console().is_terminal else 120)
    console.print(
        f"{plan.model} on {plan.num_chips} chips of {plan.cluster}: batch {plan.batch} x {plan.sequence} "
        f"tokens, {plan.dtype}"
    )
    table = Table(title="one block, all products", title_justify="left")
    for column in (
        "algorithm",
        "mesh",
        "time",
        "utilisation",
        "exposed",
        "to/from rows",
        "to/from columns",
        "next mesh",
    ):
        table.add_column(column, justify="left" if column in ("algorithm", "next mesh") else "right")
    for candidate in plan.candidates:
        exposed = sum(p.exposed_s for layer in candidate.layers for p in layer.passes)
        table.add_row(
            candidate.algorithm,
            "x".join(map(str, candidate.mesh_shape)),
            format_s(candidate.block_s),
            f"{100 * candidate.utilisation:.1f} %",
            f"{100 * exposed / candidate.block_s:.1f} %",
            format_bytes(candidate.traffic_bytes.get("tp.row", 0)),
            format_bytes(candidate.traffic_bytes.get("tp.col", 0)),
            candidate.runner_up,
        )
    console.print(table)
    _print_layers(console, plan)
    best, second = plan.candidates[0], plan.candidates[1] if len(plan.candidates) > 1 else None
    if second is not None:
        gain = 100 * (second.block_s / best.block_s - 1)
        console.print(
            f"{best.algorithm} is estimated {gain:.1f} % faster than {second.algorithm}. {plan.note}"
        )
    if out is not None:
        console.print(f"written to {out}; execute a layer of it with: meshweave run {out}", soft_wrap=True)


def _print_layers(console: Console, plan: Plan) -> None:
    from rich.table import Table

    best = plan.best
    table = Table(title=f"layers with {best.algorithm}", title_justify="left")
    for column in ("layer", "pass", "dataflow", "M x N x K", "slices", "time", "exposed", "peak memory"):
        table.add_column(column, justify="left" if column in ("layer", "pass", "dataflow") else "right")
    for layer in best.layers:
        for number, item in enumerate(layer.passes):
            table.add_row(
                layer.name if number == 0 else "",
                item.name.replace("_", " "),
                item.dataflow,
                f"{item.m} x {item.n} x {item.k}",
                str(item.config).removeprefix("S="),
                format_s(item.total_s),
                format_s(item.exposed_s),
                format_bytes(item.peak_bytes),
            )
    console.print(table)
    for layer in best.layers:
        console.print(f"{layer.name}: {layer.stationary.upper()} stays put, {layer.reason}.")
