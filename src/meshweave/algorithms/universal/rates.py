"""What the costs of a schedule know of a machine."""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshweave.cost.machine import Machine
from meshweave.describe.machine.network import FullMesh, Hosts


@dataclass(frozen=True)
class ScheduleRates:
    """A roofline without memory, and links between pairs of ranks (Slicing Is All You Need, section 4.3).

    Each `per_package` consecutive ranks are close to one another: between them bytes flow at
    `near_bytes_per_s`. Accumulates run at the share `adding` of the rates of copies.
    """

    flops_per_s: float
    bytes_per_s: float
    adding: float = 1.0
    per_package: int = 1
    near_bytes_per_s: float = math.inf

    def __post_init__(self) -> None:
        assert min(self.flops_per_s, self.bytes_per_s, self.adding, self.near_bytes_per_s) > 0
        assert self.per_package >= 1

    @classmethod
    def of(cls, machine: Machine) -> ScheduleRates:
        """Of a machine whose ranks are its chips in order."""
        cluster, network = machine.cluster, machine.cluster.network
        per_package = 1
        if isinstance(network, FullMesh):
            per_package = network.chips_per_package
        elif isinstance(network, Hosts):
            per_package = network.chips_per_host
        per_package = min(per_package, cluster.num_chips)
        near, far = min(1, cluster.num_chips - 1), per_package % cluster.num_chips
        copies, adds = (machine.one_sided(0, far, kind).rate for kind in (False, True))
        close = machine.one_sided(0, near, False).rate if per_package > 1 else math.inf
        return cls(cluster.chip.effective_flops_per_s, copies, adds / copies, per_package, close)

    def transfer_s(self, rank: int, other: int, size_bytes: int, *, adds: bool = False) -> float:
        """Seconds of a transfer between two ranks; 0 where they are the same."""
        if rank == other:
            return 0.0
        is_near = rank // self.per_package == other // self.per_package
        rate = self.near_bytes_per_s if is_near else self.bytes_per_s
        return size_bytes / (rate * self.adding if adds else rate)
