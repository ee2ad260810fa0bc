"""The verbs of the command line, and how mistakes are told."""

from __future__ import annotations

from functools import cache
from typing import Any

import typer

from meshweave.base.errors import MeshweaveError
from meshweave.cli.bench import bench
from meshweave.cli.calibrate import calibrate
from meshweave.cli.catalog import catalog
from meshweave.cli.lab import lab
from meshweave.cli.plan import plan
from meshweave.cli.reproduce import reproduce
from meshweave.cli.reshard import reshard
from meshweave.cli.run import run
from meshweave.cli.show import show
from meshweave.cli.simulate import simulate
from meshweave.cli.verify import verify

app = typer.Typer(
    name="meshweave",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Plan, predict and run the communication of tensor-parallel models: one program, three readings.",
    epilog="Errors are one line on stderr (one a problem of a file) and exit status 2; verify ends with 1 where a result is wrong. "
    "Every verb takes --json.",
)
app.command()(plan)
app.command()(simulate)
app.command()(reshard)
app.command()(run)
app.command()(verify)
app.command()(show)
app.command()(catalog)
app.command()(calibrate)
app.add_typer(lab, name="lab")
app.add_typer(bench, name="bench")
app.add_typer(reproduce, name="reproduce")

_ClickException: Any = typer.BadParameter.__mro__[2]
"""By way of typer: newer versions carry a click of their own, older ones import it."""


@cache
def _command() -> Any:
    return typer.main.get_command(app)


def run_app(args: list[str]) -> int:
    """Runs one command; returns the exit status."""
    try:
        status = _command().main(args=args, prog_name="meshweave", standalone_mode=False)
    except MeshweaveError as error:
        typer.echo(f"error: {error}", err=True)
        for rank, report in sorted(getattr(error, "reports", {}).items()):
            typer.echo(f"  rank {rank}: {report}", err=True)
        return 2
    except (typer.Abort, KeyboardInterrupt):
        typer.echo("interrupted", err=True)
        return 130
    except _ClickException as error:
        message = error.format_message()
        if type(error).__name__ == "NoArgsIsHelpError":
            typer.echo(message)
            return 0
        typer.echo(f"error: {' '.join(message.split())}", err=True)
        return 2
    return status if isinstance(status, int) else 0
