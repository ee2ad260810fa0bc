"""`meshweave cluster`: cluster files to start from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from meshweave.base.errors import DescriptionError
from meshweave.base.outputs import write_file
from meshweave.calibrate.cluster_toml import to_toml
from meshweave.cli.options import JSON_HELP, OutputOption, print_json
from meshweave.describe.files import format_value
from meshweave.describe.machine.cluster import load_cluster
from meshweave.describe.machine.cluster_phrase import usual_host
from meshweave.describe.machine.cluster_table import cluster_table
from meshweave.describe.machine.network import HostsNetwork

_NAME_CHARACTERS = 200
"""The most characters of a name that a cluster file is read with."""

cluster = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Make cluster files to start from.")


@cluster.callback()
def _group() -> None:
    """Make cluster files to start from."""


@cluster.command()
def new(
    chip: Annotated[str, typer.Option(help="Kind of chip, such as h100, 'A100 40GB' or mi300x.")],
    hosts: Annotated[int, typer.Option(min=1, help="Number of hosts.")] = 1,
    per_host: Annotated[
        int | None, typer.Option(min=1, help="Chips a host. Default: those of the chip's usual host.")
    ] = None,
    nics: Annotated[
        int | None, typer.Option(min=1, help="NICs a host. Default: one a chip with --nic.")
    ] = None,
    nic: Annotated[str | None, typer.Option(help="Rate of a NIC, such as 400Gb. Default: as usual.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the cluster. Default: what it is.")] = None,
    out: Annotated[Path | None, OutputOption(help="File to write. Default: stdout.")] = None,
    json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """Write a cluster file to start from: the usual host of a chip, with what the options change.

    Numbers that the options leave open are those of the catalog, each with its source. A cluster in words,
    "64 x H100, 8 a host, 8 x 400Gb", is understood wherever a cluster is asked for.

    Example: meshweave cluster new --chip h100 --hosts 8 --nic 400Gb
    """
    entry, table = usual_host(chip)
    network = load_cluster(entry).network
    if not isinstance(network, HostsNetwork):
        kind = table["network"]["kind"]
        raise DescriptionError(f"{chip} comes in no hosts but in a {kind}; start from catalog {entry} --toml")
    per_host = per_host or network.chips_per_host
    phrase = f"{hosts * per_host} x {chip}, {per_host} a host"
    if nics and not nic:
        raise DescriptionError("--nics says how many, and not of which rate; give --nic too")
    if nic:
        phrase += f", {nics or per_host} x {nic}"
    made = load_cluster(phrase)
    if name is not None and not (name.isprintable() and len(name) <= _NAME_CHARACTERS):
        raise DescriptionError(
            f"--name {format_value(name)} is not valid; give printable characters, {_NAME_CHARACTERS} at most"
        )
    made = replace(made, name=name or made.name)
    text = to_toml(made, [f"{made.name}: numbers of the catalog's {entry} but for what was asked"])
    if out is not None:
        write_file(out, text)
    if json:
        print_json(
            {"cluster": cluster_table(made, whole=False), "written": None if out is None else str(out)}
        )
    else:
        typer.echo(f"written: {out}" if out else text, nl=out is not None)
