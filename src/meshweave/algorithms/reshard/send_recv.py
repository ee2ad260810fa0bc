"""Send every rank a copy of its own, one after another: what frameworks do that know only point-to-point."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshweave.algorithms.reshard.multicast import HostHop, Multicast, MulticastCost, Strategy
from meshweave.algorithms.reshard.tasks import num_messages, packing_s
from meshweave.algorithms.reshard.writer import (
    INTER_HOST_LANES,
    INTRA_HOST_LANES,
    LEAD_BYTES,
    MessageSink,
)
from meshweave.cost.fabric import HostTopology


class SendRecv(Strategy):
    """A copy of its own for each receiving rank, in one message or several."""

    name = "send_recv"

    def split(self, multicast: Multicast) -> Iterator[Multicast]:
        """Yield one multicast for each receiving rank."""
        for rank in multicast.receivers:
            yield replace(multicast, hosts=((rank,),))

    def cost(self, multicast: Multicast, network: HostTopology, chunks: int) -> MulticastCost:
        """Return the seconds to send one copy in `chunks` messages, with the latency and packing of each."""
        times = network.transfer_times(multicast.num_bytes, multicast.is_local)
        count = num_messages(multicast.pieces, chunks)
        packed_s = sum(packing_s(multicast.pieces, chunks, network))
        return MulticastCost(times.inter_host_s + count * times.inter_host_latency_s + packed_s)

    def host_hops(self, multicast: Multicast) -> tuple[HostHop, ...]:
        """Return the one hop into the receiver's host, from rank to rank; () if the sender is on that host."""
        if multicast.is_local:
            return ()
        return (HostHop(multicast.senders[0], multicast.hosts[0][0], INTER_HOST_LANES[0]),)

    def write(self, sink: MessageSink, multicast: Multicast, chunks: int) -> None:
        """Write to `sink` about `chunks` messages from the one sender to the one receiver."""
        (sender,), ((receiver,),) = multicast.senders, multicast.hosts
        lane = (INTRA_HOST_LANES if multicast.is_local else INTER_HOST_LANES)[0]
        for piece in sink.chunks(multicast.pieces, chunks, LEAD_BYTES):
            sink.message(piece, sender, receiver, lane, from_source=True)
