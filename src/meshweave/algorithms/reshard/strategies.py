"""The table of strategies; what each of them takes is compared in `multicast`."""

from __future__ import annotations

from collections.abc import Iterable

from meshweave.algorithms.reshard.broadcast import Broadcast
from meshweave.algorithms.reshard.gather import GlobalAllGather, LocalAllGather
from meshweave.algorithms.reshard.multicast import Strategy
from meshweave.algorithms.reshard.send_recv import SendRecv
from meshweave.base.errors import UnsupportedError, nearest

STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy for strategy in (Broadcast(), SendRecv(), LocalAllGather(), GlobalAllGather())
}


def known(name: str, table: Iterable[str], what: str) -> str:
    """The name, if the table of strategies or orders has it. Raises UnsupportedError."""
    names = list(table)
    if name not in names:
        raise UnsupportedError(
            f"there is no {what} '{name}'{nearest(name, names)}; known: {', '.join(names)}"
        )
    return name
