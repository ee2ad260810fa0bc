"""What a cluster description leaves out of a plan: kernels that nobody measured, and costs that are zero."""

from __future__ import annotations

from meshweave.describe.machine.chip import Chip
from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.machine.levels import axes_of
from meshweave.describe.machine.links import COMM_KINDS


def best_product_rate(chip: Chip, dtype: str) -> float | None:
    """Return the highest FLOP/s of product constants and measured products in a dtype; None without either."""
    if chip.kernels is None:
        return None
    constants, table = chip.kernels.product(dtype), chip.kernels.table(dtype)
    rates = [constants.flops_per_s] if constants is not None else []
    rates += [max(2 * m * n * k / seconds for m, n, k, seconds in table.points)] if table is not None else []
    return max(rates, default=None)


def unmeasured_kernels(chip: Chip, dtype: str) -> str:
    """Return in a line at what rate products in a dtype are priced if none were measured; "" if some were."""
    if best_product_rate(chip, dtype) is not None:
        return ""
    rate, peak = chip.flops_per_s(dtype), dict(chip.peak_flops_per_s).get(dtype)
    words = f"{rate / 1e12:.4g} TFLOP/s"
    if peak is not None:
        share = "the peak" if rate == peak else f"{100 * rate / peak:.4g} % of the peak"
        words = f"{share} of its datasheet, {words}"
    return f"{chip.name} has no measured kernels for {dtype}: products of every size are priced at {words}"


def costs_left_out(cluster: Cluster) -> str:
    """Return one sentence that names the links on which no communication has a launch or synchronisation cost.

    "" where there are none. Such links let a tuner cut products as finely as it likes.
    """
    free = [
        axis.name
        for axis in axes_of(cluster.network)
        if not any(known.launch_s or known.sync_s for known in map(axis.comm, COMM_KINDS))
    ]
    if not free:
        return ""
    names = ", ".join(dict.fromkeys(free))
    return (
        f"note: with the constants of {cluster.name}, launching and synchronising on {names} costs nothing; "
        "run calibrate, or give measured ones"
    )
