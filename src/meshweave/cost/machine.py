"""A cluster with a program's meshes laid on it: which constants a mesh axis runs at, which links it uses.

Lanes are not hardware. Which link, NIC or port carries a transfer follows from where the ranks are placed,
and only this layer and the simulators know it. Global rank r sits on chip r, chips in row-major order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from meshweave.describe.cluster import Cluster, CommConstants, Hosts, NetworkAxis, Ring, Switch, Torus
from meshweave.describe.mesh import Mesh
from meshweave.errors import LayoutError, UnsupportedError
from meshweave.ir.program import Program

Link = tuple[str, int, int, int]
"""(what, chip or host, axis, direction): one direction of one link, NIC or port."""


@dataclass(frozen=True)
class Machine:
    """`meshes` lie on `cluster`. Raises LayoutError where they have more ranks than it has chips."""

    cluster: Cluster
    meshes: tuple[Mesh, ...]

    def __post_init__(self) -> None:
        highest = max((max(mesh.ranks) for mesh in self.meshes), default=0)
        if highest >= self.cluster.num_chips:
            raise LayoutError(
                f"{highest + 1} ranks do not fit the {self.cluster.num_chips} chips of {self.cluster.name}"
            )

    @classmethod
    def of(cls, cluster: Cluster, program: Program) -> Machine:
        return cls(cluster, program.meshes)

    @cached_property
    def _axes(self) -> dict[str, NetworkAxis]:
        network = self.cluster.network
        out = {}
        for mesh in self.meshes:
            num_dims = len(mesh.shape)
            whole = mesh.shape if mesh.num_ranks == self.cluster.num_chips else None
            for i, axis in enumerate(mesh.axes):
                out[f"{mesh.name}.{axis}"] = (
                    network.axis(i, num_dims, whole) if whole else network.axis(i, num_dims)
                )
            out[mesh.name] = network.axis(0, num_dims)
        return out

    def axis(self, name: str) -> NetworkAxis:
        """The network axis under a mesh axis; for "" (no mesh axis) the slowest one that there is."""
        if name in self._axes:
            return self._axes[name]
        if not self._axes:
            raise UnsupportedError("a machine without meshes cannot place a group")
        return min(self._axes.values(), key=lambda axis: axis.link_bytes_per_s)

    @cached_property
    def _constants(self) -> dict[tuple[str, str], tuple[CommConstants, int]]:
        return {}

    def _known(self, axis: str, kind: str) -> tuple[CommConstants, int]:
        found = self._constants.get((axis, kind))
        if found is None:
            network_axis = self.axis(axis)
            constants = network_axis.comm(kind)
            rate = int(min(constants.bytes_per_s, network_axis.ways * network_axis.link_bytes_per_s))
            found = self._constants[axis, kind] = constants, max(rate, 1)
        return found

    def constants(self, axis: str, kind: str) -> CommConstants:
        return self._known(axis, kind)[0]

    def rate(self, axis: str, kind: str) -> int:
        """Bytes per second into a chip during a collective, at most what its links carry."""
        return self._known(axis, kind)[1]

    def ways(self, axis: str) -> int:
        return self.axis(axis).ways

    # --- links ----------------------------------------------------------------------------------------

    @cached_property
    def _torus_shape(self) -> tuple[int, ...]:
        network = self.cluster.network
        if isinstance(network, Torus):
            whole = next((mesh.shape for mesh in self.meshes if mesh.num_ranks == network.num_chips), None)
            if network.shape is not None and whole is not None and sorted(whole) == sorted(network.shape):
                return whole  # a torus may be turned to fit the mesh
            return network.shape or whole or (network.num_chips,)
        return (network.num_chips,)

    def path(self, src: int, dst: int) -> tuple[Link, ...]:
        """Links that a message from chip `src` to chip `dst` takes: dimension-ordered and the shorter way
        round on a torus, out port and in port on a switch, both NICs between hosts."""
        network = self.cluster.network
        if src == dst:
            return ()
        if isinstance(network, Switch):
            return ("out", src, 0, 0), ("in", dst, 0, 0)
        if isinstance(network, Hosts):
            per_host = network.chips_per_host
            if src // per_host == dst // per_host:
                return ("out", src, 0, 0), ("in", dst, 0, 0)
            nic = network.nics_per_host
            return ("nic-out", src // per_host, src % per_host % nic, 0), (
                "nic-in",
                dst // per_host,
                dst % per_host % nic,
                0,
            )
        return tuple(self._torus_hops(src, dst))

    def _torus_hops(self, src: int, dst: int) -> Iterable[Link]:
        shape = self._torus_shape
        at, to = list(_unravel(src, shape)), _unravel(dst, shape)
        for axis, size in enumerate(shape):
            ahead = (to[axis] - at[axis]) % size
            direction = 1 if ahead <= size - ahead else -1
            for _ in range(ahead if direction == 1 else size - ahead):
                yield "link", _ravel(at, shape), axis, direction
                at[axis] = (at[axis] + direction) % size

    def link_rate(self, link: Link) -> int:
        """Bytes per second of one direction of a link."""
        network = self.cluster.network
        what, _, axis, _ = link
        if isinstance(network, Hosts):
            chosen = network.nic if what.startswith("nic") else network.intra
        elif isinstance(network, (Switch, Ring)):
            chosen = network.link
        else:
            chosen = network.axis(min(axis, len(network.axes) - 1), len(self._torus_shape))
        return int(chosen.link_bytes_per_s)

    def ring_links(self, group: tuple[int, ...], ways: int) -> tuple[Link, ...]:
        """Every link that a ring over `group` uses, in both directions where `ways` is 2."""
        links: dict[Link, None] = {}
        for position, rank in enumerate(group):
            following = group[(position + 1) % len(group)]
            links.update(dict.fromkeys(self.path(rank, following)))
            if ways == 2:
                links.update(dict.fromkeys(self.path(following, rank)))
        return tuple(links)


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


def mesh_machine(
    cluster: Cluster, shape: tuple[int, ...], axes: tuple[str, ...], name: str = "tp"
) -> Machine:
    """A machine for a skeleton: one mesh of `shape` on `cluster`."""
    if math.prod(shape) > cluster.num_chips:
        raise LayoutError(f"mesh {shape} does not fit the {cluster.num_chips} chips of {cluster.name}")
    return Machine(cluster, (Mesh.of(name, shape, axes),))
