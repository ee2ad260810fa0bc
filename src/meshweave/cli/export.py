"""`meshweave export`: a plan in the words of other software."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from meshweave.cli.options import JSON_HELP, print_json, read_plan
from meshweave.tune import exports
from meshweave.tune.exports import LAUNCHERS, TARGETS, launch_file
from meshweave.tune.plan_description import planned_cluster


def export(
    plan: Annotated[Path, typer.Argument(help="A plan of a step, as `meshweave plan --save` writes it.")],
    to: Annotated[str, typer.Option(help=f"{', '.join(TARGETS)}.")],
    row: Annotated[int, typer.Option(help="The configuration, by its place in the ranking.", min=1)] = 1,
    launch: Annotated[
        str | None, typer.Option(help=f"A file that starts it on the hosts instead: {', '.join(LAUNCHERS)}.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """Print a planned configuration as settings of other software, and what they cannot say.

    On stdout are arguments, overrides or a file, as the other software takes them. On stderr are first a warning
    where the plan was priced for another software stack than the target's, with what is predicted for that one;
    then the environment variables that the settings need, and what they leave out. A strategy that the other
    software does not have is an error, which names the first row of the ranking that can be exported.

    Example: meshweave export plan.json --to megatron-lm
    """
    planned = read_plan(plan)
    made = exports.export(planned, to, row)
    text = made.text
    if launch is not None:
        text = launch_file(made, launch, planned_cluster(planned))
    if json:
        print_json(asdict(made) | ({} if launch is None else {"launch": text}))
        return
    if made.priced:
        typer.echo(f"warning: {made.priced}", err=True)
    typer.echo(text)
    if launch is None:
        for name, value in made.environment.items():
            typer.echo(f"environment: {name}={value}", err=True)
    for sentence in made.left_out:
        typer.echo(f"left out: {sentence}", err=True)
