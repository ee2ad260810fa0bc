"""The table of multicast strategies; `multicast` compares the time that each of them takes."""

from __future__ import annotations

from meshweave.algorithms.reshard.broadcast import ChainBroadcast
from meshweave.algorithms.reshard.gather import GlobalAllGather, LocalAllGather
from meshweave.algorithms.reshard.multicast import Strategy
from meshweave.algorithms.reshard.send_recv import SendRecv

STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy
    for strategy in (ChainBroadcast(), SendRecv(), LocalAllGather(), GlobalAllGather())
}
