"""The levels of a network: the blocks of consecutive chips that links of one kind join."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import accumulate
from operator import mul

from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.machine.kernels import CollectiveConstants
from meshweave.describe.machine.links import NetworkAxis
from meshweave.describe.machine.network import (
    FullMeshNetwork,
    HostsNetwork,
    Network,
    SwitchNetwork,
    TorusNetwork,
    with_axes,
)
from meshweave.describe.machine.tree import TreeNetwork


def level_sizes(network: Network) -> tuple[int, ...] | None:
    """Return the number of chips below each level of links: in a host, a package or a subtree, the smallest first.

    (8,) for hosts of 8 chips, (4, 8) for a tree of pairs of switches with 4 chips each below a top switch: the
    whole of a tree is left out. () for one switch. None for tori and rings, whose links join neighbours.
    """
    match network:
        case HostsNetwork():
            return (network.chips_per_host,)
        case FullMeshNetwork():
            return (network.chips_per_package,)
        case TreeNetwork():
            return tuple(accumulate((level.fanout for level in network.levels), mul))[:-1]
        case SwitchNetwork():
            return ()
    return None


def with_outer_links(network: Network, factor: float) -> Network:
    """Return the network with its outermost links, and the rates of collectives on them, `factor` times as fast.

    Latencies stay. Outermost are the NICs between hosts, the links between packages, the top of a tree, and all
    links of a single host, of a single package and of other networks.
    """

    def faster(axis: NetworkAxis) -> NetworkAxis:
        return _faster(axis, factor)

    match network:
        case HostsNetwork() if network.num_hosts > 1:
            return replace(network, nic=faster(network.nic))
        case FullMeshNetwork() if network.num_packages > 1:
            return replace(network, link=faster(network.link))
        case TreeNetwork():
            top = network.levels[-1]
            direct = None if top.direct is None else faster(top.direct)
            level = replace(top, axis=faster(top.axis), direct=direct)
            return replace(network, levels=(*network.levels[:-1], level))
    return with_axes(network, faster)


def link_levels(cluster: Cluster) -> tuple[tuple[str, Callable[[float], Cluster]], ...]:
    """Return (name in words, function that scales the rate) of a cluster's levels of links, outermost first.

    The function takes a factor and returns the cluster with these links at so many times their rate. Several
    hosts of several chips have two levels, NICs and links inside a host; for other networks only the outermost
    level is returned. The measured rates of collectives inside a host change with the links there.
    """
    network = cluster.network

    def outer(factor: float) -> Cluster:
        return replace(cluster, network=with_outer_links(network, factor))

    def inner(factor: float) -> Cluster:
        assert isinstance(network, HostsNetwork)
        chip, intra = cluster.chip, _faster(network.intra, factor)
        if chip.kernels is not None:
            rates = tuple((kind, _faster_collective(of, factor)) for kind, of in chip.kernels.collectives)
            chip = replace(chip, kernels=replace(chip.kernels, collectives=rates))
        return replace(cluster, chip=chip, network=replace(network, intra=intra))

    levels: list[tuple[str, Callable[[float], Cluster]]] = []
    if isinstance(network, HostsNetwork):
        if network.num_hosts > 1:
            levels.append(("NICs", outer))
        if network.chips_per_host > 1 or not levels:
            levels.append((f"{network.intra.name} inside hosts", inner))
        return tuple(levels)
    pairs = zip(axes_of(network), axes_of(with_outer_links(network, 2.0)), strict=True)
    return ((f"links of {', '.join(dict.fromkeys(a.name for a, b in pairs if a != b))}", outer),)


def level_under(cluster: Cluster, chips: Iterable[int]) -> int | None:
    """Return the position in `link_levels(cluster)` of the outermost links that messages between `chips` cross.

    None where `link_levels` leaves these links out: those inside one of several packages, and the inner levels
    of a tree.
    """
    network = cluster.network
    sizes = level_sizes(network)
    if not sizes:
        return 0
    is_outer = len({chip // sizes[-1] for chip in chips}) > 1
    if isinstance(network, HostsNetwork):
        return 0 if is_outer else len(link_levels(cluster)) - 1
    return 0 if is_outer or network.num_chips == sizes[-1] else None


def _faster(axis: NetworkAxis, factor: float) -> NetworkAxis:
    constants = tuple((kind, replace(of, bytes_per_s=of.bytes_per_s * factor)) for kind, of in axis.constants)
    return replace(axis, link_bytes_per_s=axis.link_bytes_per_s * factor, constants=constants)


def _faster_collective(of: CollectiveConstants, factor: float) -> CollectiveConstants:
    low, high = of.low_latency_bytes_per_s * factor, of.bytes_per_s * factor
    return replace(of, low_latency_bytes_per_s=low, bytes_per_s=high)


def axes_of(network: Network) -> list[NetworkAxis]:
    """Return every kind of link between the chips of a network; not `slices`, which join a torus to others."""
    axes: list[NetworkAxis] = []

    def note(axis: NetworkAxis) -> NetworkAxis:
        axes.append(axis)
        return axis

    with_axes(replace(network, slices=None) if isinstance(network, TorusNetwork) else network, note)
    return axes
