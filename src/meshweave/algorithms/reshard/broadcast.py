"""Broadcast as a pipelined chain: one copy crosses to each host, whose ranks pass it on among themselves.

The sender sends to the first rank of the first host, its gateway. A gateway sends on to the gateway of the next
host and to its neighbour in its own host. Each of them sends a chunk on as soon as it has it. AlpaComm (MLSys '23,
section 3.1) has one chain through all ranks. A chain from gateway to gateway puts the same copies on each link,
and the chunks between hosts do not wait for those inside a host.

Successive hops use two lanes alternately, so that a rank receives a chunk while it sends the one before.
"""

from __future__ import annotations

import math
from itertools import pairwise

from meshweave.algorithms.reshard.multicast import HostHop, Multicast, MulticastCost, Strategy
from meshweave.algorithms.reshard.tasks import num_messages, packing_s
from meshweave.algorithms.reshard.writer import (
    INTER_HOST_LANES,
    INTRA_HOST_LANES,
    LEAD_BYTES,
    MessageSink,
)
from meshweave.cost.fabric import HostTopology

MAX_CHUNKS = 128
MIN_CHUNK_BYTES = 1 << 16
"""Smaller messages cost more than the shorter pipeline wins (measured over gloo: 16 KB chunks, 6 %)."""


class ChainBroadcast(Strategy):
    """A pipelined chain from host to host, and another inside each host.

    The sender sends chunks to one rank of the first host, its gateway, which passes each on to the gateway of the
    next host and to the next rank of its own host.
    """

    name = "broadcast"

    def num_chunks(self, multicast: Multicast, network: HostTopology) -> int:
        """Return the number of chunks K for which the chain takes the least time; 1 for a single receiver.

        With A receiving hosts and t seconds for all bytes over a NIC, (K + A - 1) (t / K + latency) is least at
        K = sqrt((A - 1) t / latency); the chains inside hosts count likewise. K is at most `MAX_CHUNKS`, and
        chunks have at least `MIN_CHUNK_BYTES`. If messages have no latency, K is as large as these limits allow.
        """
        times = network.transfer_times(multicast.num_bytes, multicast.is_local)
        longest_host = max(map(len, multicast.hosts))
        fill_s = (len(multicast.hosts) - 1) * times.inter_host_s + (longest_host - 1) * times.intra_host_s
        most = max(min(MAX_CHUNKS, multicast.num_bytes // MIN_CHUNK_BYTES), 1)
        if len(multicast.receivers) == 1:
            return 1
        strided = max(sum(piece.is_strided) for piece in multicast.pieces)
        latency_s = times.inter_host_latency_s + strided * network.pack_launch_s
        if latency_s <= 0:
            return most
        return max(min(round(math.sqrt(fill_s / latency_s)), most), 1)

    def cost(self, multicast: Multicast, network: HostTopology, chunks: int) -> MulticastCost:
        """Return the seconds for which the chain occupies NICs, and the seconds until the last rank has all.

        `occupied_s` is the longer of two times: of all bytes through a NIC, and of all bytes over a link inside a
        host (if a receiving host has several ranks). Both include the latency and packing of each message.
        `fill_s` is the time of one chunk for each further hop between hosts and inside the host with most ranks.

        Args:
            chunks: number of messages into which the bytes are cut.
        """
        times = network.transfer_times(multicast.num_bytes, multicast.is_local)
        hosts, longest_host = len(multicast.hosts), max(map(len, multicast.hosts))
        count = num_messages(multicast.pieces, chunks)
        from_source_s, at_target_s = packing_s(multicast.pieces, chunks, network)
        first_s, later_s = (
            from_source_s + at_target_s,
            2 * at_target_s,
        )  # of a first hop; of the next
        inter_host_s = times.inter_host_s + count * times.inter_host_latency_s
        intra_host_s = times.intra_host_s + count * times.intra_host_latency_s
        inter_host_s += max(first_s, later_s) if hosts > 1 else first_s
        intra_host_s += max(first_s, later_s) if multicast.is_local else later_s
        fill_s = (hosts - 1) * inter_host_s / count + (longest_host - 1) * intra_host_s / count
        return MulticastCost(max(inter_host_s, intra_host_s if longest_host > 1 else 0.0), fill_s)

    def host_hops(self, multicast: Multicast) -> tuple[HostHop, ...]:
        """Return the hops from the sender to the first gateway and from gateway to gateway, in order.

        The result is () for a multicast inside one host.
        """
        if multicast.is_local:
            return ()
        upstream = (multicast.senders[0], *(host[0] for host in multicast.hosts))
        return tuple(
            HostHop(before, host[0], INTER_HOST_LANES[position % 2])
            for position, (before, host) in enumerate(zip(upstream, multicast.hosts, strict=False))
        )

    def write(self, sink: MessageSink, multicast: Multicast, chunks: int) -> None:
        """Write the messages to `sink`, chunk by chunk along the chains.

        `multicast.senders` must be one rank, and the bytes are cut into about `chunks` chunks.
        """
        (sender,) = multicast.senders
        hops = [(hop.upstream, hop.gateway, hop.lane) for hop in self.host_hops(multicast)]
        for host in multicast.hosts:
            chain = (sender, *host) if multicast.is_local else host
            hops += [(src, dst, INTRA_HOST_LANES[n % 2]) for n, (src, dst) in enumerate(pairwise(chain))]
        for chunk in sink.chunks(multicast.pieces, chunks, LEAD_BYTES):
            for src, dst, lane in hops:
                sink.message(chunk, src, dst, lane, from_source=src == sender)
