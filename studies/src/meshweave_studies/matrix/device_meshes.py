"""The communication of tensor parallelism on DeviceMesh(d1, d2): equations 2 to 4 of ATP (Cheng et al.).

The first dimension of the mesh spans the outer layers of the communication matrix, the second the inner ones.
Layers here are those of the matrix; a layer of a model is a transformer layer.
Along a dimension of d devices, an all-reduce reaches

    B = d / (2 (d - 1)) B'    (equation 4, the bandwidth term of Rabenseifner's algorithm)

of the reduced tensor per second, where B' is the least bandwidth of the layers that its groups cross
(equation 3). Groups of the first dimension leave a member of a layer side by side and share its bandwidth:
min(d2, devices in that member) of them. Equation 3 as printed divides by d2 also where a member has fewer
devices; but the paper's own use of it on machines of one layer (section 5.4: B1' = B2' = GroupBW) does not,
nor could more groups leave a member than it has devices.

A layer joins the n members of a group in it by n - 1 links of each at most, which is less than the group
bandwidth where a group has few members: the point-to-point correction. On figure 7(a), DeviceMesh(8, 2), it
turns B2' from 600 into 200.

A transformer layer all-reduces, for its products into wide tensors (QKV, first of the FFN), outputs over d1
along the second dimension, and for those into hidden ones, outputs over d2 along the first; once forward,
once backward:

    T = 2 L b s (7 h / (d1 B2) + 2 h / (d2 B1))    (equation 2, for a GPT, in elements)

All values are fractions: equal costs compare equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from meshweave.base.errors import LayoutError, UnsupportedError
from meshweave.base.units import dtype_bytes
from meshweave.describe.layout.shapes import factorisations
from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.machine.network import TorusNetwork
from meshweave.describe.model.transformer import Transformer
from meshweave.describe.model.workload import Workload
from meshweave_studies.matrix.hierarchy import (
    CommunicationMatrix,
    MeasuredBandwidth,
    communication_matrix,
)

MeshShape = tuple[int, int]
Sharing = Literal["devices", "printed"]
"""How many groups share a layer: as many as leave a member of it, or d2 as equation 3 is printed."""


def device_meshes(num_devices: int) -> tuple[MeshShape, ...]:
    """Return all meshes (d1, d2) of `num_devices` devices, the smallest d2 first: ATP-1, ATP-2, ..."""
    return tuple((d1, d2) for d1, d2 in reversed(factorisations(num_devices, 2)))


@dataclass(frozen=True)
class MeshBandwidth:
    """All-reduce bandwidths of DeviceMesh(d1, d2), in bytes per second.

    Attributes:
        first_link, second_link: B1' and B2', what a device's links carry; None for a dimension of 1.
        first, second: B1 and B2, of the reduced tensor; None for a dimension of 1.
        measured: whether B1 and B2 were measured; B1' and B2' then follow from them.
        first_layer, second_layer: names of the layers that set B1' and B2'; "" where these were measured, and for
            a dimension of 1.
    """

    mesh_shape: MeshShape
    first_link: Fraction | None
    second_link: Fraction | None
    first: Fraction | None
    second: Fraction | None
    measured: bool = False
    first_layer: str = ""
    second_layer: str = ""


@dataclass(frozen=True)
class MeshTime:
    """The communication time of a model on a device mesh, by equation 2.

    Attributes:
        first_s: seconds along the first dimension of the mesh, for products into hidden features.
        second_s: seconds along the second one, for products into wide features.
    """

    bandwidth: MeshBandwidth
    first_s: Fraction
    second_s: Fraction

    @property
    def mesh_shape(self) -> MeshShape:
        """Return (d1, d2)."""
        return self.bandwidth.mesh_shape

    @property
    def total_s(self) -> Fraction:
        """Return the seconds of all all-reduces, one after another."""
        return self.first_s + self.second_s


def algorithm_bandwidth(link: Fraction, size: int) -> Fraction:
    """Return what an all-reduce among `size` devices reaches over links of a bandwidth (equation 4)."""
    return link * Fraction(size, 2 * (size - 1))


def link_bandwidth(algorithm: Fraction, size: int) -> Fraction:
    """Return the bandwidth of links over which an all-reduce reaches `algorithm`: equation 4 turned round."""
    return algorithm * Fraction(2 * (size - 1), size)


def mesh_bandwidth(
    matrix: CommunicationMatrix,
    mesh_shape: MeshShape,
    *,
    corrected: bool = True,
    sharing: Sharing = "devices",
    with_equation_4: bool = True,
) -> MeshBandwidth:
    """Return the all-reduce bandwidths along both dimensions of a mesh (equations 3 and 4).

    Bandwidths that the matrix has as measured on this mesh are taken as they are.

    Args:
        corrected: whether point-to-point bandwidths limit those of groups, and flow limits those of rings.
        sharing: how many groups of the first dimension share a layer.
        with_equation_4: False takes B = B'.

    Raises:
        LayoutError: the mesh has another number of devices than the matrix.
    """
    d1, d2 = mesh_shape
    if d1 * d2 != matrix.num_devices:
        raise LayoutError(
            f"mesh {d1}x{d2} has {d1 * d2} devices, {matrix.name} has {matrix.num_devices}; give one of as many"
        )
    measured = matrix.measured_on(mesh_shape)
    if measured is not None:
        return _measured_bandwidth(measured)
    links: list[Fraction | None] = []
    names: list[str] = []
    for size, stride in ((d1, d2), (d2, 1)):
        layers = list(_layer_bandwidths(matrix, size, stride, corrected, sharing)) if size > 1 else []
        rate, name = min(layers, key=lambda pair: pair[0]) if layers else (None, "")
        links.append(rate)
        names.append(name)
    first, second = (
        link if link is None or not with_equation_4 else algorithm_bandwidth(link, size)
        for link, size in zip(links, mesh_shape, strict=True)
    )
    return MeshBandwidth(mesh_shape, links[0], links[1], first, second, False, names[0], names[1])


def _measured_bandwidth(measured: MeasuredBandwidth) -> MeshBandwidth:
    links: list[Fraction | None] = []
    for rate, size in zip((measured.first, measured.second), measured.mesh_shape, strict=True):
        links.append(None if rate is None else link_bandwidth(Fraction(rate), size))
    first, second = (None if rate is None else Fraction(rate) for rate in (measured.first, measured.second))
    return MeshBandwidth(measured.mesh_shape, links[0], links[1], first, second, True)


def _layer_bandwidths(
    matrix: CommunicationMatrix, size: int, stride: int, corrected: bool, sharing: Sharing
) -> Iterator[tuple[Fraction, str]]:
    """Yield B' of each layer that groups of `size` devices, `stride` apart, cross, with the layer's name."""
    for number, layer in enumerate(matrix.layers):
        below = matrix.devices_below(number)
        above = below * layer.size
        # A group's members of a layer are `stride` devices apart, within blocks of size * stride devices.
        members = -(-min(size * stride, above) // max(stride, below))
        if stride >= above or size * stride <= below or members < 2:
            continue
        flows = stride if sharing == "printed" else min(stride, below)
        yield _limit(layer.group_bytes_per_s, flows), layer.name
        if corrected:
            step = max(stride // below, 1)
            links = layer.least_to_others(members, step)
            # Without links of their own, their bytes pass through the members between, beside those of others.
            yield (
                (_limit((links,), flows) if links else _limit(layer.group_bytes_per_s, flows * step)),
                layer.name,
            )
            if layer.flow_bytes_per_s:
                yield Fraction(layer.flow_bytes_per_s), layer.name


def _limit(rates: tuple[int, ...], flows: int) -> Fraction:
    return Fraction(min(rates), flows)


def communication_s(
    bandwidth: MeshBandwidth, model: Transformer, workload: Workload, layers: int = 1
) -> MeshTime:
    """Return the seconds of all-reduces of some transformer layers, forward and backward (equation 2)."""
    d1, d2 = bandwidth.mesh_shape
    wide = narrow = 0
    for layer in model.fc_layers():
        if layer.name in ("qkv", "ff1"):
            wide += layer.out_features
        else:
            narrow += layer.out_features
    num_bytes = 2 * layers * workload.tokens * dtype_bytes(workload.dtype)
    first = Fraction(0) if bandwidth.first is None else num_bytes * narrow / (d2 * bandwidth.first)
    second = Fraction(0) if bandwidth.second is None else num_bytes * wide / (d1 * bandwidth.second)
    return MeshTime(bandwidth, first, second)


def rank_meshes(
    source: CommunicationMatrix | Cluster,
    model: Transformer,
    workload: Workload,
    *,
    layers: int = 1,
    measured: tuple[MeasuredBandwidth, ...] = (),
    corrected: bool = True,
    sharing: Sharing = "devices",
    with_equation_4: bool = True,
) -> list[MeshTime]:
    """Return all meshes of a cluster or matrix with their communication times, the fastest first (section 3.5).

    Args:
        source: a matrix, or a cluster; a torus that comes in several shapes has that of each mesh.
        layers: how many transformer layers.
        measured: what was measured on meshes of a cluster; a matrix has its own.
        corrected: as in `mesh_bandwidth`.
        sharing: as in `mesh_bandwidth`.
        with_equation_4: as in `mesh_bandwidth`.

    Raises:
        UnsupportedError: the model has experts, which equation 2 does not know.
    """
    if model.is_routed:
        raise UnsupportedError(
            f"{model.name} has experts, which ATP's equation 2 does not know; give a dense model"
        )
    cluster = None if isinstance(source, CommunicationMatrix) else source
    if isinstance(source, CommunicationMatrix):
        matrix = source
    else:
        matrix = communication_matrix(source).with_measured(measured)
    times = []
    for mesh in device_meshes(matrix.num_devices if cluster is None else cluster.num_chips):
        if cluster is not None and comes_in_shapes(cluster):
            matrix = communication_matrix(cluster, mesh).with_measured(measured)
        bandwidth = mesh_bandwidth(
            matrix, mesh, corrected=corrected, sharing=sharing, with_equation_4=with_equation_4
        )
        times.append(communication_s(bandwidth, model, workload, layers))
    return sorted(times, key=lambda time: time.total_s)


def comes_in_shapes(cluster: Cluster) -> bool:
    """Return whether a cluster is a torus of two axes or more that takes the shape of each mesh."""
    network = cluster.network
    return isinstance(network, TorusNetwork) and network.shape is None and len(network.axes) >= 2
