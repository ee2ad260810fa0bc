"""A cluster with a program's meshes laid on it: which links a message takes, and how groups lie on hosts.

Lanes are not hardware. Which link, NIC or port carries a transfer follows from where the ranks are placed,
and only this layer and the simulators know it. Global rank r sits on chip r, chips in row-major order, unless
a placement says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from meshweave.base.errors import LayoutError, UnsupportedError
from meshweave.cost.flows import Links, TorusLinks
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.machine.levels import level_sizes
from meshweave.describe.machine.links import NetworkAxis
from meshweave.describe.machine.network import (
    FullMeshNetwork,
    HostsNetwork,
    RingNetwork,
    SwitchNetwork,
    TorusNetwork,
)
from meshweave.describe.machine.tree import TreeNetwork

Link = tuple[str, int, int, int]
"""(what, chip or host, axis, direction): one direction of one link, NIC or port; in a tree, (up or down, child,
level, 0) or (direct, child, level, other child), the children of a level counted across all of its switches; in
a full mesh, (inner or link, source, target, 0)."""

RING_ROUTE, TREE_OF_2_ROUTE, TREE_OF_3_ROUTE = 2, 3, 4
"""Routes of collectives that use all NICs of their hosts, beside 0 (forwards) and 1 (backwards)."""
_NICS_WEIGHT = {TREE_OF_2_ROUTE: 2, TREE_OF_3_ROUTE: 3}
"""Quarters of what a ring sends through the NICs of a host that a tree of so many hosts sends."""


@dataclass(frozen=True, slots=True)
class HostSpan:
    """How the groups of a mesh axis lie on hosts; even groups all have equally many hosts and members in each.

    Attributes:
        num_hosts: the hosts of each group; of uneven groups the most.
        per_host: the members of a group in each of its hosts; of uneven groups the mean, rounded up.
        groups_per_host: the most groups that share a host; of uneven ones those that lie on several hosts count.
        fewest: the fewest members that one of uneven groups has in one of its hosts; 0 for even groups.
    """

    num_hosts: int
    per_host: int
    groups_per_host: int
    fewest: int = 0


@dataclass(frozen=True)
class PlacedMeshes:
    """The meshes of a program on the chips of a cluster; see `Machine`.

    A group of a mesh axis is the ranks that differ in the coordinate of that axis alone.
    """

    cluster: Cluster
    meshes: tuple[Mesh, ...]
    logical: bool = False
    placement: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        num_chips = self.cluster.num_chips
        if self.placement is not None and sorted(self.placement) != list(range(num_chips)):
            raise LayoutError(
                f"the placement of {len(self.placement)} ranks is not a permutation of the {num_chips} chips of "
                f"{self.cluster.name}; give every chip from 0 to {num_chips - 1} once"
            )
        highest = max((max(mesh.ranks) for mesh in self.meshes), default=0)
        if highest >= self.cluster.num_chips:
            raise LayoutError(
                f"{highest + 1} ranks do not fit the {self.cluster.num_chips} chips of {self.cluster.name}"
            )

    def groups(self, name: str) -> NDArray[np.int64]:
        """Return the global ranks of each group of a mesh axis ("tp.row"), shape (groups, members).

        A mesh by itself ("tp") is one group of all its ranks.
        """
        mesh_name, _, axis = name.partition(".")
        mesh = next(mesh for mesh in self.meshes if mesh.name == mesh_name)
        ranks = np.array(mesh.ranks).reshape(mesh.shape)
        if not axis:
            return ranks.reshape(1, -1)
        i = mesh.axes.index(axis)
        return np.moveaxis(ranks, i, -1).reshape(-1, mesh.shape[i])

    def host_span(self, axis: str) -> HostSpan | None:
        """Return how the groups of a mesh axis ("tp.row"), or the ranks of a mesh ("tp"), lie on hosts.

        None where there are no hosts or no such axis, or where the groups lie unevenly (see `HostSpan`).
        """
        span = self.any_host_span(axis)
        return None if span is None or span.fewest else span

    def any_host_span(self, axis: str) -> HostSpan | None:
        """Return how the groups of a mesh axis ("tp.row") or mesh ("tp") lie on hosts, evenly or not.

        None where there are no hosts or no such axis.
        """
        return self._host_spans.get(axis)

    @cached_property
    def _host_spans(self) -> dict[str, HostSpan]:
        network = self.cluster.network
        if not isinstance(network, HostsNetwork):
            return {}
        spans = {}
        for mesh in self.meshes:
            chips = np.array(mesh.ranks)
            if self.placement is not None:
                chips = np.array(self.placement)[chips]
            hosts = (chips // network.chips_per_host).reshape(mesh.shape)
            groups = {
                f"{mesh.name}.{axis}": np.moveaxis(hosts, i, -1).reshape(-1, mesh.shape[i])
                for i, axis in enumerate(mesh.axes)
            }
            for name, rows in (*groups.items(), (mesh.name, hosts.reshape(1, -1))):
                spans[name] = _span(rows)
        return spans

    def uses_rails(self, axis: str) -> bool:
        """Return whether a collective of a mesh axis ("tp.row") uses several NICs of a host at once.

        False for groups that lie unevenly on hosts.
        """
        network, span = self.cluster.network, self.host_span(axis)
        if span is None or not isinstance(network, HostsNetwork):
            return False
        return span.num_hosts > 1 and span.per_host > 1 and network.nics_per_host > 1

    @cached_property
    def has_rails(self) -> bool:
        """Return whether a collective of some mesh axis uses several NICs of a host at once."""
        return any(self.uses_rails(axis) for axis in self._host_spans)

    @cached_property
    def _torus_shape(self) -> tuple[int, ...]:
        network, num_chips = self.cluster.network, self.cluster.num_chips
        if not isinstance(network, TorusNetwork):
            return (num_chips,)
        whole = next((mesh.shape for mesh in self.meshes if mesh.num_ranks == num_chips), None)
        if network.shape is not None:
            sizes = [sorted(size for size in shape if size > 1) for shape in (whole or (), network.shape)]
            if whole is None or self.logical or sizes[0] != sizes[1]:
                return network.shape
            return whole  # a torus may be turned to fit the mesh
        if self.logical and (whole is None or len(whole) > len(network.axes)):
            return network.cube
        return whole or (num_chips,)

    def path(self, src: int, dst: int, route: int = 0) -> tuple[Link, ...]:
        """Return the links that a message from rank `src` to rank `dst` takes, in order; () on one chip.

        Dimension-ordered and in the shorter direction on a torus; out port and in port on a switch and inside a
        host; both NICs between hosts; up to the lowest common switch and down again in a tree; across its own
        package first in a full mesh.

        Where a mesh has collectives that use all NICs of a host at once (`has_rails`), a message between hosts
        loads both its own NICs and the links "nics-out" and "nics-in", which stand for all NICs of a host.

        Args:
            route: 0 for a message; 1 for one that goes backwards where both ways round a torus are equally long;
                `RING_ROUTE`, `TREE_OF_2_ROUTE` or `TREE_OF_3_ROUTE` for collectives on all NICs, which load
                "nics-out" and "nics-in" alone.
        """
        network = self.cluster.network
        if self.placement is not None:
            src, dst = self.placement[src], self.placement[dst]
        if src == dst:
            return ()
        match network:
            case SwitchNetwork():
                return ("out", src, 0, 0), ("in", dst, 0, 0)
            case HostsNetwork():
                if src // network.chips_per_host == dst // network.chips_per_host:
                    return ("out", src, 0, 0), ("in", dst, 0, 0)
                return self._nic_path(network, src, dst, route)
            case FullMeshNetwork():
                return tuple(_mesh_hops(network, src, dst))
            case TreeNetwork():
                return tuple(_tree_hops(network, src, dst))
        return tuple(self._torus_hops(src, dst, route == 1))

    def _nic_path(self, network: HostsNetwork, src: int, dst: int, route: int) -> tuple[Link, ...]:
        """Return the links between hosts that a message from one chip to another takes."""
        (host, chip), (to_host, to_chip) = (divmod(x, network.chips_per_host) for x in (src, dst))
        nics = network.nics_per_host
        own: tuple[Link, ...] = ("nic-out", host, chip % nics, 0), ("nic-in", to_host, to_chip % nics, 0)
        if not self.has_rails:
            return own
        shared: tuple[Link, ...] = ("nics-out", host, 0, 0), ("nics-in", to_host, 0, 0)
        return shared if route >= RING_ROUTE else own + shared

    def image_path(self, src: int, dst: int, route: int) -> tuple[Link, ...]:
        """Raise UnsupportedError, always: only a `FoldedMachine` has copies of ranks that are left out."""
        raise UnsupportedError(f"rank {dst} has no image: the machine is not folded")

    def _torus_hops(self, src: int, dst: int, back: bool) -> Iterator[Link]:
        shape = self._torus_shape
        at, to = list(_unravel(src, shape)), _unravel(dst, shape)
        for axis, size in enumerate(shape):
            ahead = (to[axis] - at[axis]) % size
            direction = 1 if 2 * ahead < size + (not back) else -1
            for _ in range(ahead if direction == 1 else size - ahead):
                yield "link", _ravel(at, shape), axis, direction
                at[axis] = (at[axis] + direction) % size

    def weighted_link_rate(self, link: Link) -> int:
        """Return the rate of one direction of a link in weighted bytes per second (`link_weight`).

        It is the rate in bytes, but four times that for the links that stand for all NICs of a host, where each
        byte of a message has a weight of 2 to 4. In a tree it is the rate of all parallel links of a child.
        """
        network = self.cluster.network
        link_kind, _, axis, _ = link
        match network:
            case HostsNetwork():
                if link_kind.startswith("nics"):
                    return 4 * network.nics_per_host * int(network.nic.link_bytes_per_s)
                chosen = network.nic if link_kind.startswith("nic") else network.intra
            case TreeNetwork():
                level = network.levels[axis]
                if link_kind == "direct":
                    assert level.direct is not None
                    return int(level.direct.link_bytes_per_s)
                return int(level.child_bytes_per_s)
            case FullMeshNetwork():
                chosen = network.inner if link_kind == "inner" else network.link
            case TorusNetwork():
                chosen = self._torus_axes[axis]
            case _:
                chosen = network.link
        return int(chosen.link_bytes_per_s)

    @staticmethod
    def link_weight(link: Link, route: int = 0) -> int:
        """Return the weight of each byte of a message on a link, in the unit of `weighted_link_rate`.

        On the links of all NICs of a host it is 4. A collective by trees weighs less there: 2 between two hosts,
        where it sends half of what a ring sends, and 3 between three. On every other link it is 1.

        Args:
            route: 0, or `RING_ROUTE`, `TREE_OF_2_ROUTE` or `TREE_OF_3_ROUTE`.
        """
        return _NICS_WEIGHT.get(route, 4) if link[0].startswith("nics") else 1

    @cached_property
    def _torus_axes(self) -> tuple[NetworkAxis, ...]:
        """Return the links along each axis of the torus, in the order of its current shape; of a ring its own."""
        network, shape = self.cluster.network, self._torus_shape
        if isinstance(network, RingNetwork):
            return (network.link,)
        assert isinstance(network, TorusNetwork)
        return tuple(network.axis(i, len(shape), shape) for i in range(len(shape)))

    def _blocks(self, groups: NDArray[np.int64]) -> tuple[int, int, int] | None:
        """Return (blocks, members, stride) of groups of one stride in blocks that fill all chips; else None."""
        size, chips = groups.shape[1], self.cluster.num_chips
        stride = int(groups[0, 1] - groups[0, 0]) if size > 1 else 1
        is_even = stride > 0 and chips % (size * stride) == 0 and bool((np.diff(groups) == stride).all())
        is_even = is_even and bool((groups[:, 0] % (size * stride) < stride).all())
        return (chips // (size * stride), size, stride) if is_even else None

    def _lie_alike(self, even: tuple[int, int, int]) -> bool:
        """Return whether all blocks of `_blocks` lie alike on the levels of a network that has some."""
        block, sizes = even[1] * even[2], level_sizes(self.cluster.network)
        return sizes is not None and all(each % block == 0 or block % each == 0 for each in sizes)

    @cached_property
    def links(self) -> Links:
        """Return the links by which closed forms count who shares one (`least_rate`)."""
        network = self.cluster.network
        if not isinstance(network, TorusNetwork | RingNetwork):
            return network
        return TorusLinks(self._torus_shape, tuple(axis.link_bytes_per_s for axis in self._torus_axes))


def _span(hosts: NDArray[np.int64]) -> HostSpan:
    """Return how groups lie on hosts, given the host of each member, shape (groups, members)."""
    groups, size = hosts.shape
    most = int(hosts.max()) + 1
    pairs, members = np.unique(
        np.repeat(np.arange(groups), size) * most + hosts.reshape(-1), return_counts=True
    )
    spanned = np.bincount(pairs // most)
    if members.min() == members.max() and spanned.min() == spanned.max():
        return HostSpan(int(spanned[0]), int(members[0]), int(np.bincount(pairs % most).max()))
    shared = int(np.bincount(pairs[spanned[pairs // most] > 1] % most).max())
    num_hosts = int(spanned.max())
    return HostSpan(num_hosts, -(-size // num_hosts), shared, int(members.min()))


def _tree_hops(tree: TreeNetwork, src: int, dst: int) -> Iterator[Link]:
    down: list[Link] = []
    for level, below in enumerate(tree.chips_below):
        child, to = src // below, dst // below
        if child == to:
            break
        fanout, direct = tree.levels[level].fanout, tree.levels[level].direct
        if direct is not None and child // fanout == to // fanout:
            yield "direct", child, level, to
            break
        yield "up", child, level, 0
        down.append(("down", to, level, 0))
    yield from reversed(down)


def _mesh_hops(network: FullMeshNetwork, src: int, dst: int) -> Iterator[Link]:
    size = network.chips_per_package
    to_package, to_place = divmod(dst, size)
    if src // size == to_package:
        yield "inner", src, dst, 0
        return
    exit_chip = src - src % size + to_place
    if exit_chip != src:
        yield "inner", src, exit_chip, 0
    yield "link", exit_chip, dst, 0


def _unravel(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    out = []
    for size in reversed(shape):
        index, coordinate = divmod(index, size)
        out.append(coordinate)
    return tuple(reversed(out))


def _ravel(coords: Iterable[int], shape: tuple[int, ...]) -> int:
    index = 0
    for coordinate, size in zip(coords, shape, strict=True):
        index = index * size + coordinate
    return index
