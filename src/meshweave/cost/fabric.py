"""The placement of ranks on hosts and NICs, and the times of transfers between them.

The model is that of AlpaComm (MLSys '23, section 3): fast links inside a host, any two hosts joined at the same
rate, and the NICs of a host as the bottleneck. A NIC sends and receives at once (full duplex).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshweave.base.errors import LayoutError
from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.machine.links import NetworkAxis
from meshweave.describe.machine.network import HostsNetwork

Nic = tuple[int, int]
"""(host, number of the NIC in its host)."""


@dataclass(frozen=True)
class TransferTimes:
    """The seconds of a transfer's bytes between two hosts and inside a host, and the seconds of latency of each.

    A transfer that stays inside one host has the times inside a host for both.
    """

    inter_host_s: float
    intra_host_s: float
    inter_host_latency_s: float
    intra_host_latency_s: float


@dataclass(frozen=True)
class HostTopology:
    """The host and NIC of each rank, and the rates and latencies of NICs and of links inside a host.

    Attributes:
        host_of: host of each global rank.
        nic_of: number of the NIC, within its host, that each global rank uses.
        nic_bytes_per_s: rate of one direction of a NIC.
        local_bytes_per_s: rate of one direction of a link inside a host.
        nic_latency_s: seconds of a message between hosts in addition to its bytes.
        local_latency_s: seconds of a message inside a host in addition to its bytes.
        pack_launch_s, pack_bytes_per_s: what a strided view costs at each end of a message (`cost.packing`).

    Raises:
        LayoutError: `host_of` and `nic_of` differ in length, or a rate is below 1 byte per second.
    """

    host_of: tuple[int, ...]
    nic_of: tuple[int, ...]
    nic_bytes_per_s: int
    local_bytes_per_s: int
    nic_latency_s: float = 0.0
    local_latency_s: float = 0.0
    pack_launch_s: float = 0.0
    pack_bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        if len(self.host_of) != len(self.nic_of):
            raise LayoutError(f"{len(self.host_of)} ranks have a host, {len(self.nic_of)} a NIC")
        if min(self.nic_bytes_per_s, self.local_bytes_per_s) < 1:
            raise LayoutError("the rates of a host network are at least 1 byte per second")

    @classmethod
    def of(cls, cluster: Cluster, num_ranks: int | None = None) -> HostTopology:
        """Return the host topology of a cluster whose chip r is rank r.

        In a cluster without hosts every chip is a host of its own. `num_ranks` None takes all chips.

        Raises:
            LayoutError: there are more ranks than chips.
        """
        network = cluster.network
        count = cluster.num_chips if num_ranks is None else num_ranks
        if count > cluster.num_chips:
            raise LayoutError(f"{count} ranks do not fit the {cluster.num_chips} chips of {cluster.name}")
        if isinstance(network, HostsNetwork):
            per_host, nics = network.chips_per_host, network.nics_per_host
            host_of = tuple(rank // per_host for rank in range(count))
            nic_of = tuple(rank % per_host % nics for rank in range(count))
            nic, local = network.nic, network.intra
        else:
            host_of, nic_of = tuple(range(count)), (0,) * count
            nic = local = network.axis(0, 1)
        return cls(
            host_of,
            nic_of,
            _message_bytes_per_s(nic),
            _message_bytes_per_s(local),
            _message_latency_s(nic),
            _message_latency_s(local),
            cluster.chip.pack_launch_s,
            cluster.chip.pack_bytes_per_s,
        )

    @classmethod
    def of_host_names(cls, host_names: Mapping[int, str], node: Cluster, hosts: Cluster) -> HostTopology:
        """Return the host topology of ranks that run on named hosts.

        The ranks of a host are assigned to its NICs round robin. A message between hosts has at least the
        latency of one inside a host.

        Args:
            host_names: name of the host of each global rank.
            node: a cluster whose links (and packing) are those inside a host.
            hosts: a cluster of hosts (`HostsNetwork`), whose NICs these hosts have.
        """
        assert isinstance(hosts.network, HostsNetwork)
        inside, between = cls.of(node, 1), cls.of(hosts, 1)
        host_numbers = {name: number for number, name in enumerate(dict.fromkeys(host_names.values()))}
        host_of, nic_of = [0] * (max(host_names) + 1), [0] * (max(host_names) + 1)
        ranks_on = dict.fromkeys(host_numbers, 0)
        for rank, name in host_names.items():
            host_of[rank], nic_of[rank] = host_numbers[name], ranks_on[name] % hosts.network.nics_per_host
            ranks_on[name] += 1
        return cls(
            tuple(host_of),
            tuple(nic_of),
            between.nic_bytes_per_s,
            inside.local_bytes_per_s,
            max(between.nic_latency_s, inside.local_latency_s),
            inside.local_latency_s,
            inside.pack_launch_s,
            inside.pack_bytes_per_s,
        )

    def nic(self, rank: int) -> Nic:
        """Return the NIC that a global rank uses, as (host, number of the NIC in its host)."""
        return self.host_of[rank], self.nic_of[rank]

    @property
    def packs(self) -> bool:
        """Return whether packing a strided view for a message takes time."""
        return self.pack_bytes_per_s > 0

    def packing_s(self, num_bytes: int) -> float:
        """Return the seconds in which one end of a message packs or unpacks a strided view of `num_bytes`."""
        return self.pack_launch_s + num_bytes / self.pack_bytes_per_s if self.packs else 0.0

    def nic_transfer_s(self, num_bytes: int) -> float:
        """Return the seconds of `num_bytes` through one direction of a NIC, without latency."""
        return num_bytes / self.nic_bytes_per_s

    def transfer_times(self, num_bytes: int, is_local: bool) -> TransferTimes:
        """Return the seconds of `num_bytes` and the latency of a message, between hosts and inside a host.

        With `is_local` the transfer stays inside a host, so that the fields for transfers between hosts have the
        times inside a host too. Packing is not included.
        """
        intra_host_s = num_bytes / self.local_bytes_per_s
        if is_local:
            return TransferTimes(intra_host_s, intra_host_s, self.local_latency_s, self.local_latency_s)
        return TransferTimes(
            self.nic_transfer_s(num_bytes), intra_host_s, self.nic_latency_s, self.local_latency_s
        )


def _message_bytes_per_s(axis: NetworkAxis) -> int:
    return max(int(min(axis.comm("send_recv").bytes_per_s, axis.link_bytes_per_s)), 1)


def _message_latency_s(axis: NetworkAxis) -> float:
    constants = axis.comm("send_recv")
    return constants.launch_s + constants.sync_s
