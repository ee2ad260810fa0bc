"""A multicast: a unit task, or a part of one, that one or several senders spread to the hosts that need it.

With t its bytes over the rate of a NIC, A receiving hosts and B ranks on each, a strategy takes (AlpaComm,
MLSys '23, section 3.1)

    send_recv           every rank is sent a copy of its own                            A B t
    local_all_gather    every host is sent one copy in B parts, gathered inside it      A t
    global_all_gather   every rank is sent a part of its own, all gather                t + t (1 - 1 / (A B))
    broadcast           a chain from host to host, in K chunks; in each host another    t (K + A - 1) / K

The paper has 2 t for the global gather; in its ring all parts but one cross each link, and no NIC where there is
only one host, which takes t. The paper has t + A t / K for the chain; its last chunk crosses A - 1 more NICs than
one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from meshweave.algorithms.reshard.tasks import TensorPiece, UnitTask
from meshweave.cost.fabric import HostTopology

if TYPE_CHECKING:
    from meshweave.algorithms.reshard.writer import MessageSink


@dataclass(frozen=True)
class Multicast:
    """A transfer of the same pieces to all ranks of some hosts.

    Attributes:
        pieces: what is sent.
        senders: ranks that have all pieces.
        hosts: for each receiving host the ranks that need all pieces.
        is_local: whether senders and receivers are on the same host.
    """

    pieces: tuple[TensorPiece, ...]
    senders: tuple[int, ...]
    hosts: tuple[tuple[int, ...], ...]
    is_local: bool = False

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all pieces, each counted once however many ranks receive it."""
        return sum(piece.num_bytes for piece in self.pieces)

    @property
    def receivers(self) -> tuple[int, ...]:
        """Return the receiving ranks, host by host."""
        return tuple(rank for host in self.hosts for rank in host)


@dataclass(frozen=True)
class HostHop:
    """The messages in `lane` by which a multicast enters a host, from rank `upstream` to its rank `gateway`."""

    upstream: int
    gateway: int
    lane: str


@dataclass(frozen=True)
class MulticastCost:
    """Seconds for which a multicast occupies its NICs, and seconds after that until all ranks have all pieces."""

    occupied_s: float
    fill_s: float = 0.0


class Strategy(Protocol):
    """An algorithm for a multicast, such as a chain or a ring. `strategies.STRATEGIES` lists all."""

    @property
    def name(self) -> str:
        """Return the name in the table."""

    @property
    def one_gateway(self) -> bool:
        """Return whether each host receives its copy through a single rank, not through all of them."""

    def uses_one_sender(self, multicast: Multicast) -> bool:
        """Return whether a single one of the senders is to send everything; else each of them sends a part."""

    def split(self, multicast: Multicast) -> Iterator[Multicast]:
        """Yield the multicasts into which the strategy splits this one; each is scheduled on its own."""

    def num_chunks(self, multicast: Multicast, network: HostTopology) -> int:
        """Return into how many messages to cut the bytes that cross each link."""

    def cost(self, multicast: Multicast, network: HostTopology, chunks: int) -> MulticastCost:
        """Return for how long the multicast occupies NICs, and how long it then takes until all ranks have it.

        Both are in seconds, by the formulas of the module, with the latency and packing of each message.

        Args:
            chunks: number of messages in which the bytes cross each link.
        """

    def host_hops(self, multicast: Multicast) -> tuple[HostHop, ...]:
        """Return for each host the hop by which the multicast enters it, in the order of hosts; () if it is local.

        The gateway of a hop is the rank that knows when its host has everything.
        """

    def write(self, sink: MessageSink, multicast: Multicast, chunks: int) -> None:
        """Append the messages, each of at most a `chunks`-th of the bytes or one element, to `sink`.

        Where one sender is chosen it is the only one in `multicast.senders`. Gateways come first in their
        hosts.
        """


def multicasts_of(task: UnitTask, network: HostTopology, strategy: Strategy) -> Iterator[Multicast]:
    """Yield the multicasts of a task, each split as `strategy` splits it (`Strategy.split`).

    Before the split there is one inside each source host that has other destinations, and one to all destination
    hosts without a source. Ranks that are sources receive nothing.
    """
    sources_on: dict[int, list[int]] = {}
    for rank in task.sources:
        sources_on.setdefault(network.host_of[rank], []).append(rank)
    local: dict[int, list[int]] = {}
    remote: dict[int, list[int]] = {}
    sources = frozenset(task.sources)
    for rank in task.destinations:
        if rank not in sources:
            host = network.host_of[rank]
            (local if host in sources_on else remote).setdefault(host, []).append(rank)
    for host, ranks in local.items():
        yield from strategy.split(Multicast(task.pieces, tuple(sources_on[host]), (tuple(ranks),), True))
    if remote:
        yield from strategy.split(Multicast(task.pieces, task.sources, tuple(map(tuple, remote.values()))))
