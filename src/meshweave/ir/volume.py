"""The FLOPs and bytes of an irregular program, per rank and phase: the input of a closed-form estimate."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class RankVolume:
    """The FLOPs, launches, messages and bytes of one rank in one phase.

    Attributes:
        flops: FLOPs of all products.
        num_products: number of products launched.
        received_bytes, sent_bytes: exchanged with other ranks.
        num_messages: messages of the rank, each of which has a latency.
        local_bytes: bytes added in the rank's memory, by any rank.
    """

    flops: int = 0
    num_products: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0
    num_messages: int = 0
    local_bytes: int = 0

    @property
    def busier_direction_bytes(self) -> int:
        """Return the larger of the bytes received and sent: the load of the busier direction of the link."""
        return max(self.received_bytes, self.sent_bytes)


PhaseVolume = dict[int, RankVolume]


@dataclass
class Volume:
    """The work of every rank of a universal product C = A B in three phases, each a `RankVolume` by global rank.

    `before` reduces operands that arrive as partial sums. `during` multiplies and overlaps communication with
    products. `after` reduces the replicas of C. Communication of the first and last phase is exposed.
    """

    before: PhaseVolume = field(default_factory=dict)
    during: PhaseVolume = field(default_factory=dict)
    after: PhaseVolume = field(default_factory=dict)

    @property
    def phases(self) -> tuple[PhaseVolume, PhaseVolume, PhaseVolume]:
        """Return (`before`, `during`, `after`)."""
        return self.before, self.during, self.after

    @property
    def total_received_bytes(self) -> int:
        """Return the bytes that all ranks together receive in all three phases."""
        return sum(load.received_bytes for phase in self.phases for load in phase.values())

    @property
    def max_rank_flops(self) -> int:
        """Return the most FLOPs that one rank computes, all of them in `during`."""
        return max(load.flops for load in self.during.values())
