"""Closed form of a universal product: a roofline per phase, of what each rank computes and moves.

Summing partial operands up before and putting copies of C together after have nothing to hide behind: the busier
direction of a link, plus what is added in memory. In between, of `n` steps the longer of products and transfers
is in full view, and of the shorter one step's worth: the first panel has to come before anything can be
multiplied, or the last result has to leave after everything is (Slicing Is All You Need, section 4.3, takes the
maximum per step).
"""

from __future__ import annotations

from dataclasses import dataclass

from meshweave.cost.rates import RankRates
from meshweave.ir.volume import PhaseVolume, RankVolume, Volume


@dataclass(frozen=True)
class UniversalEstimate:
    """Seconds of each phase, and of the middle one what the slowest rank computes and transfers."""

    before_s: float
    during_s: float
    after_s: float
    compute_s: float
    transfer_s: float

    @property
    def total_s(self) -> float:
        return self.before_s + self.during_s + self.after_s


def estimate_universal(volume: Volume, rates: RankRates) -> UniversalEstimate:
    """Return the time of a universal product of that volume."""
    during_s, compute_s, transfer_s = max(_overlapped_s(load, rates) for load in volume.during.values())
    return UniversalEstimate(
        _exposed_s(volume.before, rates), during_s, _exposed_s(volume.after, rates), compute_s, transfer_s
    )


def _transfer_s(load: RankVolume, rates: RankRates) -> float:
    return rates.link_s(load.moved_bytes, load.messages) + rates.add_s(load.local_bytes)


def _exposed_s(phase: PhaseVolume, rates: RankRates) -> float:
    """Return the seconds of the slowest rank in a phase without products."""
    return max(_transfer_s(load, rates) for load in phase.values())


def _overlapped_s(load: RankVolume, rates: RankRates) -> tuple[float, float, float]:
    """Return the seconds of a rank in the phase of products, and of its products and transfers alone."""
    compute_s, transfer_s = rates.compute_s(load.flops, load.products), _transfer_s(load, rates)
    steps = max(load.products, 1)
    return max(compute_s, transfer_s) + min(compute_s, transfer_s) / steps, compute_s, transfer_s
