"""`meshweave reshard`: a tensor, or a model's state dict, from one mesh to another."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from meshweave.algorithms.reshard import STRATEGIES
from meshweave.algorithms.reshard.order import ORDERS
from meshweave.algorithms.reshard.strategies import known
from meshweave.base.errors import LayoutError, UnsupportedError
from meshweave.cli.options import JSON_HELP, check_writable, print_json, progress_bar, read_ranks
from meshweave.cli.reshard_problem import Asked, Laid, model_problem, read_side, tensor_problem
from meshweave.cli.reshard_runs import Run, best_of, planned, simulated
from meshweave.cli.reshard_tables import print_found, to_json
from meshweave.describe.files import printable
from meshweave.ir.program.text import to_text
from meshweave.report.timeline import write_chrome, write_text


def reshard(
    from_: Annotated[
        str,
        typer.Option(
            "--from",
            help="The mesh that has it, and a spec of how it lies there: '2x4 S0RR' shards dim 0 of three along "
            "mesh axis 0, R replicates. Of a model the mesh alone, FSDP x TP: 8x8.",
        ),
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            help="The mesh that gets it, and a spec: '2x4 RS01R'. Of a model the mesh alone, replicas x TP: 4x2.",
        ),
    ],
    cluster: Annotated[
        str,
        typer.Option(
            help="A catalog cluster or a TOML file; ':N' sets the number of chips (p3.8xlarge:16). Default of N: "
            "as many as the meshes need."
        ),
    ],
    model: Annotated[
        str | None,
        typer.Argument(
            help="A Llama-like model whose state dict is moved: a catalog name (llama-2-7b), a TOML file, or a "
            "Hugging Face config.json or its folder. Left out: one tensor, given by --shape."
        ),
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="Sizes of the tensor, separated by commas: 1024,1024,512.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Element type.")] = "bfloat16",
    at: Annotated[int, typer.Option(help="First rank of the mesh that has it; rank r is chip r.")] = 0,
    to_at: Annotated[
        int | None,
        typer.Option(
            help="First rank of the mesh that gets it; meshes may overlap. Default: behind the other one."
        ),
    ] = None,
    row_per_host: Annotated[
        bool,
        typer.Option("--row-per-host", help="Start each row of a mesh (its last axis) in a host of its own."),
    ] = False,
    strategies: Annotated[
        str,
        typer.Option(
            "--strategy", help=f"How copies spread: {', '.join(STRATEGIES)}, with commas between, or 'all'."
        ),
    ] = "all",
    orders: Annotated[
        str,
        typer.Option(
            "--order",
            help=f"Who sends and in which order: {', '.join(ORDERS)}, with commas between. exact needs "
            "meshweave[exact] and up to 10 s.",
        ),
    ] = "best,naive",
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Run every plan in the simulator, message by message.")
    ] = False,
    ranks: Annotated[
        str,
        typer.Option(
            help="Ranks in picture and trace, with commas between. Default: of each host the one that moves most "
            "bytes between hosts, of up to 8 hosts."
        ),
    ] = "",
    svg: Annotated[
        Path | None, typer.Option(help="Write the simulated timeline of the chosen plan as a picture.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write a Chrome / Perfetto trace of the same simulation.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the chosen plan as a program, for `meshweave show` and `simulate`."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """Plan how a tensor, or a model's state dict, gets from one mesh to another, and say how long that takes.

    Every strategy is planned with every order, beside the bound that NICs set, and the fastest plan is chosen:
    by simulation where all are simulated, else by prediction. Its schedule says who sends how much to which hosts,
    and when.

    Example: meshweave reshard --from '2x4 S0RR' --to '2x4 RS01R' --shape 1024,1024,512 --cluster p3.8xlarge

    Example: meshweave reshard llama-2-7b --from 8x8 --to 4x2 --cluster dgx-h100
    """
    for path in (svg, trace, out):
        check_writable(path)
    hows, whens = (
        _listed(strategies, tuple(STRATEGIES), "strategy", True),
        _listed(orders, tuple(ORDERS), "order"),
    )
    asked_ranks = read_ranks(ranks)
    asked = _asked(model, from_, to, cluster, shape, dtype, Laid(at, to_at, row_per_host))
    for rank in asked_ranks:
        if rank not in asked.problem.ranks:
            raise LayoutError(f"rank {rank} is in neither mesh")
    began = time.perf_counter()
    runs = []
    with progress_bar("planning") as progress:
        for number, (how, when) in enumerate((how, when) for how in hows for when in whens):
            runs.append(planned(asked, how, when))
            progress(number + 1, len(hows) * len(whens))
    took_s = time.perf_counter() - began
    if simulate:
        with progress_bar("simulating") as progress:
            for number, run in enumerate(runs):
                runs[number] = simulated(run, asked)
                progress(number + 1, len(runs))
    chosen = best_of(runs)
    wants_picture = svg is not None or trace is not None
    if wants_picture and chosen.simulation is None:
        chosen = simulated(chosen, asked)
        if chosen.simulation is None:
            raise UnsupportedError(
                f"no picture: the chosen plan has {chosen.note}; give a smaller problem, or --out alone"
            )
    _write(chosen, asked, asked_ranks, svg, trace, out)
    if json:
        print_json(to_json(asked, runs, chosen))
        return
    print_found(asked, runs, chosen, took_s)
    for path in (svg, trace, out):
        if path is not None:
            typer.echo(f"written: {path}")


def _listed(text: str, table: tuple[str, ...], what: str, has_all: bool = False) -> tuple[str, ...]:
    if has_all and text.strip() == "all":
        return table
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise UnsupportedError(f"no {what} named; known: {', '.join(table)}")
    return tuple(known(printable(name), table, what) for name in names)


def _asked(
    model: str | None, from_: str, to: str, cluster: str, shape: str | None, dtype: str, laid: Laid
) -> Asked:
    sides = read_side("--from", from_), read_side("--to", to)
    if model is not None:
        if shape is not None:
            raise LayoutError("--shape is for one tensor; the tensors of a model have shapes of their own")
        return model_problem(model, dtype, *sides, cluster, laid)
    if shape is None:
        raise LayoutError("neither a model nor a tensor; name a model, or give --shape 1024,1024,512")
    return tensor_problem(shape, dtype, *sides, cluster, laid)


def _write(
    chosen: Run, asked: Asked, ranks: tuple[int, ...], svg: Path | None, trace: Path | None, out: Path | None
) -> None:
    shown = ranks or chosen.busiest_ranks()
    if chosen.simulation is not None:
        if svg is not None:
            from meshweave.report.simulation_picture import draw_strips, strip_of

            strips = [
                strip_of(chosen.simulation, r, f"rank {r}", f"host {chosen.plan.fabric.host_of[r]}")
                for r in shown
            ]
            write_text(svg, draw_strips(chosen.title, strips, subtitle=asked.what))
        if trace is not None:
            write_chrome(trace, [chosen.simulation.trace(shown)])
    if out is not None:
        write_text(out, to_text(chosen.program))
