"""Rates of a rank: what closed forms without contention need to turn bytes and FLOPs into seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from meshweave.cost.machine import Machine
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.machine.network import FullMeshNetwork, HostsNetwork

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Amount = TypeVar("Amount", float, "NDArray[np.float64]")
"""One amount, or an array of them."""


@dataclass(frozen=True)
class RankRates:
    """Rates and fixed costs that hold for every rank of a machine.

    Attributes:
        flops_per_s: FLOPs per second of products.
        link_bytes_per_s: rate of one direction of the slowest link between two ranks.
        link_latency_s: seconds of a message besides its bytes.
        launch_s: seconds of a product besides its FLOPs.
        memory_bytes_per_s: rate of a rank's own memory.
        accumulate_factor: rate of accumulates as a fraction of the rate of copies.
        ranks_per_package: number of consecutive ranks that share a package or a host.
        package_bytes_per_s: rate between two ranks of a package.
    """

    flops_per_s: float
    link_bytes_per_s: float
    link_latency_s: float = 0.0
    launch_s: float = 0.0
    memory_bytes_per_s: float = math.inf
    accumulate_factor: float = 1.0
    ranks_per_package: int = 1
    package_bytes_per_s: float = math.inf

    def __post_init__(self) -> None:
        assert (
            min(self.flops_per_s, self.link_bytes_per_s, self.memory_bytes_per_s, self.package_bytes_per_s)
            > 0
        )
        assert self.accumulate_factor > 0 and self.ranks_per_package >= 1

    @classmethod
    def of(cls, cluster: Cluster, dtype: str = "") -> RankRates:
        """Return the rates of a cluster whose ranks are its chips in order, for products in `dtype`.

        Where the chip's kernels have constants of products in `dtype`, these give the FLOP rate, and `launch_s`
        is the sum of their launch and the chip's. Else the rate is the chip's for `dtype`; "" takes its rate for
        any dtype.
        """
        machine = Machine(cluster, (Mesh.of("all", (cluster.num_chips,), ("x",)),), logical=True)
        chip, network, axis = cluster.chip, cluster.network, machine.axis("")
        constants = axis.comm("send_recv")
        products = chip.kernels.product(dtype) if chip.kernels is not None else None
        ranks_per_package = 1
        if isinstance(network, FullMeshNetwork):
            ranks_per_package = network.chips_per_package
        elif isinstance(network, HostsNetwork):
            ranks_per_package = network.chips_per_host
        ranks_per_package = min(ranks_per_package, cluster.num_chips)
        near, far = min(1, cluster.num_chips - 1), ranks_per_package % cluster.num_chips
        copies, accumulates = (machine.one_sided_constants(0, far, adds).rate for adds in (False, True))
        return cls(
            flops_per_s=products.flops_per_s if products else chip.flops_per_s(dtype),
            link_bytes_per_s=min(constants.bytes_per_s, axis.link_bytes_per_s),
            link_latency_s=constants.launch_s + constants.sync_s,
            launch_s=chip.launch_s + (products.launch_s if products else 0.0),
            memory_bytes_per_s=chip.memory_bytes_per_s,
            accumulate_factor=accumulates / copies,
            ranks_per_package=ranks_per_package,
            package_bytes_per_s=machine.one_sided_constants(0, near, False).rate
            if ranks_per_package > 1
            else math.inf,
        )

    def compute_s(self, flops: Amount, num_products: Amount) -> Amount:
        """Return the seconds of `num_products` products with `flops` FLOPs in all."""
        return flops / self.flops_per_s + num_products * self.launch_s

    def link_s(self, num_bytes: Amount, num_messages: Amount) -> Amount:
        """Return the seconds of messages with `num_bytes` in all, one after another over the slowest link."""
        return num_bytes / self.link_bytes_per_s + num_messages * self.link_latency_s

    def add_s(self, num_bytes: Amount) -> Amount:
        """Return the seconds of adding `num_bytes` in a rank's memory: two terms are read, the sum is written."""
        return 3 * num_bytes / self.memory_bytes_per_s

    def transfer_s(self, src: int, dst: int, num_bytes: int, *, accumulates: bool = False) -> float:
        """Return the seconds of copying (or, with `accumulates`, of adding) `num_bytes` from `src` to `dst`.

        Both are ranks; the result is 0 if they are equal. The rate is that of the link between them. The latency
        is left out, as in the roofline of Slicing Is All You Need, section 4.3.
        """
        if src == dst:
            return 0.0
        is_near = src // self.ranks_per_package == dst // self.ranks_per_package
        rate = self.package_bytes_per_s if is_near else self.link_bytes_per_s
        return num_bytes / (rate * self.accumulate_factor if accumulates else rate)
