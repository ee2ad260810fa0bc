"""`meshweave export`: a plan in the words of other software."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from meshweave.cli.options import JSON_HELP, print_json, read_plan
from meshweave.tune.exports import TARGETS, export_plan


def export(
    plan: Annotated[Path, typer.Argument(help="A plan of a step, as `meshweave plan --save` writes it.")],
    to: Annotated[str, typer.Option(help=f"{', '.join(TARGETS)}.")],
    row: Annotated[int, typer.Option(help="The configuration, by its place in the ranking.", min=1)] = 1,
    json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """Print a planned configuration as settings of other software, and what they cannot say.

    What is printed are arguments of Megatron-LM or torchtitan, or a tp_plan of transformers. What they leave out
    goes to stderr. A strategy that the other software does not have is an error, which names a row that it has.

    Example: meshweave export plan.json --to megatron-lm
    """
    export = export_plan(read_plan(plan), to, row)
    if json:
        print_json(asdict(export))
        return
    typer.echo(export.text)
    for sentence in export.left_out:
        typer.echo(f"left out: {sentence}", err=True)
