"""Closed form of a universal product: a roofline per phase, of what each rank computes and moves.

Summing partial operands up before and putting copies of C together after have nothing to hide behind: the busier
direction of a link, plus what is added in memory. In between, of `n` steps the longer of products and transfers
is in full view, and of the shorter one step's worth: the first panel has to come before anything can be
multiplied, or the last result has to leave after everything is (Slicing Is All You Need, section 4.3, takes the
maximum per step).
"""

from __future__ import annotations

from dataclasses import dataclass

from meshweave.cost.machine import Machine
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.machine.cluster import Cluster
from meshweave.ir.volume import Load, Phase, Volume


@dataclass(frozen=True)
class Rates:
    """What the closed form knows of a machine. `message_s` is the fixed cost of a transfer, `product_s` of a
    product; links are those of the slowest pair of ranks, one direction."""

    flops_per_s: float
    link_bytes_per_s: float
    message_s: float = 0.0
    product_s: float = 0.0
    memory_bytes_per_s: float = float("inf")

    @classmethod
    def of(cls, cluster: Cluster) -> Rates:
        """Of a cluster as the catalog describes it."""
        axis = Machine(cluster, (Mesh.of("all", (cluster.num_chips,), ("x",)),), logical=True).axis("")
        constants = axis.comm("send_recv")
        return cls(
            cluster.chip.effective_flops_per_s,
            min(constants.bytes_per_s, axis.link_bytes_per_s),
            constants.launch_s + constants.sync_s,
            cluster.chip.launch_s,
            cluster.chip.memory_bytes_per_s,
        )


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


def estimate_universal(volume: Volume, rates: Rates) -> UniversalEstimate:
    """Time of a universal product of that volume on a machine of those rates."""
    during, compute, transfer = max(_hidden(load, rates) for load in volume.during.values())
    return UniversalEstimate(
        _alone(volume.before, rates), during, _alone(volume.after, rates), compute, transfer
    )


def _transfer(load: Load, rates: Rates) -> float:
    return load.moved_bytes / rates.link_bytes_per_s + load.messages * rates.message_s


def _alone(phase: Phase, rates: Rates) -> float:
    return max(
        _transfer(load, rates) + 3 * load.local_bytes / rates.memory_bytes_per_s for load in phase.values()
    )


def _hidden(load: Load, rates: Rates) -> tuple[float, float, float]:
    compute = load.flops / rates.flops_per_s + load.products * rates.product_s
    transfer = _transfer(load, rates) + 3 * load.local_bytes / rates.memory_bytes_per_s
    steps = max(load.products, 1)
    return max(compute, transfer) + min(compute, transfer) / steps, compute, transfer
