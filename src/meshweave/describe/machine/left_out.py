"""What a cluster description leaves out of a plan: costs that are zero there and are not zero anywhere."""

from __future__ import annotations

from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.machine.links import COMM_KINDS, NetworkAxis
from meshweave.describe.machine.network import with_axes


def costs_left_out(cluster: Cluster) -> str:
    """Return one sentence that names the costs which are zero in a description; "" where there are none.

    Links without launch and synchronisation let a tuner cut products as finely as it likes. A chip that reaches
    its peak at every size lets it report nearly all of it.
    """
    free: list[str] = []

    def look(axis: NetworkAxis) -> NetworkAxis:
        known = [axis.comm(kind) for kind in COMM_KINDS]
        if not any(constants.launch_s or constants.sync_s for constants in known):
            free.append(axis.name)
        return axis

    with_axes(cluster.network, look)
    chip, parts = cluster.chip, []
    if free:
        names = ", ".join(dict.fromkeys(free))
        parts.append(f"launching and synchronising on {names} costs nothing")
    if chip.kernels is None and chip.effective_flops_per_s >= max(rate for _, rate in chip.peak_flops_per_s):
        parts.append("products of every size reach the chip's peak")
    if not parts:
        return ""
    free_costs = " and ".join(parts)
    return f"note: with the constants of {cluster.name}, {free_costs}; run calibrate, or give measured ones"
