"""What a lab's interconnect looks like, and the cluster description of the same machine.

`description_file` reads a description from a LAB.toml.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from meshweave.describe.machine.chip import Chip
from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.machine.links import NetworkAxis
from meshweave.describe.machine.network import HostsNetwork, Network, RingNetwork, SwitchNetwork, TorusNetwork
from meshweave.describe.machine.tree import TreeLevel, TreeNetwork
from meshweave_lab.pace import paced_chip

MIN_BURST_BYTES = 65536
"""The smallest token bucket. A segmentation-offloaded packet has up to 64 KiB; below it TCP's rate is erratic."""
# Measured: with 64 KiB goodput falls to 96, 91 and 82 % at 0.8, 1.6 and 4 Gbit/s, with 256 KiB it is 98 to 99 %.
_DEFAULT_BURST_S, _MAX_DEFAULT_BURST_BYTES = 2.5e-3, 262144
SEND_BUFFER_BYTES = 4 << 20
"""How many bytes of a message gloo's socket buffers: the default maximum of Linux's net.ipv4.tcp_wmem."""


@dataclass(frozen=True)
class Link:
    """A full-duplex link.

    Attributes:
        bytes_per_s: the rate forward: to the next coordinate of a torus, or towards the switch or root.
        back_bytes_per_s: the rate of the other direction.
        burst_bytes: the size of the token bucket; None for 2.5 ms at the rate, within 64 KiB and 256 KiB.
        queue_s: seconds that a packet may queue before it is dropped.
        latency_s: seconds that a small message takes; only the cluster description uses it.
    """

    bytes_per_s: int
    back_bytes_per_s: int
    burst_bytes: int | None = None
    queue_s: float = 0.005
    latency_s: float = 100e-6

    def bucket_bytes(self, bytes_per_s: int) -> int:
        """Return the size of the token bucket of a direction that has this rate."""
        if self.burst_bytes is not None:
            return self.burst_bytes
        return min(max(round(bytes_per_s * _DEFAULT_BURST_S), MIN_BURST_BYTES), _MAX_DEFAULT_BURST_BYTES)

    def axis(self, name: str, num_directions: Literal[1, 2] = 1) -> NetworkAxis:
        """Return the link as a network axis of a cluster, at the rate of the slower direction."""
        rate = min(self.bytes_per_s, self.back_bytes_per_s)
        return NetworkAxis(name, rate, self.latency_s, num_directions, burst_bytes=self.bucket_bytes(rate))


@dataclass(frozen=True)
class SwitchLab:
    """Hosts on one bridge. The ranks of a host share its one NIC, and use loopback among themselves."""

    hosts: int
    ranks_per_host: int
    nic: Link
    local_bytes_per_s: float

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return self.hosts * self.ranks_per_host

    @property
    def all_links(self) -> tuple[Link, ...]:
        """The links of the lab, one of each sort."""
        return (self.nic,)

    def network(self) -> Network:
        """Return the network of the cluster description."""
        if self.ranks_per_host == 1:
            return SwitchNetwork(self.nic.axis("nic"), self.hosts)
        local = NetworkAxis("loopback", self.local_bytes_per_s, 100e-6)
        return HostsNetwork(self.hosts, self.ranks_per_host, local, 1, self.nic.axis("nic"))


@dataclass(frozen=True)
class TorusLab:
    """A torus (with one axis: a ring) of single-rank hosts, `links[i]` along axis i; an axis of 2 has one link.

    Hosts forward messages to hosts that are further away: first along axis 0, in the direction with fewer hops,
    forward if both have equally many.
    """

    shape: tuple[int, ...]
    links: tuple[Link, ...]

    @property
    def num_ranks(self) -> int:
        """The number of ranks, one per host."""
        return math.prod(self.shape)

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The names of the axes: "ring", or "row" and "col"."""
        return ("ring",) if len(self.shape) == 1 else ("row", "col")

    @property
    def all_links(self) -> tuple[Link, ...]:
        """The links of the lab, one of each sort."""
        return self.links

    def network(self) -> Network:
        """Return the network of the cluster description."""
        named = zip(self.axis_names, self.links, self.shape, strict=True)
        axes = tuple(link.axis(name, 2 if size > 2 else 1) for name, link, size in named)
        if len(self.shape) == 1:
            return RingNetwork(axes[0], self.shape[0])
        return TorusNetwork(axes, self.shape, self.num_ranks)


@dataclass(frozen=True)
class TreeLab:
    """Groups of single-rank hosts, each group on a leaf bridge of its own with one uplink to a root bridge.

    `direct` is the link that any two hosts of a group have besides, which their messages then take; None where
    there are none.
    """

    groups: int
    hosts_per_group: int
    nic: Link
    root: Link
    direct: Link | None = None

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return self.groups * self.hosts_per_group

    @property
    def all_links(self) -> tuple[Link, ...]:
        """The links of the lab, one of each sort."""
        return (self.nic, self.root) if self.direct is None else (self.nic, self.root, self.direct)

    def network(self) -> Network:
        """Return the network of the cluster description: with direct links a tree, else hosts with a NIC."""
        if self.direct is not None:
            leaf = TreeLevel(self.hosts_per_group, self.nic.axis("nic"), direct=self.direct.axis("direct"))
            return TreeNetwork((leaf, TreeLevel(self.groups, self.root.axis("root"))))
        return HostsNetwork(
            self.groups, self.hosts_per_group, self.nic.axis("nic"), 1, self.root.axis("root")
        )


@dataclass(frozen=True)
class LabDescription:
    """A lab.

    Attributes:
        flops_per_s: the rate at which compute is paced in each rank; None for no pacing.
        call_flops_per_s: (kind of work, FLOP/s) of calls that are paced at a rate of their own.
    """

    name: str
    network: SwitchLab | TorusLab | TreeLab
    mtu_bytes: int
    flops_per_s: float | None
    note: str = ""
    call_flops_per_s: tuple[tuple[str, float], ...] = ()

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return self.network.num_ranks

    @property
    def max_bucket_bytes(self) -> int:
        """The bytes that a link lets through, at most, before it keeps to its rate: the largest token bucket."""
        return max(
            link.bucket_bytes(rate)
            for link in self.network.all_links
            for rate in (link.bytes_per_s, link.back_bytes_per_s)
        )

    def cluster(self) -> Cluster:
        """Return the same machine as a cluster, for `estimate` and `simulate`, at nominal rates.

        The goodput of TCP is 97 to 100 % of these. Without pacing, compute has the rates of `local-cpu`.
        """
        if self.flops_per_s is not None:
            chip = paced_chip(self.flops_per_s, self.call_flops_per_s)
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

    def to_json(self) -> dict[str, Any]:
        """Return the description as plain values, the network with its kind."""
        kind = type(self.network).__name__.removesuffix("Lab").lower()
        described = asdict(self)
        return {**described, "network": {"kind": kind, **described["network"]}}
