"""Clusters: a chip, and the network between chips, from a TOML file or the catalog."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from meshweave.base.errors import DescriptionError, require_count
from meshweave.base.limits import CHIPS
from meshweave.base.outputs import note
from meshweave.describe.catalog import catalog_text, clusters
from meshweave.describe.files import fail, is_path, load_table, parse_table
from meshweave.describe.like import table_like
from meshweave.describe.machine.chip import Chip
from meshweave.describe.machine.cluster_file import read_cluster_file
from meshweave.describe.machine.cluster_phrase import FORM, is_phrase, phrase_table
from meshweave.describe.machine.host import HostRates
from meshweave.describe.machine.network import HostsNetwork, Network, TorusNetwork


@dataclass(frozen=True)
class Cluster:
    """A named machine: chips of one kind, and the network between them.

    Attributes:
        source: where the numbers are from.
        host: how fast each rank's host issues operations; None for one that is never waited for.
        note: what to know before use.
        send_buffer_bytes: how many bytes of a message the transport (a socket) buffers. A send of at most so
            many ends once it is matched, before the bytes have arrived; 0 if every send lasts until then.
            Simulation uses it, and so do estimates of messages and chains.

    Raises:
        DescriptionError: there are more than `base.limits.CHIPS` chips.
    """

    name: str
    chip: Chip
    network: Network
    source: str
    host: HostRates | None = None
    note: str = field(default="", compare=False)
    send_buffer_bytes: int = 0

    def __post_init__(self) -> None:
        if self.num_chips > CHIPS.most:
            raise DescriptionError(CHIPS.refusal(self.num_chips))

    @property
    def num_chips(self) -> int:
        """Return the number of chips of the whole cluster."""
        return self.network.num_chips

    def with_chips(self, chips: int) -> Cluster:
        """Return the same machine with another number of chips. Raises DescriptionError if it has no such size."""
        chips = require_count(chips, f"cluster {self.name}: the number of chips", DescriptionError)
        if chips > CHIPS.most:  # first, for sizes near to it are none either
            raise DescriptionError(f"cluster {self.name}: {CHIPS.refusal(chips)}; give fewer")
        try:
            return replace(self, network=self.network.with_chips(chips))
        except DescriptionError as error:
            raise DescriptionError(f"cluster {self.name}: {error}") from None


def cluster_from(data: dict[str, Any], file: str | Path) -> Cluster:
    """Return the cluster that the table `data` describes.

    Files that the table names are found from the folder of `file`, which is also what errors name.

    Raises:
        DescriptionError: the description is wrong; the error lists the problems.
    """
    top, network_file = read_cluster_file(table_like("clusters", data, file), file)
    try:
        chip = top.chip.chip(top.source, Path(file).parent)
    except DescriptionError as error:
        fail(file, "chip", str(error))
    try:
        return Cluster(
            top.name,
            chip,
            network_file.network(),
            top.source,
            HostRates(**top.host.model_dump()) if top.host else None,
            top.note,
            top.send_buffer_bytes,
        )
    except DescriptionError as error:
        fail(file, "network", str(error))


def load_cluster(name_or_path: str | Path) -> Cluster:
    """Return the cluster of a catalog name (`tpu-v4-pod`), of a TOML or JSON file, or of words.

    `:N` after a name or file sets the number of chips (`tpu-v4-pod:64`). Words begin with that number or with
    the number of hosts: `64 x H100, 8 a host, 8 x 400Gb`, `8 hosts of 8 x H100`
    (`describe.machine.cluster_phrase`). A `Path`, and a string that names an existing file and no catalog
    entry, is read as that file, with any colon in it.

    Raises:
        DescriptionError: there is no such entry or file, the cluster does not come with so many chips, or the
            description is wrong; the error lists the problems of a file.
    """
    name = str(name_or_path)
    as_is = isinstance(name_or_path, Path) or _is_there(name)
    where, chips = (name, None) if as_is else _split(name)
    if chips is not None and not re.fullmatch(r"[0-9]{1,18}", chips):
        fail(name, "", "what follows the colon is the number of chips; give a whole number such as :64")
    if not as_is and is_phrase(name):
        table, size = phrase_table(name)
        return _sized(cluster_from(table, name), size)
    if isinstance(name_or_path, Path) or (where not in clusters() and is_path(where)):
        cluster = cluster_from(load_table(where), where)
    else:
        file = f"{where}.toml"
        text = catalog_text("clusters", where, f"; give words such as '{FORM}'")
        cluster = cluster_from(parse_table(text, file, "toml"), file)
    return cluster if chips is None else _sized(cluster, int(chips))


def gives_chips(name: str) -> bool:
    """Return whether a text for `load_cluster` gives the number of chips, by `:N` at its end or in words.

    False for the name of an existing file.
    """
    return not _is_there(name) and (_split(name)[1] is not None or is_phrase(name))


def _is_there(name: str) -> bool:
    return os.path.exists(name)  # noqa: PTH110  (unlike Path's, never raises)


def _split(name: str) -> tuple[str, str | None]:
    """Return what is before the `:N` of a text, and N, or all of it and None."""
    match = re.fullmatch(r"(.+):([^:/\\]*)", name, re.DOTALL)
    return (match[1], match[2]) if match else (name, None)


def described(cluster: Cluster | str | Path) -> Cluster:
    """Return `cluster` itself if it is a `Cluster`; else load it: a catalog name, a file, or words.

    Raises:
        DescriptionError: nothing has that name, the description is wrong, or it is neither.
    """
    if not isinstance(cluster, Cluster | str | Path):
        raise DescriptionError(
            f"a {type(cluster).__name__} is no cluster; give a Cluster, or its name or file"
        )
    return cluster if isinstance(cluster, Cluster) else load_cluster(cluster)


def _sized(cluster: Cluster, chips: int) -> Cluster:
    """Return a cluster of so many chips; a note says so where they are a part of each of several hosts.

    Raises DescriptionError where it is not sold with so many.
    """
    if isinstance(cluster.network, TorusNetwork):
        try:
            cluster.network.check_sold(chips)
        except DescriptionError as error:
            raise DescriptionError(f"cluster {cluster.name}: {error}") from None
    sized = cluster.with_chips(chips)
    before, after = cluster.network, sized.network
    if isinstance(before, HostsNetwork) and isinstance(after, HostsNetwork):
        used, whole = after.chips_per_host, before.chips_per_host
        if after.num_hosts > 1 and used < whole:
            note(f"{chips} chips are {after.num_hosts} hosts with {used} of {whole} chips each")
    return sized
