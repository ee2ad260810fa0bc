"""The table of multicast strategies; `multicast` compares the time that each of them takes."""

from __future__ import annotations

from collections.abc import Iterable

from meshweave.algorithms.reshard.broadcast import ChainBroadcast
from meshweave.algorithms.reshard.gather import GlobalAllGather, LocalAllGather
from meshweave.algorithms.reshard.multicast import Strategy
from meshweave.algorithms.reshard.send_recv import SendRecv
from meshweave.base.errors import UnsupportedError, require_known

STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy
    for strategy in (ChainBroadcast(), SendRecv(), LocalAllGather(), GlobalAllGather())
}


def check_known(name: str, table: Iterable[str], what: str) -> str:
    """Return `name` if the table of strategies or orders has it.

    Args:
        table: the names that are known.
        what: what the error message calls a name: "strategy" or "order".

    Raises:
        UnsupportedError: the table has no such name; the message lists the names that it has.
    """
    names = list(table)
    require_known(name, names, f"there is no {what}", UnsupportedError, "known:")
    return name
