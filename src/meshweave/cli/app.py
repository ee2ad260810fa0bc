"""The verbs of the command line, and what it says of mistakes and of Ctrl-C."""

from __future__ import annotations

import sys
from functools import cache
from typing import Annotated, Any

import typer

from meshweave import __version__
from meshweave.base.errors import DescriptionError, MeshweaveError, shortened, without_control_characters
from meshweave.base.outputs import CommandOutputs, outputs_of_command, taken_notes
from meshweave.cli.calibrate import calibrate
from meshweave.cli.catalog import catalog
from meshweave.cli.cluster import cluster
from meshweave.cli.commands import Verbs
from meshweave.cli.export import export
from meshweave.cli.pipeline import pipeline
from meshweave.cli.plan import fixed_names, plan
from meshweave.cli.reshard import reshard
from meshweave.cli.run import run
from meshweave.cli.show import show
from meshweave.cli.simulate import simulate
from meshweave.cli.support import support
from meshweave.cli.tune import tune
from meshweave.cli.verify import verify

INTERRUPTED = 130
"""Exit status after Ctrl-C."""

app = typer.Typer(
    name="meshweave",
    cls=Verbs,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Plan, predict and run the communication of distributed training: one program, three readings.",
    epilog="Errors are one line on stderr (one a problem of a file) and exit status 2; verify ends with 1 where a "
    "result is wrong; Ctrl-C ends with 130. Outputs are checked before work and written whole. Every verb takes "
    "--json. For completion of verbs and options by Tab: meshweave --install-completion, then start the shell "
    "again.",
)
app.command()(support)
app.command()(plan)
app.command()(export)
app.command()(simulate)
app.command()(reshard)
app.command()(pipeline)
app.command()(run)
app.command()(verify)
app.command()(show)
app.command()(catalog)
app.add_typer(cluster, name="cluster")
app.command()(calibrate)
app.add_typer(tune, name="tune")

_ClickException: Any = typer.BadParameter.__mro__[2]
"""By way of typer: newer versions carry a click of their own, older ones import it."""


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"meshweave {__version__}")
        raise typer.Exit


def _say_notes(result: object, **options: object) -> object:
    """Say what the command had to say beside its result; return the result, which may be an exit status."""
    for sentence in taken_notes():
        typer.echo(f"note: {sentence}", err=True)
    return result


@app.callback(result_callback=_say_notes)
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    taken_notes()  # of a command before this one in the same process that failed


@cache
def _command() -> Any:
    return typer.main.get_command(app)


def run_app(args: list[str]) -> int:
    """Run the command line `args` (without the program's name) and return its exit status.

    A MeshweaveError or a wrong usage is printed on stderr and gives 2, Ctrl-C gives `INTERRUPTED`.
    """
    _print_anything()
    with outputs_of_command() as outputs:
        return _run(args, outputs)


def _refuse_empty_value(args: list[str]) -> None:
    """Raise DescriptionError where an option is given an empty word, as by a variable of a shell that is not set.

    An empty word is the default of many options: the command would silently do something else than was asked for.
    """
    own = args[: args.index("--")] if "--" in args else args
    command = _command()
    for word in own:
        if hasattr(command, "get_command") and not word.startswith("-"):  # also of verbs that packages add
            command = command.get_command(None, word) or command
    takers = {name for param in command.params if not getattr(param, "is_flag", True) for name in param.opts}
    for at, word in enumerate(own):
        option, equals, value = word.partition("=")
        given = [value] if equals else own[at + 1 : at + 2]
        if option in takers and given == [""]:
            raise DescriptionError(f"{option} is given an empty word: give it a value, or leave it out")


def _run(args: list[str], outputs: CommandOutputs) -> int:
    try:
        _refuse_empty_value(args)
        status = _command().main(args=args, prog_name="meshweave", standalone_mode=False)
    except MeshweaveError as error:
        typer.echo(f"error: {error}", err=True)
        for rank, report in sorted(getattr(error, "reports", {}).items()):
            typer.echo(f"  rank {rank}: {report}", err=True)
        return 2
    except (typer.Abort, KeyboardInterrupt):
        status = INTERRUPTED
    except _ClickException as error:
        message = error.format_message()
        if type(error).__name__ == "NoArgsIsHelpError":
            typer.echo(message)
            return 0
        message = _fix_advice(error) or " ".join(message.split())
        typer.echo(f"error: {shortened(without_control_characters(message))}", err=True)
        return 2
    if status == INTERRUPTED:  # some versions of typer return it, others raise
        typer.echo(f"interrupted; {outputs.summary()}", err=True)
    return status if isinstance(status, int) else 0


def _fix_advice(error: Any) -> str:
    """Return what to give for an unknown option that is a keyword of `--fix`, such as --tp; "" of others."""
    name = getattr(error, "option_name", "").removeprefix("--").replace("-", "_")
    params = error.ctx.command.params if error.ctx is not None else ()
    if name and any("--fix" in param.opts for param in params) and name in fixed_names():
        return f"No such option: {error.option_name}; give --fix {name}=VALUE"
    return ""


def _print_anything() -> None:
    """Let stdout take names that its encoding does not have, such as half a surrogate pair in a file, escaped."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
