"""The keys of a cluster file: one pydantic model per table, each field with its unit and range.

`docs/reference/descriptions.md` is generated from these models.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, create_model

from meshweave.base.errors import DescriptionError, did_you_mean
from meshweave.base.units import DTYPES
from meshweave.describe.files import (
    Count,
    Duration,
    FileModel,
    Name,
    Problem,
    Rate,
    fail_with_all,
    file_model,
    format_value,
    validate_table,
)
from meshweave.describe.machine.chip import WORK_KINDS
from meshweave.describe.machine.chip_file import ChipFile
from meshweave.describe.machine.host import HostRates
from meshweave.describe.machine.links import COMM_KINDS, CommConstants, NetworkAxis
from meshweave.describe.machine.network import (
    FullMeshNetwork,
    HostsNetwork,
    Network,
    RingNetwork,
    SwitchNetwork,
    TorusNetwork,
)
from meshweave.describe.machine.tree import TreeLevel, TreeNetwork


class CommFile(file_model(CommConstants)):  # type: ignore[misc]
    """Constants of one kind of communication along an axis.

    Among P chips it takes `launch_s + (P - 1) (sync_s + shard_bytes / bytes_per_s)` seconds.
    """


_COMM = (CommFile | None, Field(None, description="a table of bytes_per_s, sync_s and launch_s"))


class CommTable(create_model("Kinds", __base__=FileModel, **dict.fromkeys(COMM_KINDS, _COMM))):  # type: ignore
    """Constants of an axis by kind of communication.

    A kind that is left out takes those of a similar kind; with none at all, they follow from the links.
    """


_BufferSize = Annotated[int, Field(ge=0, le=2**60)]


class AxisFile(FileModel):
    """The links along one axis of a network, a port of a switch, or a NIC."""

    name: Name = Field(description="the axis's name, a string of printable characters")
    source: str = Field("", description="where the axis's numbers are from, a string")
    link_bytes_per_s: Rate = Field(
        description="bytes per second of one link in one direction, a number of at least 1"
    )
    link_latency_s: Duration = Field(0.0, description="seconds of latency of one link, from 0 to 1e6")
    num_directions: Literal[1, 2] = Field(
        1, alias="ways", description="the number of directions a ring collective uses, 1 or 2"
    )
    launch_s: Duration = Field(0.0, description="seconds to launch a collective, from 0 to 1e6")
    burst_bytes: _BufferSize = Field(
        0, description="bytes that a link passes at once after idling, a whole number of at least 0"
    )
    constants: CommTable = Field(
        default_factory=lambda: CommTable.model_validate({}),
        description="a table of constants by kind of communication",
    )

    def axis(self) -> NetworkAxis:
        """Return the links that this table describes."""
        tables = ((kind, getattr(self.constants, kind)) for kind in COMM_KINDS)
        constants = tuple((k, CommConstants(**c.model_dump())) for k, c in tables if c)
        return NetworkAxis(**self.model_dump(exclude={"constants"}), constants=constants)


class TorusFile(FileModel):
    """`kind = "torus"`: chips in a grid of 1 to 6 dimensions, each dimension a ring.

    Give either `shape`, or `reconfigurable = true` and `chips`.
    """

    axes: list[AxisFile] = Field(
        description="a list of 1 to 6 tables, one per dimension", min_length=1, max_length=6
    )
    shape: list[Count] | None = Field(None, description="a list of sizes, one per axis, each at least 1")
    reconfigurable: bool = Field(False, description="true where any shape can be had, else false")
    chips: Count | None = Field(None, description="the number of chips, a whole number of at least 1")
    min_chips: Count = Field(1, description="the fewest chips it comes with, a whole number of at least 1")
    max_chips: Count = Field(65536, description="the most chips it comes with, a whole number of at least 1")
    slices: AxisFile | None = Field(
        None, description="a table: the link of each chip to a network that joins several tori"
    )
    sizes: list[Count] = Field(
        [], description="the numbers of chips that one is sold with, rising; above the last, its multiples"
    )

    def network(self) -> Network:
        """Return the network that this table describes. Raises DescriptionError if its values do not fit."""
        chips = self.chips
        if chips is None:
            if self.shape is None:
                raise DescriptionError("torus: neither a shape nor chips; give one of them")
            chips = 1
            for size in self.shape:
                chips *= size
        shape = tuple(self.shape) if self.shape is not None else None
        axes = tuple(axis.axis() for axis in self.axes)
        slices = None if self.slices is None else self.slices.axis()
        return TorusNetwork(
            axes, shape, chips, self.reconfigurable, self.min_chips, self.max_chips, slices, tuple(self.sizes)
        )


class RingFile(FileModel):
    """`kind = "ring"`: chips in one ring, two links each."""

    size: Count = Field(description="the number of chips, a whole number of at least 1")
    axis: AxisFile = Field(description="a table that describes the links")

    def network(self) -> Network:
        """Return the network that this table describes. Raises DescriptionError if its values do not fit."""
        return RingNetwork(self.axis.axis(), self.size)


class SwitchFile(RingFile):
    """`kind = "switch"`: chips with one full-duplex port each into a switch that never blocks."""

    def network(self) -> Network:
        """Return the network that this table describes. Raises DescriptionError if its values do not fit."""
        return SwitchNetwork(self.axis.axis(), self.size)


class HostsFile(FileModel):
    """`kind = "hosts"`: hosts of several chips, joined by NICs."""

    num_hosts: Count = Field(description="the number of hosts, a whole number of at least 1")
    chips_per_host: Count = Field(description="the number of chips in a host, a whole number of at least 1")
    nics_per_host: Count = Field(description="the number of NICs of a host, a whole number of at least 1")
    intra: AxisFile = Field(description="a table that describes the links inside a host")
    nic: AxisFile = Field(description="a table that describes one NIC")

    def network(self) -> Network:
        """Return the network that this table describes. Raises DescriptionError if its values do not fit."""
        return HostsNetwork(
            self.num_hosts, self.chips_per_host, self.intra.axis(), self.nics_per_host, self.nic.axis()
        )


class FullMeshFile(FileModel):
    """`kind = "full_mesh"`: packages of several chips.

    Any two chips of a package have a link, and so have the chips at the same position of any two packages.
    """

    num_packages: Count = Field(description="the number of packages, a whole number of at least 1")
    chips_per_package: Count = Field(1, description="the number of chips in a package, at least 1")
    inner: AxisFile | None = Field(
        None, description="a table that describes a link inside a package (left out: as between packages)"
    )
    link: AxisFile = Field(description="a table that describes a link between packages")

    def network(self) -> Network:
        """Return the network that this table describes. Raises DescriptionError if its values do not fit."""
        link = self.link.axis()
        inner = self.inner.axis() if self.inner else link
        return FullMeshNetwork(self.num_packages, self.chips_per_package, inner, link)


class LevelFile(FileModel):
    """One level of switches of a tree."""

    fanout: Count = Field(description="how many of the level below hang on one switch, at least 1")
    links: Count = Field(1, description="the number of parallel links of each of them, at least 1")
    axis: AxisFile = Field(description="a table that describes one such link")
    direct: AxisFile | None = Field(
        None,
        description="a table that describes the link that any two children of one switch have besides, all "
        "parallel links of the two as one (left out: none)",
    )

    def level(self) -> TreeLevel:
        """Return the level that this table describes."""
        return TreeLevel(
            self.fanout, self.axis.axis(), self.links, self.direct.axis() if self.direct else None
        )


class TreeFile(FileModel):
    """`kind = "tree"`: chips as leaves below levels of switches."""

    levels: list[LevelFile] = Field(
        description="a list of 1 to 6 tables, one per level of switches from the chips up",
        min_length=1,
        max_length=6,
    )

    def network(self) -> Network:
        """Return the network that this table describes. Raises DescriptionError if its values do not fit."""
        return TreeNetwork(tuple(level.level() for level in self.levels))


NetworkFile = TorusFile | RingFile | HostsFile | TreeFile | FullMeshFile

NETWORK_FILES: dict[str, type[NetworkFile]] = {
    "torus": TorusFile,
    "ring": RingFile,
    "switch": SwitchFile,
    "hosts": HostsFile,
    "tree": TreeFile,
    "full_mesh": FullMeshFile,
}
"""The model of the table `network` for each value of its key `kind`."""


class HostFile(file_model(HostRates)):  # type: ignore[misc]
    """What issuing an operation takes a rank's host (`HostRates`), in seconds."""


