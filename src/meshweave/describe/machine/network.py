"""Networks between chips: the links that each mesh axis runs over.

A network holds rates and constants; `cost` turns them into times. A collective among P chips of one mesh axis
takes `launch_s + (P - 1) (sync_s + shard_bytes / bytes_per_s)` (MeshSlice, ISCA '25, section 3.2.2).

Every network has:

- `num_chips`;
- `mesh_shapes(num_dims)`: the shapes of the meshes of `num_dims` axes that it carries;
- `axis(i, num_dims, shape)`: the links that mesh axis `i` runs over (`cost.machine` counts who shares them);
- `with_chips(chips)`: the same network with another number of chips, or DescriptionError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Self

from meshweave.base.errors import DescriptionError, LayoutError
from meshweave.describe.layout.shapes import factorisations
from meshweave.describe.machine.links import (
    AnyShapeNetwork,
    NetworkAxis,
    check_axis,
    check_dims,
    slowest_axis,
)
from meshweave.describe.machine.tree import TreeNetwork


@dataclass(frozen=True)
class TorusNetwork:
    """A torus: chips in a grid, each dimension of it a ring. `axes` are the links of each dimension.

    `shape` is its fixed shape, or None if it is `reconfigurable` into any shape of `min_chips` to `max_chips`. A
    mesh axis that spans several torus axes is a ring through them at the pace of the slowest. `slices` is the link
    of each chip to a data-centre network that joins several such tori; None where nothing joins them. `sizes` are
    the numbers of chips that one is sold with, rising; above the last one its multiples are. Empty: any number.

    Raises:
        DescriptionError: shape, axes and number of chips do not agree.
    """

    axes: tuple[NetworkAxis, ...]
    shape: tuple[int, ...] | None
    chips: int
    reconfigurable: bool = False
    min_chips: int = 1
    max_chips: int = 65536
    slices: NetworkAxis | None = None
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.axes:
            raise DescriptionError("torus: axes is empty; give one axis per torus dimension")
        if self.reconfigurable:
            if self.shape is not None:
                raise DescriptionError("torus: give either a shape or reconfigurable = true, not both")
            if not self.min_chips <= self.chips <= self.max_chips:
                raise DescriptionError(
                    f"torus: {self.chips} chips; give a number from {self.min_chips} to {self.max_chips}"
                )
            return
        if self.shape is None or len(self.shape) != len(self.axes) or math.prod(self.shape) != self.chips:
            raise DescriptionError(
                f"torus: shape {self.shape} does not fit {len(self.axes)} axes and {self.chips} chips; "
                "give one size per axis with that product"
            )

    @property
    def num_chips(self) -> int:
        """Return the number of chips of the whole network."""
        return self.chips

    @property
    def cube(self) -> tuple[int, ...]:
        """Return its shape; of a reconfigurable torus the one nearest to a cube."""
        return self.shape or min(factorisations(self.chips, len(self.axes)), key=sum)

    def _axis_assignments(self, num_dims: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Yield each assignment of torus axes to mesh axes, with the mesh shape that it makes."""
        assert self.shape is not None
        used = min(num_dims, len(self.shape))
        for owner in product(range(num_dims), repeat=len(self.shape)):
            if len(set(owner)) == used:
                sizes = zip(owner, self.shape, strict=True)
                shape = [1] * num_dims
                for i, size in sizes:
                    shape[i] *= size
                yield owner, tuple(shape)

    def mesh_shapes(self, num_dims: int = 2) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of meshes over all `chips` whose neighbours are torus neighbours.

        Each has `num_dims` sizes; (2, 4) and (4, 2) are two shapes. On a torus of fixed shape a mesh axis spans
        one or more whole torus axes; where there are more mesh axes than torus axes, those left over have size
        1. On a reconfigurable torus every shape with `chips` as its product is there, also with sizes of 1.

        Raises:
            LayoutError: `num_dims` is below 1, or above the axes of a reconfigurable torus.
        """
        check_dims(num_dims)
        if self.shape is not None:
            return tuple(dict.fromkeys(shape for _, shape in self._axis_assignments(num_dims)))
        if num_dims > len(self.axes):
            raise LayoutError(f"a mesh of {num_dims} axes does not fit a torus of {len(self.axes)}")
        return factorisations(self.chips, num_dims)

    def axis(self, i: int, num_dims: int = 2, shape: tuple[int, ...] | None = None) -> NetworkAxis:
        """Return the links that mesh axis `i` of `num_dims` runs over: the slowest torus axis under it.

        `shape` None takes the first mesh of so many axes that the torus carries. A mesh axis of size 1 under
        which no torus axis lies has the slowest of all. Of a reconfigurable torus mesh axis `i` is torus axis
        `i`.

        Raises:
            LayoutError: the torus cannot carry that mesh, or the mesh has no axis `i`.
        """
        check_axis(i, num_dims, shape, self.num_chips)
        if self.shape is None:
            if num_dims > len(self.axes):
                raise LayoutError(f"a mesh of {num_dims} axes does not fit a torus of {len(self.axes)}")
            return self.axes[i]
        for owner, folded in self._axis_assignments(num_dims):
            if shape is None or folded == shape:
                spanned = [axis for axis, j in zip(self.axes, owner, strict=True) if j == i]
                return slowest_axis(spanned or self.axes)
        raise LayoutError(f"a torus of shape {self.shape} does not carry a mesh of shape {shape}")

    def with_chips(self, chips: int) -> TorusNetwork | HostsNetwork:
        """Return the torus with another number of chips; several tori, as hosts, where one is too small.

        Such a host has the links of the first torus axis inside, both directions of it as one, and `slices` as
        the NIC of each chip. One reconfigurable torus takes any number of chips up to `max_chips`, sold or not;
        `check_sold` knows which are sold.

        Raises:
            DescriptionError: the shape is fixed, or neither one torus nor several equal ones have so many chips.
        """
        if self.slices is not None and chips > self.max_chips:
            self.check_sold(chips)
            each, axis = self._slice_of(chips), self.axes[0]
            rate = axis.link_bytes_per_s * axis.num_directions
            intra = replace(axis, link_bytes_per_s=rate, num_directions=1)
            return HostsNetwork(chips // each, each, intra, each, self.slices)
        if not self.reconfigurable and chips != self.chips:
            raise DescriptionError(
                f"the torus has the fixed shape {self.shape}; it cannot have {chips} chips"
            )
        return replace(self, chips=chips)

    def check_sold(self, chips: int) -> None:
        """Raise DescriptionError, with the nearest sizes, if `chips` chips are not sold, as one torus or several.

        Numbers below `min_chips`, or above `max_chips` where `slices` is None, pass: `with_chips` refuses them.
        """
        is_beyond = chips < self.min_chips or (chips > self.max_chips and self.slices is None)
        if is_beyond or self._slice_of(chips):
            return
        nearest = (range(chips - 1, 0, -1), range(chips + 1, chips + self.max_chips + 1))
        near = [next(filter(self._slice_of, sizes), 0) for sizes in nearest]
        sold = ", ".join(map(str, self.sizes)) or "any number of"
        if self.sizes and self.sizes[-1] < self.max_chips:
            sold += f" and multiples of {self.sizes[-1]}"
        raise DescriptionError(
            f"{chips} chips are neither one slice nor several equal ones: slices are sold with {sold} chips; give "
            f"{' or '.join(str(size) for size in near if size)}"
        )

    def _slice_of(self, chips: int) -> int:
        """Return the chips of each torus of so many: the most that are sold, at least half of all; 0: none."""
        if chips <= self.max_chips:
            return chips if chips >= self.min_chips and self._is_sold(chips) else 0
        most = self.max_chips if self.slices is not None else 0
        sizes = range(most, (most - 1) // 2, -1)
        return next((size for size in sizes if size and chips % size == 0 and self._is_sold(size)), 0)

    def _is_sold(self, chips: int) -> bool:
        last = self.sizes[-1] if self.sizes else 1
        return not self.sizes or chips in self.sizes or (chips > last and chips % last == 0)


@dataclass(frozen=True)
class _OneLinkNetwork(AnyShapeNetwork):
    """`size` chips with equal links: every mesh axis runs over `link`."""

    link: NetworkAxis
    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise DescriptionError(f"network: size is {self.size}; give at least 1 chip")

    @property
    def num_chips(self) -> int:
        """Return the number of chips of the whole network."""
        return self.size

    def axis(self, i: int, num_dims: int = 2, shape: tuple[int, ...] | None = None) -> NetworkAxis:
        """Return the links that mesh axis `i` of `num_dims` runs over: the same for all axes.

        Raises:
            LayoutError: the mesh has no axis `i`, or `shape` does not use all chips.
        """
        check_axis(i, num_dims, shape, self.num_chips)
        return self.link

    def with_chips(self, chips: int) -> Self:
        """Return the network with another number of chips. Raises DescriptionError for less than one."""
        return replace(self, size=chips)


@dataclass(frozen=True)
class RingNetwork(_OneLinkNetwork):
    """`size` chips in one ring, two links each."""


@dataclass(frozen=True)
class SwitchNetwork(_OneLinkNetwork):
    """`size` chips, each with one full-duplex port into a switch that never blocks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_one_way("switch", self.link)


