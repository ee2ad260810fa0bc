"""Where ranks sit, as far as moving tensors between meshes is concerned: hosts, and the NICs between them.

The model is that of AlpaComm (MLSys '23, section 3): fast links inside a host, any two hosts joined at the same
rate, the NIC of a host the bottleneck, sending and receiving apart (full duplex).
"""

from __future__ import annotations

from dataclasses import dataclass

from meshweave.base.errors import LayoutError
from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.machine.links import NetworkAxis
from meshweave.describe.machine.network import Hosts

Nic = tuple[int, int]
"""(host, number of the NIC in its host)."""


@dataclass(frozen=True)
class Fabric:
    """`host_of` and `nic_of` are indexed by global rank. A latency is what each message costs beside its
    bytes."""

    host_of: tuple[int, ...]
    nic_of: tuple[int, ...]
    nic_bytes_per_s: int
    local_bytes_per_s: int
    nic_latency_s: float = 0.0
    local_latency_s: float = 0.0

    def __post_init__(self) -> None:
        if len(self.host_of) != len(self.nic_of):
            raise LayoutError(f"{len(self.host_of)} ranks have a host, {len(self.nic_of)} a NIC")
        if min(self.nic_bytes_per_s, self.local_bytes_per_s) < 1:
            raise LayoutError("the rates of a fabric are at least 1 byte per second")

    @classmethod
    def of(cls, cluster: Cluster, num_ranks: int | None = None) -> Fabric:
        """Of a described cluster, chip r being rank r. Where it has no hosts, every chip is one of its own.

        Raises LayoutError for more ranks than chips.
        """
        network = cluster.network
        count = cluster.num_chips if num_ranks is None else num_ranks
        if count > cluster.num_chips:
            raise LayoutError(f"{count} ranks do not fit the {cluster.num_chips} chips of {cluster.name}")
        if isinstance(network, Hosts):
            per_host, nics = network.chips_per_host, network.nics_per_host
            hosts = tuple(rank // per_host for rank in range(count))
            numbers = tuple(rank % per_host % nics for rank in range(count))
            nic, local = network.nic, network.intra
        else:
            hosts, numbers = tuple(range(count)), (0,) * count
            nic = local = network.axis(0, 1)
        return cls(hosts, numbers, _rate(nic), _rate(local), _latency_s(nic), _latency_s(local))

    def nic(self, rank: int) -> Nic:
        return self.host_of[rank], self.nic_of[rank]


def _rate(axis: NetworkAxis) -> int:
    return max(int(min(axis.comm("send_recv").bytes_per_s, axis.link_bytes_per_s)), 1)


def _latency_s(axis: NetworkAxis) -> float:
    constants = axis.comm("send_recv")
    return constants.launch_s + constants.sync_s
