"""Scatter and gather: each rank is sent a part, and the ranks gather the rest from one another.

Local: every host is sent one copy, and gathers inside. Global: all receivers are sent one copy together and
gather in one ring, host by host; what systems do that have the ranks of the destination mesh all-gather
(Alpa, Megatron-LM). The ring is one of messages: in step t the rank at place p passes on the part of place
p - t, and parts may be uneven.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from meshweave.algorithms.reshard.fabric import Fabric
from meshweave.algorithms.reshard.multicast import Cost, Crossing, Multicast, Rates
from meshweave.algorithms.reshard.tasks import Piece, in_chunks
from meshweave.algorithms.reshard.writer import FAR, GATHER, NEAR, Messages


class GlobalAllGather:
    name = "global_all_gather"
    one_gateway = False

    def picks_sender(self, cast: Multicast) -> bool:
        return len(cast.hosts) == 1  # which cannot take in more than one sends

    def parts(self, whole: Multicast) -> Iterator[Multicast]:
        yield whole

    def num_chunks(self, cast: Multicast, fabric: Fabric) -> int:
        return 1

    def cost(self, cast: Multicast, fabric: Fabric, chunks: int) -> Cost:
        rates = Rates.of(cast, fabric)
        count = len(cast.receivers)
        across = len(cast.hosts) > 1
        nics = len(dict.fromkeys(map(fabric.nic, cast.senders)))
        scatter_s = rates.far_s / min(nics, len(cast.hosts)) + rates.far_latency_s
        part_s = (rates.far_s if across else rates.near_s) / count
        gather_s = (count - 1) * (part_s + (rates.far_latency_s if across else rates.near_latency_s))
        return Cost(scatter_s + gather_s) if across else Cost(scatter_s, gather_s)

    def crossings(self, cast: Multicast) -> tuple[Crossing, ...]:
        if cast.is_local:
            return ()
        ranks, last = cast.receivers, [host[-1] for host in cast.hosts]
        return tuple(
            Crossing(_sender(cast, ranks.index(gateway), len(ranks)), gateway, FAR[0]) for gateway in last
        )

    def write(self, writer: Messages, cast: Multicast, chunks: int) -> None:
        lane = (NEAR if cast.is_local else FAR)[0]
        ranks = cast.receivers
        for piece in in_chunks(cast.pieces, chunks):
            if len(ranks) == 1 or not piece.shape:
                for number, rank in enumerate(ranks):
                    writer.message(piece, _sender(cast, number, len(ranks)), rank, lane, from_source=True)
                continue
            count, dim = len(ranks), _gather_dim(piece, len(ranks))
            bounds = [piece.shape[dim] * number // count for number in range(count + 1)]
            parts = [_part(piece, dim, lo, hi) for lo, hi in pairwise(bounds)]
            for number, (rank, part) in enumerate(zip(ranks, parts, strict=True)):
                if part.num_bytes:
                    writer.message(part, _sender(cast, number, count), rank, lane, from_source=True)
            if len(cast.hosts) > 1:  # what came first would take NICs from what is still to come
                for place, rank in enumerate(ranks[:-1]):
                    writer.wait(ranks[-1], rank, _ring_lane(place, count))
            for step in range(count - 1):
                for place, rank in enumerate(ranks):
                    part = parts[(place - step) % count]
                    if part.num_bytes:
                        to, ring = ranks[(place + 1) % count], _ring_lane(place, count)
                        writer.message(part, rank, to, ring, from_source=False, tells=len(cast.hosts) > 1)


class LocalAllGather(GlobalAllGather):
    name = "local_all_gather"

    def parts(self, whole: Multicast) -> Iterator[Multicast]:
        for host in whole.hosts:
            yield replace(whole, hosts=(host,))


def _gather_dim(piece: Piece, count: int) -> int:
    """The first dim that has a part for everybody, else the longest."""
    dims = range(len(piece.shape))
    return next(
        (dim for dim in dims if piece.shape[dim] >= count), max(dims, key=lambda d: piece.shape[d], default=0)
    )


def _ring_lane(place: int, count: int) -> str:
    """In which a place of the ring sends: another one than it receives in, also where the ring is odd."""
    return GATHER[2 if count % 2 and place == count - 1 else place % 2]


def _sender(cast: Multicast, number: int, count: int) -> int:
    """Who sends its part to receiver `number` of `count`: senders take equal runs of receivers."""
    return cast.senders[number * len(cast.senders) // count]


def _part(piece: Piece, dim: int, lo: int, hi: int) -> Piece:
    start = tuple(lo if at == dim else 0 for at in range(len(piece.shape)))
    return piece.part(start, tuple(hi - lo if at == dim else n for at, n in enumerate(piece.shape)))
