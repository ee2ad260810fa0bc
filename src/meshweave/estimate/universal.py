"""Closed-form time of a universal product: a roofline per phase, from the FLOPs and bytes of each rank.

The phases before and after the products (reduction of partial operands, reduction of the replicas of C) are
exposed: they take the time of the busier link direction plus that of the additions in memory. The middle phase
has n steps and takes max(products, transfers) + min(products, transfers) / n: one step is not overlapped, because
the first panel arrives before the first product, or the last result leaves after the last one. Slicing Is All You
Need, section 4.3, takes the maximum per step.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshweave.cost.rates import RankRates
from meshweave.ir.volume import PhaseVolume, RankVolume, Volume


@dataclass(frozen=True)
class UniversalEstimate:
    """The seconds of the phases of a universal product (`ir.volume.Volume`), each that of its slowest rank.

    `compute_s` and `transfer_s` are what that rank's products, and its transfers and additions in memory, take
    in the middle phase, each alone.
    """

    before_s: float
    during_s: float
    after_s: float
    compute_s: float
    transfer_s: float

    @property
    def total_s(self) -> float:
        """Return the seconds of all three phases, one after another."""
        return self.before_s + self.during_s + self.after_s


def estimate_universal(volume: Volume, rates: RankRates) -> UniversalEstimate:
    """Return the seconds of a universal product; the module docstring says how phases are added up.

    Args:
        volume: what each rank computes, sends, receives and adds up in each phase.
        rates: rates and fixed costs, equal for all ranks.
    """
    during_s, compute_s, transfer_s = max(_overlapped_s(load, rates) for load in volume.during.values())
    return UniversalEstimate(
        _exposed_s(volume.before, rates), during_s, _exposed_s(volume.after, rates), compute_s, transfer_s
    )


def _transfer_s(load: RankVolume, rates: RankRates) -> float:
    return rates.link_s(load.busier_direction_bytes, load.num_messages) + rates.add_s(load.local_bytes)


def _exposed_s(phase: PhaseVolume, rates: RankRates) -> float:
    """Return the seconds of the slowest rank in a phase without products."""
    return max(_transfer_s(load, rates) for load in phase.values())


def _overlapped_s(load: RankVolume, rates: RankRates) -> tuple[float, float, float]:
    """Return the seconds of a rank in the phase of products, and of its products and transfers alone."""
    compute_s, transfer_s = rates.compute_s(load.flops, load.num_products), _transfer_s(load, rates)
    steps = max(load.num_products, 1)
    return max(compute_s, transfer_s) + min(compute_s, transfer_s) / steps, compute_s, transfer_s
