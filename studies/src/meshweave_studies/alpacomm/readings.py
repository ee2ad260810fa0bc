"""Readings of the AlpaComm paper: what a message costs besides its bytes, and how the rivals divide a tensor.

Constants and rivals were committed before a row was computed with them. All strategies of a reading run on the
same machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshweave_studies.published import NamedReading, by_name

Rivals = Literal["planned", "public"]
"""Where send/recv and the all-gather come from: our planner, or Alpa's public code (`alpacomm.alpa`)."""

BANDWIDTH = "bandwidth"
RIVAL_ROWS = (
    *("send_recv_linear", "flat_in_host", "gather_over_hosts", "gather_two_t", "uneven_drop"),
    *("nvlink", "similar", "gather_crosses", "reordered", "more_in_case4"),
)
"""The rows with a rival of figures 5 and 6."""


@dataclass(frozen=True)
class AlpaCommReading(NamedReading):
    """A choice for what the paper leaves open.

    Attributes:
        cluster: catalog name of the hosts.
        rivals: where the rivals come from.
    """

    cluster: str = "p3.8xlarge"
    rivals: Rivals = "planned"

    def covers(self, row: str) -> bool:
        """Return whether the reading says anything about a row of the paper."""
        return not self.rows or row in self.rows


READINGS: dict[str, AlpaCommReading] = by_name(
    AlpaCommReading(
        BANDWIDTH,
        "a message costs its bytes alone; rivals take uneven parts, and their senders are balanced",
    ),
    AlpaCommReading(
        "messages",
        "as bandwidth, with launch and latency of each message (NCCL's model) and with packing of strided "
        "tiles at half the memory's bandwidth",
        "p3.8xlarge-messages",
    ),
    AlpaCommReading(
        "alpa",
        "as bandwidth, with send/recv and all-gather as Alpa's public code divides, balances and orders them: "
        "no uneven parts",
        rivals="public",
        rows=RIVAL_ROWS,
    ),
    AlpaCommReading(
        "alpa-messages", "messages and alpa together", "p3.8xlarge-messages", "public", rows=RIVAL_ROWS
    ),
)
"""By name, the default first."""
