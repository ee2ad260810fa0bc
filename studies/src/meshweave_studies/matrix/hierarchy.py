"""The hierarchical communication matrix of a cluster (ATP, Cheng et al., section 3.4).

A matrix has layers, the outermost first; "layer" is the paper's word for a level of a machine. The outermost layer
joins `size` members (nodes, say), the next one the members of each of these (sockets or devices), and so on;
members of the last layer are devices. A layer says how many bytes per second pass between any two of its members
(the point-to-point matrix), and how many each exchanges with all the others (the group bandwidth).

A matrix is a view: `communication_matrix` reads it off the network of a cluster, be it from the catalog, from
a file or calibrated; measured constants of collectives limit what one ring carries. Rates are those of one
direction, since an all-reduce sends and receives at once. For what the view cannot tell, `measured` holds
all-reduce bandwidths of whole meshes. `matrix_file` reads matrices that have no cluster behind them.

A layer of a switch or a ring is a few numbers, whatever its size: matrices of it are written out on demand only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshweave.base.errors import DescriptionError
from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.machine.links import NetworkAxis
from meshweave.describe.machine.network import FullMeshNetwork, HostsNetwork, RingNetwork, TorusNetwork
from meshweave.describe.machine.tree import TreeLevel, TreeNetwork

Matrix = tuple[tuple[int, ...], ...]
"""Bytes per second from one member of a layer (row) to another (column); 0 on the diagonal."""
MOST_MEMBERS = 4096
"""The most members of a layer whose matrix is written out."""


@dataclass(frozen=True)
class UniformPairs:
    """The same bytes per second between any two of `size` members."""

    size: int
    rate: int

    @property
    def least(self) -> int:
        """Return the least bytes per second between two members that have a link."""
        return self.rate

    def rows(self) -> Matrix:
        """Return the matrix."""
        return tuple(tuple(self.rate if i != j else 0 for j in range(self.size)) for i in range(self.size))

    def least_to_others(self, members: int, step: int) -> int:
        """Return the least bytes per second of a member to its group; see `MatrixLayer.least_to_others`."""
        rest = self.size % (members * step)
        return (min(members, max(rest // step, 1)) - 1 if rest else members - 1) * self.rate


@dataclass(frozen=True)
class RingPairs:
    """`rate` bytes per second from each of `size` members to the next, and as many to the one before."""

    size: int
    rate: int

    @property
    def least(self) -> int:
        """Return the least bytes per second between two members that have a link; both links of a ring of two."""
        return self.rate * (2 if self.size == 2 else 1)

    def rows(self) -> Matrix:
        """Return the matrix."""
        rows = [[0] * self.size for _ in range(self.size)]
        for i in range(self.size):
            for j in self._neighbours(i):
                rows[i][j] += self.rate
        return tuple(map(tuple, rows))

    def _neighbours(self, i: int) -> tuple[int, ...]:
        return ((i - 1) % self.size, (i + 1) % self.size) if self.size > 1 else ()

    def least_to_others(self, members: int, step: int) -> int:
        """Return the least bytes per second of a member to its group; see `MatrixLayer.least_to_others`."""
        block = members * step
        return self.rate * min(
            sum(i // block == j // block and (i - j) % step == 0 for j in self._neighbours(i))
            for i in range(self.size)
        )


@dataclass(frozen=True)
class GivenPairs:
    """Bytes per second as a matrix gives them.

    Raises:
        DescriptionError: it is not square, or a rate is below 0.
    """

    matrix: Matrix

    def __post_init__(self) -> None:
        if {len(row) for row in self.matrix} != {self.size} or min(map(min, self.matrix)) < 0:
            raise DescriptionError("a point-to-point matrix is not square, or has a rate below 0")

    @property
    def size(self) -> int:
        """Return the number of members."""
        return len(self.matrix)

    @property
    def least(self) -> int:
        """Return the least bytes per second between two members that have a link; 0 where none have."""
        return min((rate for row in self.matrix for rate in row if rate), default=0)

    def rows(self) -> Matrix:
        """Return the matrix."""
        return self.matrix

    def least_to_others(self, members: int, step: int) -> int:
        """Return the least bytes per second of a member to its group; see `MatrixLayer.least_to_others`."""
        block, sums = members * step, []
        for i, row in enumerate(self.matrix):
            start = i // block * block + i % step
            sums.append(sum(row[start : start + block : step]) - row[i])
        return min(sums)


Pairs = UniformPairs | RingPairs | GivenPairs


@dataclass(frozen=True)
class MatrixLayer:
    """One layer of a matrix.

    Attributes:
        name: what joins the members of the layer.
        pairs: bytes per second from member to member.
        group_bytes_per_s: bytes per second from each member to all others of the layer together.
        flow_bytes_per_s: the most that one ring of devices carries across the layer, 0 for as much as there is.
            The paper's matrix has no such number, and so cannot tell what a lone ring reaches on its IC1.

    Raises:
        DescriptionError: pairs and groups have not as many members, or a rate is out of range.
    """

    name: str
    pairs: Pairs
    group_bytes_per_s: tuple[int, ...]
    flow_bytes_per_s: int = 0

    def __post_init__(self) -> None:
        if not self.size or self.pairs.size != self.size:
            raise DescriptionError(
                f"layer {self.name}: {self.pairs.size} members have rates of pairs, {self.size} group bandwidths"
            )
        rate = 0 if isinstance(self.pairs, GivenPairs) else self.pairs.rate
        if min(self.group_bytes_per_s) < 1 or rate < 0:
            raise DescriptionError(
                f"layer {self.name}: group bandwidths are at least 1 byte per second, others at least 0"
            )

    @classmethod
    def uniform(cls, name: str, size: int, p2p: int, group: int, flow: int = 0) -> MatrixLayer:
        """Return a layer whose members are all alike.

        Args:
            p2p: bytes per second between any two members.
            group: bytes per second of a member to all others together.
            flow: as `flow_bytes_per_s`.
        """
        return cls(name, UniformPairs(size, p2p), (group,) * size, flow)

    @classmethod
    def ring(cls, name: str, size: int, link: int, flow: int = 0) -> MatrixLayer:
        """Return a layer of a ring, in which each member has a link to the next and one to the one before."""
        return cls(name, RingPairs(size, link), (2 * link,) * size, flow)

    @property
    def p2p_bytes_per_s(self) -> Matrix:
        """Return the point-to-point matrix. Raises DescriptionError above `MOST_MEMBERS` members."""
        if self.size > MOST_MEMBERS:
            raise DescriptionError(
                f"layer {self.name}: it has {self.size} members; a matrix of more than {MOST_MEMBERS} is not "
                "written out"
            )
        return self.pairs.rows()

    def least_to_others(self, members: int, step: int) -> int:
        """Return the least bytes per second of a member to all others of its group together.

        A group has `members`, each `step` places after the one before, so that `step` groups take turns in each
        `members * step` members of the layer.
        """
        return self.pairs.least_to_others(members, step)

    @property
    def size(self) -> int:
        """Return the number of members of the layer in one member of the layer above."""
        return len(self.group_bytes_per_s)


@dataclass(frozen=True)
class MeasuredBandwidth:
    """Measured all-reduce bandwidths of DeviceMesh(d1, d2): bytes of the reduced tensor per second.

    `first` is that of the groups along the first dimension, `second` along the second; None for a dimension
    of 1.
    """

    mesh_shape: tuple[int, int]
    first: int | None
    second: int | None


@dataclass(frozen=True)
class CommunicationMatrix:
    """Layers of a machine, the outermost first, and what was measured of whole meshes.

    Raises:
        DescriptionError: there is no layer, or a measured mesh has another number of devices.
    """

    name: str
    layers: tuple[MatrixLayer, ...]
    measured: tuple[MeasuredBandwidth, ...] = ()

    def __post_init__(self) -> None:
        if not self.layers:
            raise DescriptionError(f"matrix {self.name}: layers is empty; give one at least")
        for known in self.measured:
            if math.prod(known.mesh_shape) != self.num_devices:
                raise DescriptionError(
                    f"matrix {self.name}: the measured mesh {known.mesh_shape} does not have its "
                    f"{self.num_devices} devices"
                )

    @property
    def num_devices(self) -> int:
        """Return the number of devices: the product of the sizes of all layers."""
        return math.prod(layer.size for layer in self.layers)

    def devices_below(self, number: int) -> int:
        """Return the number of devices in one member of a layer, counted from 0, the outermost."""
        return math.prod(layer.size for layer in self.layers[number + 1 :])

    def measured_on(self, mesh_shape: tuple[int, int]) -> MeasuredBandwidth | None:
        """Return what was measured on a mesh, if anything was."""
        return next((known for known in self.measured if known.mesh_shape == mesh_shape), None)

    def with_measured(self, measured: tuple[MeasuredBandwidth, ...]) -> CommunicationMatrix:
        """Return the matrix with measured bandwidths."""
        return replace(self, measured=measured)


def communication_matrix(cluster: Cluster, shape: tuple[int, ...] | None = None) -> CommunicationMatrix:
    """Return the matrix of a cluster: one layer per level of its network.

    A switch and a ring have one layer, hosts and packages two, a tree one per level, a torus one per axis;
    layers of one member are left out.

    Args:
        shape: the shape of a torus that may have several (default: the one nearest to a cube).

    Raises:
        DescriptionError: `shape` is no shape of the torus.
    """
    layers = tuple(layer for layer in _layers(cluster, shape) if layer.size > 1)
    if not layers:
        layers = (MatrixLayer.uniform("device", 1, 0, 1),)
    return CommunicationMatrix(cluster.name, layers)


def _layers(cluster: Cluster, shape: tuple[int, ...] | None) -> Iterator[MatrixLayer]:
    network = cluster.network
    match network:
        case TorusNetwork():
            yield from _torus_layers(network, shape)
        case HostsNetwork():
            for axis, size, ports in (
                (network.nic, network.num_hosts, network.nics_per_host),
                (network.intra, network.chips_per_host, 1),
            ):
                port = ports * int(axis.link_bytes_per_s)
                yield MatrixLayer.uniform(axis.name, size, port, port, _flow(axis))
        case FullMeshNetwork():
            for axis, size, links in (
                (network.link, network.num_packages, network.chips_per_package),
                (network.inner, network.chips_per_package, 1),
            ):
                yield _pairs_layer(axis, size, links)
        case TreeNetwork():
            ports = min((int(x.child_bytes_per_s) for x in network.levels[:1] if x.direct), default=0)
            for number in range(len(network.levels) - 1, -1, -1):
                yield _tree_layer(network.levels[number], ports if number else 0)
        case RingNetwork():
            link = network.link
            yield MatrixLayer.ring(link.name, network.size, int(link.link_bytes_per_s), _flow(link))
        case _:
            axis = network.link
            port = int(axis.link_bytes_per_s)
            yield MatrixLayer.uniform(axis.name, network.size, port, port, _flow(axis))


def _torus_layers(network: TorusNetwork, shape: tuple[int, ...] | None) -> Iterator[MatrixLayer]:
    if shape is None:
        shape = network.cube
    if math.prod(shape) != network.chips or shape not in network.mesh_shapes(len(shape)):
        raise DescriptionError(f"a torus of {network.chips} chips has no shape {shape}")
    below = network.chips
    for i, size in enumerate(shape):
        below //= size
        axis = network.axis(i, len(shape), shape)
        yield MatrixLayer.ring(axis.name, size, below * int(axis.link_bytes_per_s), _flow(axis))


def _tree_layer(level: TreeLevel, port: int) -> MatrixLayer:
    """Return the layer of a level of a tree; `port` is the rate of a chip's own port to it, 0 for no limit."""
    if level.direct is not None:
        return _pairs_layer(level.direct, level.fanout, 1)
    link = int(level.child_bytes_per_s)
    flow = min(_flow(replace(level.axis, link_bytes_per_s=link)), link)
    return MatrixLayer.uniform(level.axis.name, level.fanout, link, link, min(flow, port or flow))


def _pairs_layer(axis: NetworkAxis, size: int, links: int) -> MatrixLayer:
    """Return a layer of which any two members have as many links of their own."""
    pair = links * int(axis.link_bytes_per_s)
    return MatrixLayer.uniform(axis.name, size, pair, max(size - 1, 1) * pair, _flow(axis))


def _flow(axis: NetworkAxis) -> int:
    """Return the bytes per second into a device of one ring over links of this kind, as prices have it."""
    links = axis.num_directions * axis.link_bytes_per_s
    return max(int(min(links, axis.comm("all_reduce").bytes_per_s)), 1)
