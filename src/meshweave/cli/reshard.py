"""`meshweave reshard`: a tensor, or a model's state dict, from one mesh to another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from meshweave.algorithms.reshard import STRATEGIES
from meshweave.algorithms.reshard.order import ORDERS
from meshweave.base.errors import LayoutError, UnsupportedError, require_known
from meshweave.base.limits import RESHARD_MESSAGES
from meshweave.base.outputs import write_file
from meshweave.cli.option_fields import option, refuse_given, with_options
from meshweave.cli.options import JSON_HELP, output, print_json, progress_bar, read_ranks, say_written
from meshweave.cli.reshard_problem import MeshPositions, ReshardRequest, read_request
from meshweave.cli.reshard_tables import print_comparison, to_json
from meshweave.ir.program.text import to_text
from meshweave.report.timeline import write_chrome
from meshweave.tune.reshard import (
    ReshardCandidate,
    ReshardComparison,
    compare_reshards,
    simulate_candidate,
)

# --- options ----------------------------------------------------------------------------------------------

# The options of `meshweave reshard`: their types and help texts.

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
    shape: str | None = option(None, "Sizes of the tensor, separated by commas: 1024,1024,512.")
    dtype: str = option("bfloat16", "Element type.")
    at: int = option(0, "First rank of the mesh that has it; rank r is chip r.")
    to_at: int | None = option(
        None, "First rank of the mesh that gets it; meshes may overlap. Default: behind the other one."
    )
    row_per_host: bool = option(False, "Start each row of a mesh (its last axis) in a host of its own.")
    strategies: str = option(
        "all", f"How copies spread: {', '.join(STRATEGIES)}, with commas between, or 'all'.", "--strategy"
    )
    orders: str = option(
        "best,naive",
        f"Who sends and in which order: {', '.join(ORDERS)}, with commas between. exact needs "
        "meshweave[exact] and up to 10 s.",
        "--order",
    )
    simulate: bool = option(False, "Run every plan in the simulator, message by message.")
    ranks: str = option(
        "",
        "Ranks in picture and trace, with commas between. Default: of each host the one that moves most "
        "bytes between hosts, of up to 8 hosts.",
    )
    svg: Path | None = output("Write the simulated timeline of the chosen plan as a picture.")
    trace: Path | None = output("Write a Chrome / Perfetto trace of the same simulation.")
    out: Path | None = output("Write the chosen plan as a program, for `meshweave show` and `simulate`.")
    json: bool = option(False, JSON_HELP)


# --- reshard ----------------------------------------------------------------------------------------------


@with_options
def reshard(
    from_: SourceMesh,
    to: DestinationMesh,
    cluster: ClusterName,
    options: ReshardOptions,
) -> None:
    """Plan how a tensor, or a model's state dict, gets from one mesh to another, and say how long that takes.

    Every strategy of --strategy is planned with every order of --order; times are shown beside the bound that
    NICs set. The fastest plan is chosen: by simulation where all are simulated, else by prediction. Its schedule
    says who sends how much to which hosts, and when.

    Example: meshweave reshard --from '2x4 S0RR' --to '2x4 RS01R' --shape 1024,1024,512 --cluster p3.8xlarge

    Example: meshweave reshard llama-2-7b --from 8x8 --to 4x2 --cluster dgx-h100
    """
    names = (
        _listed(options.strategies, STRATEGIES, "strategy", has_all=True),
        _listed(options.orders, ORDERS, "order"),
    )
    shown_ranks = read_ranks(options.ranks)
    request = read_request(
        options.model,
        from_,
        to,
        cluster,
        options.shape,
        options.dtype,
        MeshPositions(options.at, options.to_at, options.row_per_host),
    )
    for rank in shown_ranks:
        if rank not in request.problem.ranks:
            raise LayoutError(f"rank {rank} is in neither mesh")
    if options.svg is None and options.trace is None:
        refuse_given(options, ("ranks",), "the command", "writes neither --svg nor --trace")
    comparison = _compare(request, *names, options)
    _write(comparison.chosen, request, shown_ranks, options)
    if options.json:
        print_json(to_json(request, comparison))
        return
    print_comparison(request, comparison)
    say_written(options.svg, options.trace, options.out)


def _compare(
    request: ReshardRequest,
    strategies: tuple[str, ...],
    orders: tuple[str, ...],
    options: ReshardOptions,
) -> ReshardComparison:
    """Compare plans under a progress bar, and simulate the chosen one where it is to be drawn.

    Raises UnsupportedError where it is too large for what is to be written of it.
    """
    with progress_bar("planning") as on_planned, progress_bar("simulating") as on_simulated:
        comparison = compare_reshards(
            request.problem,
            request.cluster,
            strategies,
            orders,
            simulate_all=options.simulate,
            on_planned=on_planned,
            on_simulated=on_simulated,
        )
    chosen = comparison.chosen
    num_messages = chosen.plan.num_messages
    if options.out is not None and num_messages > RESHARD_MESSAGES.most:
        refusal = RESHARD_MESSAGES.refusal(num_messages)
        raise UnsupportedError(
            f"--out: the chosen plan {refusal}; give a smaller problem, or leave --out out"
        )
    if options.svg is None and options.trace is None:
        return comparison
    chosen = simulate_candidate(chosen, request.cluster)
    if chosen.simulation is None:
        raise UnsupportedError(f"no picture: the chosen plan has {chosen.note}; give a smaller problem")
    return replace(comparison, chosen=chosen)


def _listed(text: str, table: Iterable[str], what: str, has_all: bool = False) -> tuple[str, ...]:
    known = tuple(table)
    if has_all and text.strip() == "all":
        return known
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise UnsupportedError(f"no {what} named; known: {', '.join(known)}")
    for name in names:
        require_known(name, known, f"there is no {what}", UnsupportedError, "known:")
    return names


def _write(
    chosen: ReshardCandidate, request: ReshardRequest, ranks: tuple[int, ...], options: ReshardOptions
) -> None:
    shown = ranks or chosen.busiest_ranks()
    if chosen.simulation is not None:
        if options.svg is not None:
            from meshweave.report.simulation_picture import draw_rank_timelines
            from meshweave.simulate.rank_timeline import rank_timeline

            timelines = [
                rank_timeline(chosen.simulation, r, f"rank {r}", f"host {chosen.plan.network.host_of[r]}")
                for r in shown
            ]
            write_file(options.svg, draw_rank_timelines(chosen.title, timelines, subtitle=request.what))
        if options.trace is not None:
            write_chrome(options.trace, [chosen.simulation.trace(shown)])
    if options.out is not None:
        write_file(options.out, to_text(chosen.program))
