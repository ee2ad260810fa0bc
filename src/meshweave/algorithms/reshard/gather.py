"""Scatter and gather: each rank is sent a part, and the ranks gather the rest from one another.

Local: every host is sent one copy, and its ranks gather inside the host. Global: all receivers together are
sent one copy and gather in one ring, host by host. The latter is what systems do that let the ranks of the
destination mesh all-gather (Alpa, Megatron-LM). The ring is one of messages: in step t the rank at position p
passes on the part of position p - t. Parts may be uneven.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from meshweave.algorithms.reshard.multicast import HostHop, Multicast, MulticastCost, Strategy
from meshweave.algorithms.reshard.tasks import TensorPiece, packing_s
from meshweave.algorithms.reshard.writer import (
    INTER_HOST_LANES,
    INTRA_HOST_LANES,
    RING_LANES,
    MessageSink,
)
from meshweave.cost.fabric import HostTopology


class GlobalAllGather(Strategy):
    """A scatter, which sends each receiver a part, and an all-gather in one ring through all receivers.

    The ring goes host by host.
    """

    name = "global_all_gather"
    one_gateway = False

    def uses_one_sender(self, multicast: Multicast) -> bool:
        """Return whether there is a single receiving host, which receives no faster than one sender sends."""
        return len(multicast.hosts) == 1

    def cost(self, multicast: Multicast, network: HostTopology, chunks: int) -> MulticastCost:
        """Return the seconds of the scatter and of the ring, with latency and packing of their messages.

        The scatter is `occupied_s`. The ring is added to it if it crosses hosts; inside one host it occupies no
        NIC and is `fill_s`.

        Args:
            chunks: number of chunks that are scattered and gathered in turn; only packing depends on it.
        """
        times = network.transfer_times(multicast.num_bytes, multicast.is_local)
        count = len(multicast.receivers)
        across_hosts = len(multicast.hosts) > 1
        nics = len(dict.fromkeys(map(network.nic, multicast.senders)))
        scatter_s = times.inter_host_s / min(nics, len(multicast.hosts)) + times.inter_host_latency_s
        part_s = (times.inter_host_s if across_hosts else times.intra_host_s) / count
        latency_s = times.inter_host_latency_s if across_hosts else times.intra_host_latency_s
        from_source_s, at_target_s = packing_s(multicast.pieces, chunks * count, network)
        senders = 1 if self.uses_one_sender(multicast) else min(nics, count)
        scatter_s += (from_source_s + at_target_s) / senders
        gather_s = (count - 1) * (part_s + latency_s + 2 * at_target_s / count)
        return MulticastCost(scatter_s + gather_s) if across_hosts else MulticastCost(scatter_s, gather_s)

    def host_hops(self, multicast: Multicast) -> tuple[HostHop, ...]:
        """Return for each host the hop from a sender to the host's last rank in the ring, its gateway here.

        The last rank gets its part last. The result is () for a multicast inside one host.
        """
        if multicast.is_local:
            return ()
        ranks, gateways = multicast.receivers, [host[-1] for host in multicast.hosts]
        return tuple(
            HostHop(_sender(multicast, ranks.index(gateway), len(ranks)), gateway, INTER_HOST_LANES[0])
            for gateway in gateways
        )

    def write(self, sink: MessageSink, multicast: Multicast, chunks: int) -> None:
        """Write to `sink`, for each of about `chunks` chunks, the messages of the scatter and of the ring."""
        lane = (INTRA_HOST_LANES if multicast.is_local else INTER_HOST_LANES)[0]
        ranks = multicast.receivers
        count = len(ranks)
        for piece in sink.chunks(multicast.pieces, chunks):
            if count == 1 or not piece.shape:
                for number, rank in enumerate(ranks):
                    sink.message(piece, _sender(multicast, number, count), rank, lane, from_source=True)
                continue
            dim = _gather_dim(piece, count)
            bounds = [piece.shape[dim] * number // count for number in range(count + 1)]
            parts = [_part(piece, dim, lo, hi) for lo, hi in pairwise(bounds)]
            for number, (rank, part) in enumerate(zip(ranks, parts, strict=True)):
                if part.num_bytes:
                    sink.message(part, _sender(multicast, number, count), rank, lane, from_source=True)
            _write_ring(sink, ranks, parts, across_hosts=len(multicast.hosts) > 1)


def _write_ring(
    sink: MessageSink, ranks: tuple[int, ...], parts: list[TensorPiece], across_hosts: bool
) -> None:
    count = len(ranks)
    if across_hosts:  # parts that are here early would take NICs from those that are still to come
        for position, rank in enumerate(ranks[:-1]):
            sink.wait_for_receiver(ranks[-1], rank, _ring_lane(position, count))
    for step in range(count - 1):
        for position, rank in enumerate(ranks):
            part = parts[(position - step) % count]
            if part.num_bytes:
                successor, lane = ranks[(position + 1) % count], _ring_lane(position, count)
                sink.message(part, rank, successor, lane, from_source=False, signals=across_hosts)


class LocalAllGather(GlobalAllGather):
    """A scatter and an all-gather in a ring for each receiving host on its own."""

    name = "local_all_gather"

    def split(self, multicast: Multicast) -> Iterator[Multicast]:
        """Yield one multicast for each receiving host."""
        for host in multicast.hosts:
            yield replace(multicast, hosts=(host,))


def _gather_dim(piece: TensorPiece, count: int) -> int:
    """Return the first dim that has a part for everybody, else the longest."""
    dims = range(len(piece.shape))
    return next(
        (dim for dim in dims if piece.shape[dim] >= count), max(dims, key=lambda d: piece.shape[d], default=0)
    )


def _ring_lane(position: int, count: int) -> str:
    """Return the lane in which a position of the ring sends.

    No rank sends in the lane in which it receives, also where the ring is odd.
    """
    return RING_LANES[2 if count % 2 and position == count - 1 else position % 2]


def _sender(multicast: Multicast, number: int, count: int) -> int:
    """Return the sender of the part of receiver `number` of `count`; each sender serves an equal run of them."""
    return multicast.senders[number * len(multicast.senders) // count]


def _part(piece: TensorPiece, dim: int, lo: int, hi: int) -> TensorPiece:
    start = tuple(lo if d == dim else 0 for d in range(len(piece.shape)))
    return piece.part(start, tuple(hi - lo if d == dim else size for d, size in enumerate(piece.shape)))
