"""LAB.toml: what the lab's interconnect looks like, and the cluster description of the same machine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from meshweave.base.errors import nearest
from meshweave.describe.files import Duration, FileModel, Name, Rate, check, fail, load, shown
from meshweave.describe.machine.cluster import (
    Chip,
    Cluster,
    Hosts,
    Network,
    NetworkAxis,
    Ring,
    Switch,
    TorusNetwork,
)

MIN_BURST_BYTES = 65536
"""Below this TCP retransmits and its rate is erratic: a segmentation-offloaded packet has up to 64 KiB."""
# Measured: with 64 KiB goodput falls to 96, 91 and 82 % at 0.8, 1.6 and 4 Gbit/s, with 256 KiB it is 98 to 99 %.
_DEFAULT_BURST_S, _MAX_DEFAULT_BURST_BYTES = 2.5e-3, 262144
SEND_BUFFER_BYTES = 4 << 20
"""What gloo's socket takes over of a message: at most net.ipv4.tcp_wmem's maximum, by default this in Linux."""
MAX_HOSTS = 256
MAX_RANKS = 1024
_MIN_BYTES_PER_S, _MAX_BYTES_PER_S = 12_500, 12_500_000_000


@dataclass(frozen=True)
class Link:
    """A full-duplex link: rates in bytes per second forward and back, token bucket, queue in seconds.

    Without `burst_bytes` the bucket holds 2.5 ms at the rate, but 64 KiB at least and 256 KiB at most.
    """

    bytes_per_s: int
    back_bytes_per_s: int
    burst_bytes: int | None = None
    queue_s: float = 0.005
    latency_s: float = 100e-6

    def bucket_bytes(self, bytes_per_s: int) -> int:
        """The token bucket of a direction that has this rate."""
        if self.burst_bytes is not None:
            return self.burst_bytes
        return min(max(round(bytes_per_s * _DEFAULT_BURST_S), MIN_BURST_BYTES), _MAX_DEFAULT_BURST_BYTES)

    def axis(self, name: str, ways: Literal[1, 2] = 1) -> NetworkAxis:
        """The link as a cluster description has it; the slower direction where the two differ."""
        return NetworkAxis(name, min(self.bytes_per_s, self.back_bytes_per_s), self.latency_s, ways)


@dataclass(frozen=True)
class SwitchLab:
    """Hosts on one bridge, one NIC each; the ranks of a host share it, and loopback among themselves."""

    hosts: int
    ranks_per_host: int
    nic: Link
    local_bytes_per_s: float

    @property
    def num_ranks(self) -> int:
        return self.hosts * self.ranks_per_host

    def network(self) -> Network:
        if self.ranks_per_host == 1:
            return Switch(self.nic.axis("nic"), self.hosts)
        local = NetworkAxis("loopback", self.local_bytes_per_s, 100e-6)
        return Hosts(self.hosts, self.ranks_per_host, local, 1, self.nic.axis("nic"))


@dataclass(frozen=True)
class TorusLab:
    """A torus (of one axis: a ring) of single-rank hosts, `links[i]` along axis i; an axis of 2 has one link.

    Messages to hosts further away are forwarded by those between: first along axis 0, the shorter way round,
    forward where both are equally short.
    """

    shape: tuple[int, ...]
    links: tuple[Link, ...]

    @property
    def num_ranks(self) -> int:
        return math.prod(self.shape)

    @property
    def axis_names(self) -> tuple[str, ...]:
        return ("ring",) if len(self.shape) == 1 else ("row", "col")

    def network(self) -> Network:
        named = zip(self.axis_names, self.links, self.shape, strict=True)
        axes = tuple(link.axis(name, 2 if size > 2 else 1) for name, link, size in named)
        if len(self.shape) == 1:
            return Ring(axes[0], self.shape[0])
        return TorusNetwork(axes, self.shape, self.num_ranks)


@dataclass(frozen=True)
class TreeLab:
    """Groups of single-rank hosts, each group on a leaf bridge of its own with one uplink to a root bridge."""

    groups: int
    hosts_per_group: int
    nic: Link
    root: Link

    @property
    def num_ranks(self) -> int:
        return self.groups * self.hosts_per_group

    def network(self) -> Network:
        return Hosts(self.groups, self.hosts_per_group, self.nic.axis("nic"), 1, self.root.axis("root"))


@dataclass(frozen=True)
class LabDescription:
    """One LAB.toml. `flops_per_s` is the rate at which compute is paced in each rank, None for not at all."""

    name: str
    network: SwitchLab | TorusLab | TreeLab
    mtu_bytes: int
    flops_per_s: float | None
    note: str = ""

    @property
    def num_ranks(self) -> int:
        return self.network.num_ranks

    def cluster(self) -> Cluster:
        """The same machine for `estimate` and `simulate`, at nominal rates.

        Goodput of TCP is 97 to 100 % of these. Without pacing, compute has the rates of `local-cpu`.
        """
        if self.flops_per_s is not None:
            peaks = tuple((d, self.flops_per_s) for d in ("float32", "float64", "bfloat16", "float16"))
            chip = Chip("paced rank", peaks, self.flops_per_s, 2 * 10**9, 5e9, source="paced")
        else:
            known = (("float32", 60e9), ("float64", 29e9))
            chip = Chip("one CPU core", known, 60e9, 2 * 10**9, 5e9, source="orientation, as local-cpu")
        note = "network namespaces of one machine; what it tells is the order and overlap of messages"
        return Cluster(
            self.name,
            chip,
            self.network.network(),
            "lab description",
            note=self.note or note,
            send_buffer_bytes=SEND_BUFFER_BYTES,
        )


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


_Few = Annotated[int, BeforeValidator(_whole), Field(ge=1, le=MAX_HOSTS)]
_Burst = Annotated[int, BeforeValidator(_whole), Field(ge=MIN_BURST_BYTES, le=2**30)]
_Mtu = Annotated[int, BeforeValidator(_whole), Field(ge=1280, le=65000)]


class _LinkFile(FileModel):
    link_bytes_per_s: Rate | None = Field(None, description="bytes per second of one direction, a number")
    link_bits_per_s: Rate | None = Field(None, description="bits per second of one direction, a number")
    burst_bytes: _Burst | None = Field(
        None, description=f"the token bucket in bytes, {MIN_BURST_BYTES} at least (left out: by the rate)"
    )
    queue_s: Duration = Field(0.005, description="seconds a packet may queue before it is dropped")
    latency_s: Duration = Field(
        100e-6, description="seconds that a small message takes, for the cluster description only"
    )

    def link(self, file: str | Path, key: str) -> Link:
        rate = _rate(file, key, "link", self.link_bytes_per_s, self.link_bits_per_s)
        if rate is None:
            fail(file, key, "no rate; give link_bytes_per_s or link_bits_per_s")
        if not 0.001 <= self.queue_s <= 1.0:
            fail(file, f"{key}.queue_s", f"{self.queue_s:g} is not valid; give 0.001 to 1 second")
        return Link(rate, rate, self.burst_bytes, self.queue_s, self.latency_s)


class _AxisFile(_LinkFile):
    back_bytes_per_s: Rate | None = Field(
        None, description="bytes per second towards lower coordinates, where it differs"
    )
    back_bits_per_s: Rate | None = Field(
        None, description="bits per second towards lower coordinates, where it differs"
    )

    def link(self, file: str | Path, key: str) -> Link:
        link = super().link(file, key)
        back = _rate(file, key, "back", self.back_bytes_per_s, self.back_bits_per_s)
        rate = link.bytes_per_s if back is None else back
        return Link(link.bytes_per_s, rate, link.burst_bytes, link.queue_s, link.latency_s)


def _rate(file: str | Path, key: str, what: str, in_bytes: float | None, in_bits: float | None) -> int | None:
    if in_bytes is not None and in_bits is not None:
        fail(file, key, f"both {what}_bytes_per_s and {what}_bits_per_s are given; give one of them")
    if in_bytes is None and in_bits is None:
        return None
    rate = in_bytes if in_bytes is not None else in_bits / 8 if in_bits is not None else 0.0
    if not _MIN_BYTES_PER_S <= rate <= _MAX_BYTES_PER_S:
        name = f"{what}_bytes_per_s" if in_bytes is not None else f"{what}_bits_per_s"
        shown_rate = in_bytes if in_bytes is not None else in_bits
        fail(file, f"{key}.{name}", f"{shown_rate:g} is not valid; give 100 kbit/s to 100 Gbit/s")
    return round(rate)


class _SwitchFile(FileModel):
    hosts: _Few = Field(description=f"the number of hosts, 1 to {MAX_HOSTS}")
    ranks_per_host: _Few = Field(1, description=f"the number of ranks of a host, 1 to {MAX_HOSTS}")
    nic: _LinkFile = Field(description="a table that describes the link of a host")
    local_bytes_per_s: Rate = Field(
        2.4e9, description="bytes per second inside a host, for the cluster description only"
    )


class _TorusFile(FileModel):
    shape: list[_Few] = Field(description="a list of two sizes, rows and columns", min_length=2, max_length=2)
    axes: list[_AxisFile] = Field(
        description="a list of two tables, the links between rows and those between columns",
        min_length=2,
        max_length=2,
    )


class _RingFile(FileModel):
    hosts: _Few = Field(description=f"the number of hosts, 2 to {MAX_HOSTS}")
    axis: _AxisFile = Field(description="a table that describes the links")


class _TreeFile(FileModel):
    groups: _Few = Field(description=f"the number of leaf bridges, 1 to {MAX_HOSTS}")
    hosts_per_group: _Few = Field(description=f"the number of hosts on each, 1 to {MAX_HOSTS}")
    nic: _LinkFile = Field(description="a table that describes the link of a host to its leaf bridge")
    root: _LinkFile = Field(description="a table that describes the link of a leaf bridge to the root")


_KINDS: dict[str, type[_SwitchFile | _TorusFile | _RingFile | _TreeFile]] = {
    "switch": _SwitchFile,
    "torus": _TorusFile,
    "ring": _RingFile,
    "tree": _TreeFile,
}


class _LabFile(FileModel):
    name: Name = Field(description="the lab's name, a string of printable characters")
    note: str = Field("", description="what to know before use, a string")
    mtu_bytes: _Mtu = Field(9000, description="the largest packet in bytes, 1280 to 65000")
    flops_per_s: Rate | None = Field(
        None, description="FLOP/s at which compute is paced in each rank (left out: not paced), a number"
    )
    network: dict[str, Any] = Field(description="a table that describes the network, with its kind")


def _network(file: str | Path, table: dict[str, Any]) -> SwitchLab | TorusLab | TreeLab:
    table = dict(table)
    kind = table.pop("kind", None)
    if not isinstance(kind, str) or kind not in _KINDS:
        what = "missing" if kind is None else f"{shown(kind)} is not a kind of lab"
        hint = nearest(kind, _KINDS) if isinstance(kind, str) else ""
        fail(file, "network.kind", f"{what}{hint}; give one of {', '.join(_KINDS)}")
    found = check(_KINDS[kind], table, file, ("network",))
    match found:
        case _SwitchFile():
            nic = found.nic.link(file, "network.nic")
            return SwitchLab(found.hosts, found.ranks_per_host, nic, found.local_bytes_per_s)
        case _TorusFile():
            links = tuple(axis.link(file, f"network.axes.{i}") for i, axis in enumerate(found.axes))
            return TorusLab(tuple(found.shape), links)
        case _RingFile():
            return TorusLab((found.hosts,), (found.axis.link(file, "network.axis"),))
    nic, root = found.nic.link(file, "network.nic"), found.root.link(file, "network.root")
    return TreeLab(found.groups, found.hosts_per_group, nic, root)


def load_lab(path: str | Path) -> LabDescription:
    """The description in a LAB.toml (or a JSON file of the same keys).

    Raises DescriptionError `file: key: what is wrong; what would be right`.
    """
    top = check(_LabFile, load(path), path)
    network = _network(path, top.network)
    hosts = network.hosts if isinstance(network, SwitchLab) else network.num_ranks
    if hosts < 2 or hosts > MAX_HOSTS:
        fail(path, "network", f"{hosts} hosts are not a lab; give 2 to {MAX_HOSTS}")
    if network.num_ranks > MAX_RANKS:
        fail(path, "network", f"{network.num_ranks} ranks are too many; give {MAX_RANKS} at most")
    return LabDescription(top.name, network, top.mtu_bytes, top.flops_per_s, top.note)
