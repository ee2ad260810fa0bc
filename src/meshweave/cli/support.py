"""`meshweave support`: what of a model on a cluster is predicted, executed and refused, before a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from meshweave.cli.options import JSON_HELP, print_json
from meshweave.cli.plan import ModelArgument
from meshweave.describe.machine.cluster import load_cluster
from meshweave.describe.model import load_model
from meshweave.report.tables import print_table

if TYPE_CHECKING:
    from meshweave.tune.support import SupportLine


def support(
    model: ModelArgument,
    given: Annotated[
        str | None,
        typer.Argument(metavar="CLUSTER", help="The cluster, as --cluster has it.", show_default=False),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="A catalog cluster, words or a TOML file; ':N' sets the chips.", show_default=False
        ),
    ] = None,
    sequence: Annotated[int, typer.Option(min=1, help="Tokens per sequence.")] = 2048,
    dtype: Annotated[str, typer.Option(help="Element type of activations and weights.")] = "bfloat16",
    json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """Say what of a model on a cluster is predicted, with which evidence, and what is executed or refused.

    Kernels and links are measured, or modelled from a datasheet. Stacks were tried on published runs of this
    chip, or have the constants of another. Strategies and schedules are those of this library's runtime.

    Example: meshweave support llama-3-8b --cluster dgx-h100:64
    """
    from meshweave.tune.support import support_of

    if (given is None) == (cluster is None):
        raise typer.BadParameter("give the cluster once, as in --cluster dgx-h100:64")
    machine = load_cluster(cluster or given or "")
    known = support_of(load_model(model), machine, sequence=sequence, dtype=dtype)
    if json:
        print_json(known.model_dump(mode="json"))
        return
    typer.echo(
        f"{known.model} on {known.num_chips} chips of {known.cluster}: sequences of {known.sequence} tokens, "
        f"{known.dtype}\n{known.runs}"
    )
    _print("predicted", known.prediction)
    _print("software stack", known.stacks)
    _print("strategy of mw.parallelize", known.strategies)
    _print("schedule of mw.pipeline", known.schedules)


def _print(subject: str, lines: tuple[SupportLine, ...]) -> None:
    """Print lines under a head; those of one verdict for one reason are one."""
    rows: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        rows.setdefault((line.verdict, line.why), []).append(line.subject)
    typer.echo()
    head = [subject, "", "evidence, or why not"]
    print_table(head, ([", ".join(names), *key] for key, names in rows.items()), 3)