def _require_one_way(where: str, axis: NetworkAxis) -> None:
    """Raise DescriptionError for links by one port of a chip, if rings are to run in two directions at once."""
    if axis.num_directions > 1:
        raise DescriptionError(
            f"{where}: axis {axis.name} has ways = 2, and both directions of a ring share the one port of a chip; "
            "give 1"
        )


@dataclass(frozen=True)
class HostsNetwork(AnyShapeNetwork):
    """Hosts of several chips: `intra` joins the chips of a host, `nics_per_host` NICs join the hosts.

    Ranks are placed host by host. `nic` describes one NIC; `cost` and `simulate` count how many transfers share
    it, which follows from the placement of ranks.
    """

    num_hosts: int
    chips_per_host: int
    intra: NetworkAxis
    nics_per_host: int
    nic: NetworkAxis

    def __post_init__(self) -> None:
        if min(self.num_hosts, self.chips_per_host, self.nics_per_host) < 1:
            raise DescriptionError("hosts: num_hosts, chips_per_host and nics_per_host are each at least 1")
        _require_one_way("hosts: intra", self.intra)

    @property
    def num_chips(self) -> int:
        """Return the number of chips of the whole network."""
        return self.num_hosts * self.chips_per_host

    def axis(self, i: int, num_dims: int = 2, shape: tuple[int, ...] | None = None) -> NetworkAxis:
        """Return `intra` if every group of mesh axis `i` (of `num_dims`) stays within a host, else `nic`.

        Without a shape, the last of several mesh axes is taken to be the one within a host. With a shape no group
        that has neighbours in a host is faster than `intra`.

        Raises:
            LayoutError: the mesh has no axis `i`, or `shape` does not use all chips.
        """
        check_axis(i, num_dims, shape, self.num_chips)
        if shape is None:
            return self.intra if self.num_hosts == 1 or 0 < i == num_dims - 1 else self.nic
        if self.chips_per_host % math.prod(shape[i:]) == 0 or shape[i] == 1:
            return self.intra
        stride, flows = math.prod(shape[i + 1 :]), self.nic.num_directions
        inside = self.intra.ring_bytes_per_s / flows if stride < self.chips_per_host else math.inf
        return replace(self.nic, link_bytes_per_s=max(min(self.nic.link_bytes_per_s, inside), 1.0))

    def with_chips(self, chips: int) -> HostsNetwork:
        """Return the network of `chips` chips on the fewest hosts that they fill evenly.

        Where a part of each of several hosts is used (64 of 72), their NICs are used in the same share. One host
        keeps all of its NICs.

        Raises:
            DescriptionError: there is less than one chip, or over half of each of several hosts would be idle.
        """
        most = self.chips_per_host
        if chips <= most:
            return replace(self, num_hosts=1, chips_per_host=chips)
        used = next(size for size in range(most, 0, -1) if chips % size == 0)
        if 2 * used < most:
            near = [each for each in (chips // most * most, -(-chips // most) * most) if each]
            raise DescriptionError(
                f"{chips} chips do not fill hosts of {most} evenly; give {' or '.join(map(str, near))}"
            )
        nics = max(self.nics_per_host * used // most, 1)
        return replace(self, num_hosts=chips // used, chips_per_host=used, nics_per_host=nics)


@dataclass(frozen=True)
class FullMeshNetwork(AnyShapeNetwork):
    """Packages of several chips, with a link of its own for every pair of chips that is joined.

    `inner` joins any two chips of a package; `link` joins the chips at the same position of any two packages. A
    message to another position of another package crosses its own package first. With one chip to a package,
    every pair of chips has a link. Ranks are placed package by package.
    """

    num_packages: int
    chips_per_package: int
    inner: NetworkAxis
    link: NetworkAxis

    def __post_init__(self) -> None:
        if min(self.num_packages, self.chips_per_package) < 1:
            raise DescriptionError("full mesh: num_packages and chips_per_package are each at least 1")

    @property
    def num_chips(self) -> int:
        """Return the number of chips of the whole network."""
        return self.num_packages * self.chips_per_package

    def axis(self, i: int, num_dims: int = 2, shape: tuple[int, ...] | None = None) -> NetworkAxis:
        """Return `inner` if every group of mesh axis `i` (of `num_dims`) stays within a package, else `link`.

        Without a shape it is `link` where there are several packages. With a shape it is `link` at the rate
        of `inner` where that is slower, and groups cross packages, too.

        Raises:
            LayoutError: the mesh has no axis `i`, or `shape` does not use all chips.
        """
        check_axis(i, num_dims, shape, self.num_chips)
        if shape is None:
            return self.inner if self.num_packages == 1 else self.link
        if self.chips_per_package % math.prod(shape[i:]) == 0 or shape[i] == 1:
            return self.inner
        is_straight = math.prod(shape[i + 1 :]) % self.chips_per_package == 0
        inside = math.inf if is_straight else self.inner.ring_bytes_per_s / self.link.num_directions
        return replace(self.link, link_bytes_per_s=max(min(self.link.link_bytes_per_s, inside), 1.0))

    def with_chips(self, chips: int) -> FullMeshNetwork:
        """Return the network of whole packages, or of one package of fewer chips.

        Raises:
            DescriptionError: `chips` is neither.
        """
        if chips <= self.chips_per_package:
            return replace(self, num_packages=1, chips_per_package=chips)
        if chips % self.chips_per_package:
            raise DescriptionError(
                f"{chips} chips are not whole packages; give a multiple of {self.chips_per_package} or fewer"
            )
        return replace(self, num_packages=chips // self.chips_per_package)


Network = TorusNetwork | RingNetwork | SwitchNetwork | HostsNetwork | TreeNetwork | FullMeshNetwork


def with_axes(network: Network, change: Callable[[NetworkAxis], NetworkAxis]) -> Network:
    """Return the network with `change(axis)` in place of every `NetworkAxis` that it has."""
    match network:
        case TorusNetwork():
            joined = network.slices and change(network.slices)
            return replace(network, axes=tuple(change(axis) for axis in network.axes), slices=joined)
        case HostsNetwork():
            return replace(network, intra=change(network.intra), nic=change(network.nic))
        case FullMeshNetwork():
            return replace(network, inner=change(network.inner), link=change(network.link))
        case TreeNetwork():
            levels = (
                replace(x, axis=change(x.axis), direct=x.direct and change(x.direct)) for x in network.levels
            )
            return replace(network, levels=tuple(levels))
        case RingNetwork() | SwitchNetwork():
            return replace(network, link=change(network.link))
