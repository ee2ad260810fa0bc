"""From a description to namespaces, cables, bridges and routes. Pure: nothing is built here.

Everything of a lab, its bridges too, lives in namespaces of its own. So any number of labs may use the same
addresses, and the namespace of the machine itself is never changed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from meshweave_lab.description import LabDescription, Link, SwitchLab, TorusLab, TreeLab

FABRIC = "fabric"
"""The namespace that holds the bridges and, on the management network, the store."""
STORE_ADDRESS = "10.2.255.1"
MANAGEMENT = "mgmt0"


@dataclass(frozen=True)
class Host:
    """A network namespace in which ranks run.

    Attributes:
        name: of the namespace, without the prefix of its lab.
        address: the IPv4 address on the shaped links.
        management_address: the one on the unshaped network of rendezvous and heartbeats.
        interface: the network interface that gloo is bound to.
        ranks: global ranks.
    """

    name: str
    address: str
    management_address: str
    interface: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Port:
    """One end of a cable: an interface in namespace `space`, in `bridge` of the fabric where that is given."""

    space: str
    interface: str
    address: str = ""  # with its prefix length
    bridge: str = ""


@dataclass(frozen=True)
class Cable:
    """A veth pair between two ports.

    Attributes:
        link: the rates from `a` to `b` and back; None: not shaped.
    """

    a: Port
    b: Port
    link: Link | None = None

    def ends(self) -> Iterator[tuple[Port, int]]:
        """Yield each end with the bytes per second at which it sends; 0 where the cable is not shaped."""
        yield self.a, self.link.bytes_per_s if self.link else 0
        yield self.b, self.link.back_bytes_per_s if self.link else 0


@dataclass(frozen=True)
class Route:
    """A route in namespace `space`: packets to `address` go to the neighbour `via`."""

    space: str
    address: str
    via: str
    interface: str


@dataclass
class Wiring:
    """All that is to be built for a lab; `forwards`: hosts pass on packets for others, as in a torus."""

    hosts: list[Host] = field(default_factory=list)
    cables: list[Cable] = field(default_factory=list)
    bridges: list[str] = field(default_factory=list)
    routes: list[Route] = field(default_factory=list)
    forwards: bool = False

    @property
    def spaces(self) -> list[str]:
        """The names of all namespaces, the fabric first."""
        return [FABRIC, *(host.name for host in self.hosts)]

    def host_of(self, rank: int) -> Host:
        """Return the host that a rank runs on."""
        return next(host for host in self.hosts if rank in host.ranks)


def wire(lab: LabDescription) -> Wiring:
    """Return what is to be built for `lab`."""
    wiring = Wiring()
    match lab.network:
        case SwitchLab() as network:
            _switch(wiring, network)
        case TorusLab() as network:
            _torus(wiring, network)
        case TreeLab() as network:
            _tree(wiring, network)
    wiring.bridges.append("mgmt")
    for number, host in enumerate(wiring.hosts):
        end = Port(host.name, MANAGEMENT, f"{host.management_address}/16")
        wiring.cables.append(Cable(end, Port(FABRIC, f"m{number}", bridge="mgmt")))
    return wiring


def _address(network: int, host: int) -> str:
    """Return an IPv4 address; hosts count from 10.<network>.0.1."""
    return f"10.{network}.{(host + 1) >> 8}.{(host + 1) & 255}"


def _host(number: int, interface: str, ranks: tuple[int, ...]) -> Host:
    return Host(f"h{number}", _address(1, number), _address(2, number), interface, ranks)


def _switch(wiring: Wiring, network: SwitchLab) -> None:
    wiring.bridges.append("switch")
    per_host = network.ranks_per_host
    for number in range(network.hosts):
        ranks = tuple(range(number * per_host, (number + 1) * per_host))
        _plug(wiring, _host(number, "eth0", ranks), "switch", network.nic)


def _plug(wiring: Wiring, host: Host, bridge: str, nic: Link) -> None:
    wiring.hosts.append(host)
    port = Port(FABRIC, f"p{host.ranks[0]}", bridge=bridge)
    wiring.cables.append(Cable(Port(host.name, "eth0", f"{host.address}/16"), port, nic))


def _tree(wiring: Wiring, network: TreeLab) -> None:
    wiring.bridges.append("root")
    for group in range(network.groups):
        leaf = f"leaf{group}"
        wiring.bridges.append(leaf)
        up, down = Port(FABRIC, f"up{group}", bridge=leaf), Port(FABRIC, f"down{group}", bridge="root")
        wiring.cables.append(Cable(up, down, network.root))
        for number in range(group * network.hosts_per_group, (group + 1) * network.hosts_per_group):
            _plug(wiring, _host(number, "eth0", (number,)), leaf, network.nic)
        if network.direct is not None:
            _join_directly(wiring, wiring.hosts[-network.hosts_per_group :], network.direct)


def _join_directly(wiring: Wiring, hosts: list[Host], link: Link) -> None:
    """Give any two of these hosts a cable, and each a route over it to the other."""
    for host, other in itertools.combinations(hosts, 2):
        ends = [
            Port(here.name, f"direct{there.ranks[0]}", f"{here.address}/32")
            for here, there in ((host, other), (other, host))
        ]
        wiring.cables.append(Cable(ends[0], ends[1], link))
        wiring.routes.append(Route(host.name, other.address, other.address, ends[0].interface))
        wiring.routes.append(Route(other.name, host.address, host.address, ends[1].interface))


def _torus(wiring: Wiring, network: TorusLab) -> None:
    shape, names = network.shape, network.axis_names
    wiring.forwards = True
    for rank in range(network.num_ranks):
        interface = next(f"{name}+" for name, size in zip(names, shape, strict=True) if size > 1)
        wiring.hosts.append(_host(rank, interface, (rank,)))
    for rank in range(network.num_ranks):
        for axis, size in enumerate(shape):
            at = _unravel(rank, shape)[axis]
            if size == 1 or (size == 2 and at == 1):
                continue  # an axis of 2 has one link, and both ends send "forward" on it
            ahead = _neighbour(rank, axis, 1, shape)
            here = Port(f"h{rank}", f"{names[axis]}+", f"{_address(1, rank)}/32")
            sign = "+" if size == 2 else "-"
            there = Port(f"h{ahead}", f"{names[axis]}{sign}", f"{_address(1, ahead)}/32")
            wiring.cables.append(Cable(here, there, network.links[axis]))
        for to in range(network.num_ranks):
            if to != rank:
                axis, step = _first_hop(rank, to, shape)
                via = _address(1, _neighbour(rank, axis, step, shape))
                interface = f"{names[axis]}{'+' if step == 1 else '-'}"
                wiring.routes.append(Route(f"h{rank}", _address(1, to), via, interface))


def _first_hop(rank: int, to: int, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return axis and direction of the first hop, as `cost.machine` routes: dimension by dimension, ties
    forward.
    """
    at, goal = _unravel(rank, shape), _unravel(to, shape)
    for axis, size in enumerate(shape):
        ahead = (goal[axis] - at[axis]) % size
        if ahead:
            return axis, 1 if ahead <= size - ahead else -1
    raise AssertionError((rank, to))


def _unravel(rank: int, shape: tuple[int, ...]) -> list[int]:
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return [rank // stride % size for stride, size in zip(strides, shape, strict=True)]


def _neighbour(rank: int, axis: int, step: int, shape: tuple[int, ...]) -> int:
    stride = math.prod(shape[axis + 1 :])
    at = rank // stride % shape[axis]
    return rank + ((at + step) % shape[axis] - at) * stride
