"""`meshweave tune`: the algorithm of any problem; installed packages add verbs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshweave.base.errors import UnsupportedError
from meshweave.base.units import format_bytes, format_s
from meshweave.cli.commands import Verbs
from meshweave.cli.entries import SettingsOption, read_entry
from meshweave.cli.options import JSON_HELP, print_json, read_names
from meshweave.describe.machine.cluster import load_cluster
from meshweave.report.tables import print_table

if TYPE_CHECKING:
    from meshweave.tune.ranked import RankedConfig


class TuneVerbs(Verbs):
    """The verbs of `meshweave tune`, those of installed packages too."""

    group = "meshweave.commands.tune"


tune = typer.Typer(
    cls=TuneVerbs,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Search how one product C = A B is best laid out and ordered; `plan` tunes a model.",
)

JsonOption = Annotated[bool, typer.Option("--json", help=JSON_HELP)]


@tune.command("algorithm")
def rank_algorithms(
    name: Annotated[
        str,
        typer.Argument(
            help="An algorithm whose problem is to be solved, by it or by any other of its family."
        ),
    ],
    cluster: Annotated[
        str | None,
        typer.Option(
            help="A catalog cluster or a TOML file; ':N' sets the number of chips. Default: tpu-v4-pod:16."
        ),
    ] = None,
    settings: SettingsOption = [],  # noqa: B006, typer copies it
    algorithms: Annotated[
        str, typer.Option("--algorithm", help="Algorithms to choose among, with commas, or 'all'.")
    ] = "all",
    count: Annotated[int, typer.Option(min=1, max=1000, help="How many to list, the fastest first.")] = 10,
    json: JsonOption = False,
) -> None:
    """Rank algorithms and configs that solve a problem by estimated time, and print the fastest --count of them.

    The problem is the algorithm's first example, with the fields that --set changes: sizes, mesh, layouts.

    Example: meshweave tune algorithm meshslice --set m=4096 --set n=4096 --set k=4096 --set mesh_shape=4x4
    """
    from meshweave.tune.ranking import rank

    _, problem = read_entry(name, settings)
    own = getattr(problem, "cluster", None)
    if own is not None and cluster is not None:
        raise UnsupportedError(
            f"--cluster changes nothing: the problem of {name} is on {own.num_chips} chips of {own.name}; leave "
            "it out, or tune a step on any cluster by `meshweave plan`"
        )
    machine = own or load_cluster(cluster or "tpu-v4-pod:16")
    ranked = rank(problem, machine, algorithms=read_names(algorithms))[:count]
    if json:
        print_json([_ranked_json(item) for item in ranked])
        return
    head = ("algorithm", "config", "--config", "estimate", "exposed", "moved", "peak")
    rows = []
    for item in map(_ranked_json, ranked):
        times = (format_s(item[key]) for key in ("estimate_s", "exposed_s"))
        amounts = (format_bytes(item[key]) for key in ("traffic_bytes", "peak_bytes"))
        rows.append(
            (
                item["algorithm"],
                item["config"],
                "-" if item["number"] is None else str(item["number"]),
                *times,
                *amounts,
            )
        )
    print_table(head, rows, num_left=2)
    typer.echo("Moved and peak: on one rank.")


def _ranked_json(ranked: RankedConfig) -> dict[str, Any]:
    return {
        "algorithm": ranked.algorithm.name,
        "config": str(ranked.config),
        "number": _number(ranked),
        "estimate_s": ranked.estimate.total_s,
        "exposed_s": ranked.estimate.exposed_s,
        "traffic_bytes": sum(ranked.traffic_bytes.values()),
        "peak_bytes": ranked.peak_bytes,
    }


def _number(ranked: RankedConfig) -> int | None:
    """Return the place of a config in the algorithm's own order, without the cluster that `show` does not know.

    Return None for a config that there is with that cluster alone.
    """
    configs = list(ranked.algorithm.candidates(ranked.problem))
    return configs.index(ranked.config) if ranked.config in configs else None
