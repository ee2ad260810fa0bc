"""The levels of a network: the blocks of consecutive chips that links of one kind join."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from operator import mul

from meshweave.describe.machine.links import NetworkAxis
from meshweave.describe.machine.network import (
    FullMeshNetwork,
    HostsNetwork,
    Network,
    SwitchNetwork,
    TreeNetwork,
    with_axes,
)


def level_sizes(network: Network) -> tuple[int, ...] | None:
    """Return the chips of a block of each level below the whole network, the smallest first.

    A host of a cluster of hosts, a package of a full mesh and each subtree of a tree are blocks; one switch has
    none. None for tori and rings, whose links join neighbours.
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
    """Return a network whose outermost links are `factor` times as fast.

    Those are the NICs of hosts, the links between packages, the top of a tree, and all links of other networks.
    """

    def faster(axis: NetworkAxis) -> NetworkAxis:
        constants = tuple(
            (kind, replace(constants, bytes_per_s=constants.bytes_per_s * factor))
            for kind, constants in axis.constants
        )
        return replace(axis, link_bytes_per_s=axis.link_bytes_per_s * factor, constants=constants)

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


def outer_link_names(network: Network) -> str:
    """Return what the links that `with_outer_links` makes faster are called."""
    pairs = zip(_axes(network), _axes(with_outer_links(network, 2.0)), strict=True)
    names = ", ".join(dict.fromkeys(old.name for old, new in pairs if old != new))
    if isinstance(network, HostsNetwork) and network.num_hosts > 1:
        return "NICs"
    return f"links of {names}"


def _axes(network: Network) -> list[NetworkAxis]:
    axes: list[NetworkAxis] = []

    def note(axis: NetworkAxis) -> NetworkAxis:
        axes.append(axis)
        return axis

    with_axes(network, note)
    return axes
