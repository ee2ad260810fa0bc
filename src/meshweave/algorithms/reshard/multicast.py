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

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from meshweave.algorithms.reshard.tasks import TensorPiece, UnitTask
from meshweave.cost.fabric import HostTopology

if TYPE_CHECKING:
    from meshweave.algorithms.reshard.writer import MessageSink


@dataclass(frozen=True)
class Multicast:
    """A transfer of the same pieces of tensors to some ranks of some hosts. Ranks are global numbers.

    Attributes:
        pieces: what is sent.
        senders: ranks that have all pieces, and of which one or all send.
        hosts: for each receiving host its ranks that need all pieces.
        is_local: whether all senders and receivers are on one host.
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
        """Return the receiving global ranks, host by host."""
        return tuple(rank for host in self.hosts for rank in host)


@dataclass(frozen=True)
class HostHop:
    """The messages by which a multicast enters a host: from rank `upstream` to rank `gateway` of it, in `lane`.

    A lane is a queue of a rank's ops that run one after another; `lane` is its name.
    """

    upstream: int
    gateway: int
    lane: str


@dataclass(frozen=True)
class MulticastCost:
    """The time of a multicast in seconds.

    Attributes:
        occupied_s: seconds for which it occupies its NICs.
        fill_s: seconds after that until all receivers have all pieces.
    """

    occupied_s: float
    fill_s: float = 0.0


class Strategy(ABC):
    """An algorithm for a multicast, such as a chain or a ring. `strategies.STRATEGIES` lists all.

    Attributes:
        name: its name in `strategies.STRATEGIES`.
        one_gateway: whether each host receives its copy through a single rank, its gateway, and not through all.
    """

    name: ClassVar[str]
    one_gateway: ClassVar[bool] = True

    def uses_one_sender(self, multicast: Multicast) -> bool:
        """Return whether one of the multicast's senders is to send everything; else each of them sends a part.

        This default returns True.
        """
        return True

    def split(self, multicast: Multicast) -> Iterator[Multicast]:
        """Yield the smaller multicasts that together do this one; each is scheduled on its own.

        This default yields the multicast itself: it serves all hosts at once.
        """
        yield multicast

    def num_chunks(self, multicast: Multicast, network: HostTopology) -> int:
        """Return the best number of messages, by this strategy, in which all bytes cross a link.

        This default returns 1, of strategies to which smaller messages gain nothing.
        """
        return 1

    @abstractmethod
    def cost(self, multicast: Multicast, network: HostTopology, chunks: int) -> MulticastCost:
        """Return the seconds of a multicast, with the latency and packing of each message.

        Args:
            chunks: number of messages in which the bytes cross each link.
        """

    @abstractmethod
    def host_hops(self, multicast: Multicast) -> tuple[HostHop, ...]:
        """Return for each receiving host the hop by which the multicast enters it, in the order of hosts.

        The gateway of a hop is the rank that knows when its host has everything. The result is () for a multicast
        inside one host.
        """

    @abstractmethod
    def write(self, sink: MessageSink, multicast: Multicast, chunks: int) -> None:
        """Write the messages of a multicast to `sink`, each of at most 1 / `chunks` of the bytes, or one element.

        If the strategy uses one sender, `multicast.senders` must be that one rank. The gateway of a host must be
        its first rank in `multicast.hosts`.
        """


def multicasts_of(task: UnitTask, network: HostTopology, strategy: Strategy) -> Iterator[Multicast]:
    """Yield the multicasts that do a task, split as `Strategy.split` says.

    Before the split there is one inside each host that has a source and other destinations, and one to all
    destination hosts without a source. Ranks that are sources receive nothing.
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
