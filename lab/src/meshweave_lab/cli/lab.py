"""`meshweave lab`: a cluster in a box, network namespaces as hosts and rate-limited links between them."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from meshweave.base.errors import DescriptionError
from meshweave.cli.options import JSON_HELP, print_json
from meshweave_lab import Abilities, Lab, RunningLab, RunResult, abilities
from meshweave_lab.description import SwitchLab, TorusLab, TreeLab
from meshweave_lab.network.check import STILL_WORKS
from meshweave_lab.network.namespaces import remove_leftovers
from meshweave_lab.network.probe import ProbeFlow, goodput
from meshweave_lab.processes import print_line

lab = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Run on real, rate-limited links between network namespaces of this machine (needs root).",
)


@lab.command(context_settings={"ignore_unknown_options": True})
def run(
    file: Annotated[Path, typer.Argument(metavar="LAB.toml", help="Description of the lab.")],
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="Command to run, once per rank.")
    ],
    timeout: Annotated[float, typer.Option(help="Seconds after which everything is stopped.")] = 600.0,
    grace: Annotated[
        float, typer.Option(help="Seconds after which the other ranks are ended once one has failed.")
    ] = 5.0,
    json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> int:
    """Build the lab, run a command in each rank as torchrun would, and take the lab down.

    Each line that a rank prints is shown behind [rank]; with --json, on stderr. The lab is taken down whatever
    happens, and a run removes what an earlier, killed run has left. The exit status is that of the worst rank, 124
    where the time was up, 2 where this machine can have no lab.

    Example: meshweave lab run lab.toml --timeout 60 -- python script.py --steps 3
    """
    if not (0 < timeout < 1e6 and 0 <= grace < 1e6):
        raise DescriptionError(
            "timeout and grace are seconds: give a positive timeout, a grace of at least 0"
        )
    described = Lab.load(file)
    began = time.monotonic()
    with described.up() as running:
        if running.removed:
            print_line(-1, f"removed {len(running.removed)} namespaces that a killed run had left", True)
        ready_s = time.monotonic() - began
        result = running.run(
            command, timeout_s=timeout, grace_s=grace, on_line=_to_stderr if json else print_line
        )
        run_s = time.monotonic() - began - ready_s
    if json:
        print_json(_run_to_json(running, result, ready_s, run_s))
    else:
        _print_run(running, result)
    return result.exit_status


def _to_stderr(rank: int, line: str, is_error: bool) -> None:
    print_line(rank, line, True)


def _run_to_json(running: RunningLab, result: RunResult, ready_s: float, run_s: float) -> dict[str, Any]:
    return {
        "lab": running.description.name,
        "exit_status": result.exit_status,
        **asdict(result),
        "set_up_s": ready_s,
        "run_s": run_s,
        "removed": list(running.removed),
        "pace": {str(rank): asdict(report) for rank, report in running.pace.items()},
    }


def _print_run(running: RunningLab, result: RunResult) -> None:
    if running.pace:
        reports = list(running.pace.values())
        count = sum(r.num_products for r in reports)
        slept = sum(r.num_products - r.num_overruns for r in reports)
        mean_s = sum(r.error_mean_s * (r.num_products - r.num_overruns) for r in reports) / max(slept, 1)
        worst_s = max((r.error_worst_s for r in reports), key=abs)
        overruns, late_s = sum(r.num_overruns for r in reports), sum(r.overrun_s for r in reports)
        late = f", {late_s:.3g} s in all" if overruns else ""
        if late_s > 0.01 * sum(r.paced_s for r in reports):
            late += ": this machine is too slow for the pace"
        line = (
            f"{count} products paced at {reports[0].flops_per_s:g} FLOP/s; error mean {mean_s * 1e6:.1f} us, "
            f"worst {worst_s * 1e3:.2f} ms; {overruns} overruns{late}"
        )
        print_line(-1, line, True)
    if result.message:
        print_line(-1, result.message, True)


@lab.command()
def check(
    file: Annotated[
        Path | None, typer.Argument(metavar="LAB.toml", help="Description of a lab to check.")
    ] = None,
    measure: Annotated[
        bool, typer.Option(help="Build the lab and measure the rate of a link to the next host.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> int:
    """Show whether a lab can be built on this machine, and check a description.

    The exit status is 0 where a lab can be built, else 2.

    Example: meshweave lab check lab.toml --measure
    """
    described = Lab.load(file) if file is not None else None
    if measure and described is None:
        raise DescriptionError("--measure needs a LAB.toml")
    machine = abilities()
    data: dict[str, Any] = {"can_build": machine.can_build, **asdict(machine), "still_works": STILL_WORKS}
    if described is not None:
        data["lab"] = {"name": described.description.name, "num_ranks": described.num_ranks}
        if measure:
            data["lab"] |= _measure(described)
    if json:
        print_json(data)
    else:
        _print_check(machine, data)
    return 0 if machine.can_build else 2


def _measure(described: Lab) -> dict[str, float]:
    """Return nominal and measured bytes per second from rank 0 to the first rank of the next host."""
    network, to = described.description.network, 1
    match network:
        case SwitchLab():
            to, nominal = network.ranks_per_host, network.nic.bytes_per_s
        case TorusLab():
            axis = max(axis for axis, size in enumerate(network.shape) if size > 1)
            nominal = network.links[axis].bytes_per_s
        case TreeLab(hosts_per_group=1):
            nominal = min(network.nic.bytes_per_s, network.root.bytes_per_s)
        case TreeLab():  # a direct link takes what is between its ends
            nominal = (network.direct or network.nic).bytes_per_s
    with described.up() as running:
        rate = goodput(running, [ProbeFlow(0, to, max(nominal, 1 << 20))], timeout_s=120.0)[0].bytes_per_s
    return {"nominal_bytes_per_s": nominal, "goodput_bytes_per_s": rate}


def _print_check(machine: Abilities, data: dict[str, Any]) -> None:
    if machine.can_build:
        typer.echo(f"a lab can be built here; {machine.num_cores} cores")
    else:
        typer.echo(f"no lab on this machine: {machine.problem}; {STILL_WORKS}")
    pacing = "works" if machine.can_pace else "needs torch with torch.library.get_kernel"
    typer.echo(f"pacing of compute {pacing}")
    typer.echo(f"{machine.num_labs} labs are there, {len(machine.leftovers)} namespaces left by killed runs")
    described = data.get("lab")
    if described:
        typer.echo(f"{described['name']}: {described['num_ranks']} ranks")
        if "goodput_bytes_per_s" in described:
            nominal, rate = described["nominal_bytes_per_s"], described["goodput_bytes_per_s"]
            percent = 100 * rate / nominal
            typer.echo(
                f"one link: {rate * 8e-6:.2f} of nominally {nominal * 8e-6:.2f} Mbit/s ({percent:.1f} %)"
            )


@lab.command()
def clean(json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False) -> None:
    """Remove the namespaces that killed runs have left, and nothing else. `lab run` does so too.

    Example: meshweave lab clean
    """
    removed = remove_leftovers()
    if json:
        print_json({"removed": removed})
    else:
        typer.echo(f"removed {len(removed)} namespaces that killed runs had left")
