"""Broadcast as a pipelined chain: one copy crosses to each host, where the ranks pass it on among themselves.

The sender sends to the first rank of the first host, its gateway, which sends on to the gateway of the next
host and to its neighbour in its own host. All of them send a chunk on as soon as they have it. (AlpaComm,
MLSys '23, section 3.1, has one chain through all ranks; one from gateway to gateway has the same copies on
each link, and the chunks of the far chain do not wait for those of the near ones.)

Hops take turns between two lanes, so that a rank gets a chunk while it sends the one before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

from meshweave.algorithms.reshard.fabric import Fabric
from meshweave.algorithms.reshard.multicast import Cost, Crossing, Multicast, Rates
from meshweave.algorithms.reshard.tasks import in_chunks, num_messages, with_tail
from meshweave.algorithms.reshard.writer import FAR, LEAD_BYTES, NEAR, Messages

MOST_CHUNKS = 128
LEAST_CHUNK_BYTES = 1 << 16
"""Smaller messages cost more than the shorter pipeline wins (measured over gloo: 16 KB chunks, 6 %)."""


class Broadcast:
    name = "broadcast"
    one_gateway = True

    def picks_sender(self, cast: Multicast) -> bool:
        return True

    def parts(self, whole: Multicast) -> Iterator[Multicast]:
        yield whole

    def num_chunks(self, cast: Multicast, fabric: Fabric) -> int:
        """(K + A - 1) (t / K + latency) is least at K = sqrt((A - 1) t / latency), so with the chains inside
        hosts; as many as there may be where a message costs nothing."""
        rates = Rates.of(cast, fabric)
        fill_s = (len(cast.hosts) - 1) * rates.far_s + (max(map(len, cast.hosts)) - 1) * rates.near_s
        most = max(min(MOST_CHUNKS, cast.num_bytes // LEAST_CHUNK_BYTES), 1)
        if len(cast.receivers) == 1:
            return 1
        if rates.far_latency_s <= 0:
            return most
        return max(min(round(math.sqrt(fill_s / rates.far_latency_s)), most), 1)

    def cost(self, cast: Multicast, fabric: Fabric, chunks: int) -> Cost:
        rates = Rates.of(cast, fabric)
        hosts, ranks = len(cast.hosts), max(map(len, cast.hosts))
        count = num_messages(cast.pieces, chunks)
        far_s, near_s = rates.far_s + count * rates.far_latency_s, rates.near_s + count * rates.near_latency_s
        fill_s = (hosts - 1) * far_s / count + (ranks - 1) * near_s / count
        return Cost(max(far_s, near_s if ranks > 1 else 0.0), fill_s)

    def crossings(self, cast: Multicast) -> tuple[Crossing, ...]:
        if cast.is_local:
            return ()
        upstream = (cast.senders[0], *(host[0] for host in cast.hosts))
        return tuple(
            Crossing(before, host[0], FAR[place % 2])
            for place, (before, host) in enumerate(zip(upstream, cast.hosts, strict=False))
        )

    def write(self, writer: Messages, cast: Multicast, chunks: int) -> None:
        (sender,) = cast.senders
        hops = [(hop.upstream, hop.gateway, hop.lane) for hop in self.crossings(cast)]
        for host in cast.hosts:
            chain = (sender, *host) if cast.is_local else host
            hops += [(a, b, NEAR[n % 2]) for n, (a, b) in enumerate(pairwise(chain))]
        for chunk in with_tail(in_chunks(cast.pieces, chunks), LEAD_BYTES):
            for src, dst, lane in hops:
                writer.message(chunk, src, dst, lane, from_source=src == sender)