class ClusterFile(FileModel):
    """A chip, the network between chips, and where the numbers are from."""

    name: Name = Field(description="the cluster's name, a string of printable characters")
    source: str = Field("", description="where the numbers are from, a string (left out: not stated)")
    note: str = Field("", description="what to know before use, a string")
    like: Name | None = Field(
        None,
        description="a catalog entry whose keys hold where this file says nothing, a string (left out: none)",
    )
    usual_for: list[Name] = Field(
        default_factory=list,
        description="in the catalog: a list of chips, by their usual names, whose usual host this is",
    )
    host: HostFile | None = Field(None, description="a table of what issuing operations takes a rank's host")
    send_buffer_bytes: _BufferSize = Field(
        0, description="bytes of a message that a send need not wait for, a whole number of at least 0"
    )
    chip: ChipFile = Field(description="a table that describes the chip")
    network: dict[str, Any] = Field(description="a table that describes the network, with its kind")


def read_cluster_file(data: dict[str, Any], file: str | Path) -> tuple[ClusterFile, NetworkFile]:
    """Return a cluster file, and its table `network`, both checked.

    Raises:
        DescriptionError: the file is wrong; the error lists the problems.
    """
    top, problems = validate_table(ClusterFile, data)
    problems += _unknown_names(data)
    network: NetworkFile | None = None
    table = data.get("network")
    if isinstance(table, dict):
        kind = table.get("kind")
        if isinstance(kind, str) and kind in NETWORK_FILES:
            keys = {key: value for key, value in table.items() if key != "kind"}
            network, network_problems = validate_table(NETWORK_FILES[kind], keys, ("network",))
            problems += network_problems
        else:
            problems.append(Problem("network.kind", _wrong_kind(kind)))
    if top is None or network is None or problems:
        fail_with_all(file, problems)
    return top, network


def _wrong_kind(kind: object) -> str:
    problem = "missing" if kind is None else f"{format_value(kind)} is not a kind of network"
    hint = did_you_mean(kind, NETWORK_FILES) if isinstance(kind, str) else ""
    return f"{problem}{hint}; give one of {', '.join(NETWORK_FILES)}"


def _unknown_names(data: dict[str, Any]) -> list[Problem]:
    chip = data.get("chip")
    tables = (("peak_flops_per_s", DTYPES, "dtype"), ("dtype_flops_per_s", DTYPES, "dtype"))
    return [
        Problem(
            f"chip.{key}.{name}",
            f"unknown {noun}{did_you_mean(name, known)}; known {noun}s: {', '.join(known)}",
        )
        for key, known, noun in (*tables, ("call_flops_per_s", WORK_KINDS, "work"))
        for name in _keys(chip, key)
        if name not in known
    ]


def _keys(table: object, key: str) -> list[str]:
    inner = table.get(key) if isinstance(table, dict) else None
    return list(inner) if isinstance(inner, dict) else []
