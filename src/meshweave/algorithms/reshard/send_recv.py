"""Every rank is sent a copy of its own, one after the other: what frameworks do that know only point to
point."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshweave.algorithms.reshard.fabric import Fabric
from meshweave.algorithms.reshard.multicast import Cost, Crossing, Multicast, Rates
from meshweave.algorithms.reshard.tasks import in_chunks, num_messages, with_tail
from meshweave.algorithms.reshard.writer import FAR, LEAD_BYTES, NEAR, Messages


class SendRecv:
    name = "send_recv"
    one_gateway = True

    def picks_sender(self, cast: Multicast) -> bool:
        return True

    def parts(self, whole: Multicast) -> Iterator[Multicast]:
        for rank in whole.receivers:
            yield replace(whole, hosts=((rank,),))

    def num_chunks(self, cast: Multicast, fabric: Fabric) -> int:
        return 1

    def cost(self, cast: Multicast, fabric: Fabric, chunks: int) -> Cost:
        rates = Rates.of(cast, fabric)
        return Cost(rates.far_s + num_messages(cast.pieces, chunks) * rates.far_latency_s)

    def crossings(self, cast: Multicast) -> tuple[Crossing, ...]:
        return () if cast.is_local else (Crossing(cast.senders[0], cast.hosts[0][0], FAR[0]),)

    def write(self, writer: Messages, cast: Multicast, chunks: int) -> None:
        (sender,), ((receiver,),) = cast.senders, cast.hosts
        for piece in with_tail(in_chunks(cast.pieces, chunks), LEAD_BYTES):
            writer.message(piece, sender, receiver, (NEAR if cast.is_local else FAR)[0], from_source=True)
