"""What an irregular program computes and moves, per rank and phase: enough for a closed form of its time."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class RankVolume:
    """What one rank computes and moves in one phase.

    Attributes:
        products: number of products launched.
        received_bytes, sent_bytes, messages: what comes in and goes out.
        local_bytes: bytes copied or added in the rank's own memory.
    """

    flops: int = 0
    products: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0
    messages: int = 0
    local_bytes: int = 0

    @property
    def moved_bytes(self) -> int:
        """Return the bytes that its link must carry in the busier direction."""
        return max(self.received_bytes, self.sent_bytes)


PhaseVolume = dict[int, RankVolume]


@dataclass
class Volume:
    """What every rank computes and moves, in three phases.

    `before` sums partial operands up, `during` multiplies, `after` puts copies of C together. In `during`,
    communication hides behind products; before and after there is nothing to hide it behind.
    """

    before: PhaseVolume = field(default_factory=dict)
    during: PhaseVolume = field(default_factory=dict)
    after: PhaseVolume = field(default_factory=dict)

    @property
    def phases(self) -> tuple[PhaseVolume, PhaseVolume, PhaseVolume]:
        """Return the three phases in order."""
        return self.before, self.during, self.after

    @property
    def moved_bytes(self) -> int:
        """Return the logical bytes that all ranks together receive."""
        return sum(load.received_bytes for phase in self.phases for load in phase.values())

    @property
    def flops(self) -> int:
        """Return the most FLOPs that one rank computes."""
        return max(load.flops for load in self.during.values())
