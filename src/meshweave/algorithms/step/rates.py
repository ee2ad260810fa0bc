"""The rates at which chips work under a software stack: its kernel of attention, and what products sustain."""

from __future__ import annotations

from dataclasses import replace

from meshweave.algorithms.step.software_stack import SoftwareStack
from meshweave.describe.machine.chip import Chip
from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.machine.kernels import ProductConstants, ProductModel, SystolicConstants


def _sustained(of: ProductModel, share: float) -> ProductModel:
    """Return the constants of products whose units run at a share of their clock."""
    if isinstance(of, ProductConstants):
        of = replace(of, unit_bytes_per_s=share * of.unit_bytes_per_s, sustained_share=None)
        return replace(of, flops_per_s=share * of.flops_per_s)
    if isinstance(of, SystolicConstants):
        return replace(of, flops_per_s=share * of.flops_per_s, rounded_per_s=share * of.rounded_per_s)
    return of


def without_casts(cluster: Cluster) -> Cluster:
    """Return the cluster with the cast of an operand (`prepare_s`) taken out of its chips' measured products."""
    kernels = cluster.chip.kernels
    assert kernels is not None
    products = tuple(
        (name, replace(of, prepare_s=0.0) if isinstance(of, ProductConstants) else of)
        for name, of in kernels.products
    )
    return replace(cluster, chip=replace(cluster.chip, kernels=replace(kernels, products=products)))


def attention_reading(stack: SoftwareStack, chip: Chip, dtype: str) -> str:
    """Return words that say at which rate fused attention is priced if not fitted on the chip, else "".

    A stack without shares runs the kernel that was measured. Where none was, attention takes the rate of
    products.
    """
    is_measured = chip.kernels is not None and chip.kernels.attention_of(dtype) is not None
    rate = (
        "the kernels that were measured there"
        if is_measured
        else "products, since no kernel was measured there"
    )
    known = stack.attention_share(chip)
    if known is None and stack.attention_shares:
        return f"attention of {stack.name} was fitted on no chip like {chip.name}: it has the rate of {rate}"
    if known is None:
        return "" if is_measured else f"attention on {chip.name} has the rate of {rate}"
    name, share = known
    if chip.name.startswith(name) and chip.kernels is not None:
        return ""
    whose = "its" if chip.name.startswith(name) else f"{name}'s"
    return f"attention of {stack.name} on {chip.name} takes {whose} share, {share:.3g}, of the rate of {rate}"


def with_rates(cluster: Cluster, dtype: str, share: float, sustains: bool) -> Cluster:
    """Return the cluster with attention in `dtype` at `share` times the chips' FLOP rate for attention.

    With `sustains`, products run at the rates that chips sustain in training (`SoftwareStack.sustains`).
    """
    chip = cluster.chip
    kernels = chip.kernels
    if sustains and kernels is not None:
        products = tuple((name, _sustained(of, kernels.sustained_of(name))) for name, of in kernels.products)
        grouped = kernels.grouped_share * kernels.sustained_share
        kernels = replace(kernels, products=products, sustained_share=1.0, grouped_share=grouped)
        cluster = replace(cluster, chip=replace(chip, kernels=kernels))
        chip = cluster.chip
    if share == 1:
        return cluster
    rates = dict(chip.call_flops_per_s)
    rates["attention"] = share * chip.flops_per_s(dtype, "attention")
    if kernels is not None:
        scaled = ((name, replace(of, flops_per_s=share * of.flops_per_s)) for name, of in kernels.attention)
        kernels = replace(kernels, attention=tuple(scaled))
    return replace(cluster, chip=replace(chip, call_flops_per_s=tuple(rates.items()), kernels=kernels))
