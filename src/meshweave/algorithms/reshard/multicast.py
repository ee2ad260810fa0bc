"""A multicast: a unit task, or a part of one, on its way from a sender to the hosts that need it.

With t its bytes over the rate of a NIC, A receiving hosts and B ranks on each, a strategy takes (AlpaComm,
MLSys '23, section 3.1)

    send_recv           every rank is sent a copy of its own                            A B t
    local_all_gather    every host is sent one copy in B parts, gathered inside it      A t
    global_all_gather   every rank is sent a part of its own, all gather                t + t (1 - 1 / (A B))
    broadcast           a chain from host to host, in K chunks; in each host another    t (K + A - 1) / K

where the paper has 2 t for the global gather (in whose ring all parts but one cross each link, and no NIC where
there is one host: t then) and t + A t / K for the chain (whose last chunk crosses A - 1 more NICs than one).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from meshweave.algorithms.reshard.fabric import Fabric
from meshweave.algorithms.reshard.tasks import Piece, UnitTask

if TYPE_CHECKING:
    from meshweave.algorithms.reshard.writer import Messages


@dataclass(frozen=True)
class Multicast:
    """`pieces` go from `senders`, any of which has them, to the ranks in `hosts`, a tuple for each receiving
    host.

    A local one stays within a host, which sends and receives.
    """

    pieces: tuple[Piece, ...]
    senders: tuple[int, ...]
    hosts: tuple[tuple[int, ...], ...]
    is_local: bool = False

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces)

    @property
    def receivers(self) -> tuple[int, ...]:
        return tuple(rank for host in self.hosts for rank in host)


@dataclass(frozen=True)
class Crossing:
    """A multicast on its way into a host: `upstream` sends to `gateway` in `lane`."""

    upstream: int
    gateway: int
    lane: str


@dataclass(frozen=True)
class Cost:
    """Seconds for which a multicast holds its NICs, and those from then until the last rank has all."""

    held_s: float
    fill_s: float = 0.0


@dataclass(frozen=True)
class Rates:
    """What a multicast meets: seconds its bytes take between hosts (`far_s`) and inside one (`near_s`), and what
    each message costs beside them. Of a local one both are those inside."""

    far_s: float
    near_s: float
    far_latency_s: float
    near_latency_s: float

    @classmethod
    def of(cls, cast: Multicast, fabric: Fabric) -> Rates:
        near_s = cast.num_bytes / fabric.local_bytes_per_s
        if cast.is_local:
            return cls(near_s, near_s, fabric.local_latency_s, fabric.local_latency_s)
        far_s = cast.num_bytes / fabric.nic_bytes_per_s
        return cls(far_s, near_s, fabric.nic_latency_s, fabric.local_latency_s)


class Strategy(Protocol):
    """How a multicast is done; each in a file of its own, all in one table (`strategies`)."""

    name: str
    one_gateway: bool
    """Whether one rank of each host takes in what the host gets; else all do, by all of its NICs."""

    def picks_sender(self, cast: Multicast) -> bool:
        """Whether one of the senders is chosen; else all take part."""
        ...

    def parts(self, whole: Multicast) -> Iterator[Multicast]:
        """The multicasts that are ordered on their own."""
        ...

    def num_chunks(self, cast: Multicast, fabric: Fabric) -> int:
        """In how many messages the bytes should cross each link."""
        ...

    def cost(self, cast: Multicast, fabric: Fabric, chunks: int) -> Cost:
        """By the formulas above, and the latency of each message that follows another."""
        ...

    def crossings(self, cast: Multicast) -> tuple[Crossing, ...]:
        """Into each host, the first one's first; a gateway is the rank that knows when its host has all."""
        ...

    def write(self, writer: Messages, cast: Multicast, chunks: int) -> None:
        """Appends the messages, each of a `chunks`-th of the bytes at most. Where one sender is chosen, it is
        the only one there; gateways come first in hosts."""
        ...


def multicasts(task: UnitTask, fabric: Fabric, strategy: Strategy) -> Iterator[Multicast]:
    """What is to be sent for a task: inside each host that holds it already, and to the others."""
    holding: dict[int, list[int]] = {}
    for rank in task.holders:
        holding.setdefault(fabric.host_of[rank], []).append(rank)
    local: dict[int, list[int]] = {}
    remote: dict[int, list[int]] = {}
    held = frozenset(task.holders)
    for rank in task.needers:
        if rank not in held:
            host = fabric.host_of[rank]
            (local if host in holding else remote).setdefault(host, []).append(rank)
    for host, ranks in local.items():
        yield from strategy.parts(Multicast(task.pieces, tuple(holding[host]), (tuple(ranks),), True))
    if remote:
        yield from strategy.parts(Multicast(task.pieces, task.holders, tuple(map(tuple, remote.values()))))
