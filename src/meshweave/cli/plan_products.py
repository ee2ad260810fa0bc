"""`meshweave plan --products`: choose mesh shape, dataflow and slice counts, and say why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from meshweave.base.outputs import write_file
from meshweave.base.units import format_bytes, format_s
from meshweave.cli.options import print_json, progress_bar, read_algorithms
from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.machine.left_out import costs_left_out
from meshweave.describe.model import Transformer
from meshweave.describe.model.memory import chip_memory
from meshweave.describe.model.workload import Workload
from meshweave.report.tables import text_console, text_table
from meshweave.tune import plan_model
from meshweave.tune.plan import Plan

if TYPE_CHECKING:
    from rich.console import Console


def plan_products(
    model: Transformer,
    cluster: Cluster,
    workload: Workload,
    algorithms: str,
    written: tuple[Path | None, Path | None, bool],
) -> None:
    """Plan the products of a model's layers on all chips, print the plan and write it.

    Args:
        algorithms: names separated by commas, or "all".
        written: the file to write the plan to and the file to write its HTML page to, None for none, and whether
            to print JSON instead of text.

    Raises UnsupportedError where an algorithm is unknown or none can run on the cluster, DescriptionError where
    a file cannot be written.
    """
    out, report, json = written
    names = read_algorithms(algorithms)
    memory = chip_memory(model, workload, cluster.num_chips)
    with progress_bar("tuning") as progress:
        chosen = plan_model(model, cluster, workload, names, progress)
    if report is not None:
        from meshweave.report.plan_page import plan_page
        from meshweave.tune.explain import explain

        with progress_bar("report") as progress:
            explanation = explain(chosen, cluster, progress)
        write_file(report, plan_page(explanation, memory))
    if out is not None:
        chosen.save(out)
    if json:
        print_json(chosen.model_dump(mode="json"))
        return
    _print(chosen, memory.summary(cluster.chip.memory_bytes), costs_left_out(cluster))
    if out is not None:
        typer.echo(
            f"written to {out}; check it with: meshweave verify {out}; execute a layer with: meshweave run {out}"
        )
    if report is not None:
        typer.echo(f"written to {report}; open it in a browser")


def _print(plan: Plan, memory: str, left_out: str) -> None:
    console = text_console()
    console.print(
        f"{plan.model} on {plan.num_chips} chips of {plan.cluster}: batch {plan.batch} x {plan.sequence} "
        f"tokens, {plan.dtype}"
    )
    for text in plan.not_priced:
        console.print(f"note: {text}", markup=False)
    if plan.unmeasured:
        console.print(plan.unmeasured)
    axes = [a for a in ("row", "col", "depth") if any(f"tp.{a}" in c.traffic_bytes for c in plan.candidates)]
    columns = ["algorithm", "mesh", "time", "of peak", "exposed", "launch", "transfer", "sync"]
    head = (*columns, *(f"by {axis}" for axis in axes), "memory")
    rows = []
    for candidate in plan.candidates:
        passes = [item for layer in candidate.layers for item in layer.passes]
        exposed = sum(item.exposed_s for item in passes)
        row = (
            candidate.algorithm,
            "x".join(map(str, candidate.mesh_shape)),
            format_s(candidate.block_s),
            f"{100 * candidate.utilisation:.1f} %",
            f"{100 * exposed / candidate.block_s:.1f} %",
            format_s(sum(item.launch_s for item in passes)),
            format_s(sum(item.transfer_s for item in passes)),
            format_s(sum(item.sync_s for item in passes)),
            *(format_bytes(candidate.traffic_bytes.get(f"tp.{axis}", 0)) for axis in axes),
            format_bytes(max(item.peak_bytes for item in passes)),
        )
        rows.append(row)
    # Under some 110 columns numbers break; names and numbers must not.
    console.print(text_table(head, rows, ("algorithm",), title="one block, all products", whole=head))
    console.print(
        "launch, transfer and sync: of all communication, hidden or not; 'by' an axis: bytes that a chip moves "
        "along it; memory: peak of a product."
    )
    if left_out:
        console.print(left_out)
    second_best = [f"{c.algorithm}: {c.runner_up}" for c in plan.candidates if c.runner_up]
    if second_best:
        console.print(f"next best meshes: {'; '.join(second_best)}")
    _print_layers(console, plan)
    best, second = plan.candidates[0], plan.candidates[1] if len(plan.candidates) > 1 else None
    if second is not None:
        gain = 100 * (second.block_s / best.block_s - 1)
        console.print(f"{best.algorithm} is estimated {gain:.1f} % faster than {second.algorithm}.")
    console.print(plan.note)
    console.print(memory)


def _print_layers(console: Console, plan: Plan) -> None:
    best = plan.best
    left = ("layer", "pass", "dataflow")
    head = (*left, "M x N x K", "slices", "time", "exposed", "peak memory")
    rows = [
        (
            layer.name if number == 0 else "",
            item.name.replace("_", " "),
            item.dataflow,
            f"{item.m} x {item.n} x {item.k}",
            str(item.config).removeprefix("S="),
            format_s(item.total_s),
            format_s(item.exposed_s),
            format_bytes(item.peak_bytes),
        )
        for layer in best.layers
        for number, item in enumerate(layer.passes)
    ]
    console.print(text_table(head, rows, left, title=f"layers with {best.algorithm}"))
    for layer in best.layers:
        console.print(
            f"{layer.name}: {layer.stationary.upper()} stays put, {layer.reason}{_stored(layer.transposed)}."
        )


def _stored(transposed: bool) -> str:
    return "; its matrices are stored transposed, so that no activation is turned" if transposed else ""
