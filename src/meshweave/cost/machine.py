"""A cluster with a program's meshes laid on it: which constants a mesh axis runs at."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from meshweave.base.errors import LayoutError, UnsupportedError
from meshweave.base.units import to_ps
from meshweave.cost.flows import Counts, Flows, Links, TorusLinks, least_rate, torus_flows
from meshweave.cost.placed import PlacedMeshes
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.machine.cluster import Cluster, described
from meshweave.describe.machine.links import ONE_DIRECTION, CommConstants, NetworkAxis, slowest_axis
from meshweave.describe.machine.network import (
    FullMeshNetwork,
    HostsNetwork,
    RingNetwork,
    SwitchNetwork,
    TorusNetwork,
)
from meshweave.describe.machine.tree import TreeNetwork
from meshweave.ir.program import Program

_MOST_PER_BYTE = 1 << 20
_ONE = np.ones(1, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class OneSidedConstants:
    """Constants of one-sided transfers between two chips.

    Attributes:
        launch_ps, sync_ps: picoseconds that pass before bytes flow.
        rate: bytes per second at most.
        flops_per_byte: FLOPs that each byte takes from the products of the chip that issued the transfer.
    """

    launch_ps: int
    sync_ps: int
    rate: int
    flops_per_byte: int = 0

    @property
    def fixed_ps(self) -> int:
        """Return the picoseconds before bytes flow: launch and synchronisation."""
        return self.launch_ps + self.sync_ps


@dataclass(frozen=True)
class Machine(PlacedMeshes):
    """A cluster on which `meshes` lie, with the constants that their axes run at.

    A mesh that a torus does not carry with neighbours next to each other is an error, unless it is `logical`: its
    messages then take the real links of several hops, and its axes have the constants of the slowest axis of the
    network. Closed forms know how many messages of an axis pass each link, as on a `RingNetwork` (`flows`).

    `placement` is the chip of each global rank, a permutation of all chips. Paths, links between two ranks and
    the hosts of groups follow it. The network axis of a mesh axis does not, except for its share of links.

    Raises:
        LayoutError: there are more ranks than chips, or the placement is no permutation.
    """

    @classmethod
    def of(cls, cluster: Cluster | str | Path, program: Program, logical: bool = False) -> Machine:
        """Return the machine of a program: its meshes, and those of programs that it includes, on `cluster`.

        With `logical` meshes that a torus does not carry are allowed. Raises LayoutError as the class does.

        Args:
            cluster: a cluster, or its name or file.
        """
        return cls(described(cluster), Program.given(program).expanded.meshes, logical)

    @classmethod
    def under(cls, given: Machine | Cluster | str | Path, program: Program) -> Machine:
        """Return a machine as it is; of a cluster, its name or file the machine of a program (`of`)."""
        return given if isinstance(given, Machine) else cls.of(given, program)

    def require(self, program: Program) -> None:
        """Raise LayoutError where a mesh of `program` differs from its namesake here, or a rank has no chip.

        `program` is one that is expanded.
        """
        here = {mesh.name: mesh for mesh in self.meshes}
        for mesh in program.meshes:
            if here.get(mesh.name, mesh) != mesh:
                raise LayoutError(
                    f"the machine was made for another mesh {mesh.name} than that of {program.name}; "
                    "make it for this program, with Machine.of(cluster, program)"
                )
        highest = max(program.ranks, default=0)
        if highest >= self.cluster.num_chips:
            raise LayoutError(
                f"{highest + 1} ranks do not fit the {self.cluster.num_chips} chips of {self.cluster.name}"
            )

    @property
    def copies(self) -> Mapping[str, int]:
        """Return {}: all members of the groups of every mesh axis are simulated (see `FoldedMachine`)."""
        return {}

    @property
    def priced(self) -> Machine:
        """Return the machine whose groups are priced: this one (of a folded machine, the whole one)."""
        return self

    @cached_property
    def _axes(self) -> dict[str, tuple[NetworkAxis, NetworkAxis, NetworkAxis]]:
        """Return the network axis under each mesh axis: with its links to itself, and with its share of them.

        The third has the share of messages that go one way round.
        """
        out = {}
        for mesh in self.meshes:
            is_whole = mesh.num_ranks == self.cluster.num_chips
            for i, axis in enumerate(mesh.axes):
                rows = self.groups(f"{mesh.name}.{axis}")
                self._require_neighbours(mesh, axis, rows)
                own = self._under(rows) or self._network_axis(
                    i, len(mesh.shape), mesh.shape if is_whole else None
                )
                out[f"{mesh.name}.{axis}"] = self._with_shares(own, rows)
            ranks = self.groups(mesh.name)
            of_all = (None if is_whole else self._under(ranks)) or self._network_axis(
                0, len(mesh.shape), None
            )
            out[mesh.name] = self._with_shares(of_all, ranks)
        return out

    def _require_neighbours(self, mesh: Mesh, axis: str, groups: Counts) -> None:
        """Raise LayoutError where a mesh has its ranks in another order, along which a torus has no links."""
        if self.logical or self.placement is not None or sorted(mesh.ranks) == list(mesh.ranks):
            return
        if not isinstance(self.cluster.network, TorusNetwork):
            return
        for one, other in np.stack([groups[:, :-1], groups[:, 1:]], axis=-1).reshape(-1, 2).tolist():
            if len(hops := self.path(one, other)) > 1:
                raise LayoutError(
                    f"ranks {one} and {other} are neighbours along axis {axis} of mesh {mesh.name}, and "
                    f"{len(hops)} links apart on the torus: give its ranks in order; simulation can lay it there "
                    "as a logical mesh (logical=True), where contention shows"
                )

    def _under(self, groups: Counts) -> NetworkAxis | None:
        """Return the links under groups of ranks, shape (groups, members), on networks of levels; else None.

        Where groups are not in even blocks that lie alike, the slowest links between neighbours.
        """
        network, chips = self.cluster.network, self.cluster.num_chips
        if not isinstance(network, HostsNetwork | FullMeshNetwork | TreeNetwork):
            return None
        even = self._blocks(groups)
        is_whole = groups.size == chips and not isinstance(network, TreeNetwork)
        if even is not None and (is_whole or self._lie_alike(even)):
            return self._network_axis(1, 3, even)
        pairs = np.stack([groups, np.roll(groups, -1, axis=1)], axis=-1).reshape(-1, 2).tolist()
        return slowest_axis(list({_between(network, src, dst): None for src, dst in pairs}))

    def counted(self, name: str) -> tuple[Links, Counts]:
        """Return the links under a mesh axis or mesh, and the chips of groups that run at once, (groups, members).

        On networks of levels, where groups of one stride are in blocks of chips that all lie alike, others may run
        in all other blocks. Else these alone run. A part of a torus that takes any shape has rings of its own.
        """
        return self._counted(self.groups(name), self.axis(name))

    def _counted(self, groups: Counts, own: NetworkAxis) -> tuple[Links, Counts]:
        even, (network, chips) = self._blocks(groups), (self.cluster.network, self.cluster.num_chips)
        if even is not None and self._lie_alike(even):
            groups = np.moveaxis(np.arange(chips).reshape(even), 1, -1).reshape(-1, even[1])
        is_part = all(mesh.num_ranks < chips for mesh in self.meshes) and not self.logical
        if is_part and isinstance(network, TorusNetwork) and network.shape is None:
            alone = np.arange(groups.shape[1])[None]
            return TorusLinks(alone.shape[1:], (own.link_bytes_per_s,)), alone
        return self.links, groups if self.placement is None else np.array(self.placement)[groups]

    def _network_axis(self, i: int, num_dims: int, shape: tuple[int, ...] | None) -> NetworkAxis:
        network = self.cluster.network
        try:
            return network.axis(i, num_dims, shape)
        except LayoutError as error:
            if not isinstance(network, TorusNetwork) or num_dims < 1:
                raise
            if self.logical:
                return slowest_axis(network.axes)
            raise LayoutError(
                f"{error}; simulation can lay it there as a logical mesh (logical=True), where contention shows"
            ) from None

    def _with_shares(self, own: NetworkAxis, groups: Counts) -> tuple[NetworkAxis, NetworkAxis, NetworkAxis]:
        """Return the axes as `_axes` does: with a ring's and a message's share of the busiest link."""
        counted = self._counted(groups, own)

        def limited(both: bool) -> NetworkAxis:
            rate = max(least_rate(*counted, both=both), 1.0)  # an axis has no less
            return own if rate >= own.link_bytes_per_s else replace(own, link_bytes_per_s=rate)

        return own, limited(own.num_directions == 2), limited(False)

    def _hops(self, groups: Counts, one_way: bool) -> Flows:
        """Return the flows of rings of groups of ranks, (groups, members), on a ring or logical torus; else {}."""
        if groups.shape[1] == 1 or not (self.logical or isinstance(self.cluster.network, RingNetwork)):
            return {}
        chips = groups if self.placement is None else np.array(self.placement)[groups]
        counts = torus_flows(self._torus_shape, np.ascontiguousarray(chips), one_way)
        axes = zip(self._torus_axes, counts, strict=True)
        return {f"axis {i}": (axis.link_bytes_per_s, each) for i, (axis, each) in enumerate(axes)}

    def flows(self, name: str, one_way: bool = False) -> Flows:
        """Return {kind of link: (its bytes per second, how many messages pass each such link at once)}.

        Messages are those of all groups of the mesh axis ("tp.row") or mesh ("tp") `name`, each a ring in which
        members send to both neighbours; with `one_way`, or where rings have one direction, to the next alone.
        Kinds are "axis 0", ... of a ring or logical torus; "port" of a chip into a switch or inside a host; and
        "nics", all NICs of a host together. {} on other networks, where closed forms know of no sharing.
        """
        one_way = one_way or self.axis(name).num_directions == 1
        if (name, one_way) not in self._flows:
            self._flows[name, one_way] = self._flows_of(name, one_way)
        return self._flows[name, one_way]

    @cached_property
    def _flows(self) -> dict[tuple[str, bool], Flows]:
        return {}

    def _flows_of(self, name: str, one_way: bool) -> Flows:
        network = self.cluster.network
        if isinstance(network, SwitchNetwork):
            return {"port": (network.link.link_bytes_per_s, _ONE)}
        if isinstance(network, TorusNetwork | RingNetwork):
            return self._hops(self.groups(name), one_way)
        span = self.any_host_span(name)
        if span is None or not isinstance(network, HostsNetwork):
            return {}
        out = {}
        if span.per_host > 1:
            out["port"] = network.intra.link_bytes_per_s, _ONE
        if span.num_hosts > 1:
            rate = network.nics_per_host * network.nic.link_bytes_per_s
            out["nics"] = rate, span.groups_per_host * _ONE
        return out

    def axis(self, name: str, shared: bool = False, one_way: bool = False) -> NetworkAxis:
        """Return the network axis that a mesh axis runs over.

        Closed forms ask with `shared`; simulation with contention shares links itself.

        Args:
            name: a mesh axis, as "tp.row"; a mesh, as "tp", for the group of all its ranks; or ""
                for the axis with the slowest links, always as without `shared`.
            shared: whether links have the rate that one group of the mesh axis gets of them while
                all its groups communicate at once, instead of their own.
            one_way: with `shared`, whether all messages go round the ring in one direction; else ignored.

        Raises:
            LayoutError: a mesh does not fit the cluster's network, or none has an axis of the name.
            UnsupportedError: the machine has no meshes.
        """
        if name in self._axes:
            return self._axes[name][shared + (shared and one_way)]
        if name and self._axes:
            raise LayoutError(f"no mesh has an axis '{name}': there are {', '.join(self._axes)}")
        if not self._axes:
            raise UnsupportedError("a machine without meshes cannot place a group")
        return min((pair[0] for pair in self._axes.values()), key=lambda axis: axis.link_bytes_per_s)

    @cached_property
    def _rates(self) -> dict[tuple[str, str, bool], tuple[CommConstants, int]]:
        return {}

    def _constants_and_rate(self, axis: str, kind: str, shared: bool = False) -> tuple[CommConstants, int]:
        pair = self._rates.get((axis, kind, shared))
        if pair is None:
            network_axis = self.axis(axis, shared, kind in ONE_DIRECTION)
            constants = network_axis.comm(kind)
            rate = int(
                min(constants.bytes_per_s, network_axis.num_directions * network_axis.link_bytes_per_s)
            )
            pair = self._rates[axis, kind, shared] = constants, max(rate, 1)
        return pair

    def constants(self, axis: str, kind: str, shared: bool = False) -> CommConstants:
        """Return the constants of an operation ("all_gather", "send_recv", ...) on a mesh axis such as "tp.row".

        With `shared` they are those of one group while all groups of the mesh axis communicate at once.

        Raises:
            LayoutError: a mesh does not fit the cluster's network, or none has an axis of the name.
            UnsupportedError: the machine has no meshes.
        """
        return self._constants_and_rate(axis, kind, shared)[0]

    def rate(self, axis: str, kind: str, shared: bool = False) -> int:
        """Return the bytes per second into a chip while it runs `kind` ("all_gather", ...) on a mesh axis.

        With `shared` it is the rate of one group while all groups of the mesh axis communicate at once.

        Raises:
            LayoutError: a mesh does not fit the cluster's network, or none has an axis of the name.
            UnsupportedError: the machine has no meshes.
        """
        return self._constants_and_rate(axis, kind, shared)[1]

    def axis_between(self, src: int, dst: int) -> NetworkAxis:
        """Return the slowest links on the path from global rank `src` to global rank `dst`.

        On a torus, a ring or a switch they are the slowest of all mesh axes, whatever the ranks; a machine
        without meshes raises UnsupportedError there.
        """
        network = self.cluster.network
        if self.placement is not None:
            src, dst = self.placement[src], self.placement[dst]
        if isinstance(network, HostsNetwork | FullMeshNetwork | TreeNetwork):
            return _between(network, src, dst)
        return self.axis("")

    def one_sided_constants(self, src: int, dst: int, adds: bool) -> OneSidedConstants:
        """Return latency (ps), rate (bytes per second) and compute cost of one-sided transfers between ranks.

        They are those of the slowest links on the path. On a torus, a ring or a switch they are those of the
        slowest mesh axis, whatever the ranks.

        Args:
            src: a global rank.
            dst: another global rank.
            adds: True for accumulates, which take FLOPs as well; False for gets and puts.

        Raises:
            UnsupportedError: the network is a torus, a ring or a switch, and the machine has no meshes.
        """
        axis = self.axis_between(src, dst)
        one_sided = self._one_sided.get((axis, adds))
        if one_sided is None:
            constants = axis.comm("accumulate" if adds else "send_recv")
            rate = max(int(min(constants.bytes_per_s, axis.link_bytes_per_s)), 1)
            chip = self.cluster.chip
            lost = chip.accumulate_share * chip.effective_flops_per_s if adds else 0.0
            one_sided = self._one_sided[axis, adds] = OneSidedConstants(
                to_ps(constants.launch_s),
                to_ps(constants.sync_s),
                rate,
                min(round(lost / rate), _MOST_PER_BYTE),
            )
        return one_sided

    @cached_property
    def _one_sided(self) -> dict[tuple[NetworkAxis, bool], OneSidedConstants]:
        return {}

    def num_directions(self, axis: str) -> int:
        """Return the number of directions (1 or 2) in which rings of a mesh axis ("tp.row") run at once.

        Raises:
            LayoutError: a mesh does not fit the cluster's network, or none has an axis of the name.
            UnsupportedError: the machine has no meshes.
        """
        return self.axis(axis).num_directions


def _between(network: HostsNetwork | FullMeshNetwork | TreeNetwork, src: int, dst: int) -> NetworkAxis:
    """Return the slowest links on the path from one chip to another."""
    match network:
        case HostsNetwork():
            is_inner = src // network.chips_per_host == dst // network.chips_per_host
            return network.intra if is_inner else network.nic
        case FullMeshNetwork():
            is_inner = src // network.chips_per_package == dst // network.chips_per_package
            return network.inner if is_inner else network.link
        case TreeNetwork():
            return network.axis_between(src, dst)


def mesh_machine(
    cluster: Cluster,
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    name: str = "tp",
    logical: bool = False,
) -> Machine:
    """Return a machine with one mesh of `shape` on `cluster`, called `name`, to price skeletons on.

    `logical` is that of `Machine`. A mesh that the network does not carry raises an error when one of its axes
    is first asked for.

    Raises:
        LayoutError: the mesh has more ranks than the cluster has chips.
    """
    if math.prod(shape) > cluster.num_chips:
        raise LayoutError(f"mesh {shape} does not fit the {cluster.num_chips} chips of {cluster.name}")
    return Machine(cluster, (Mesh.of(name, shape, axes),), logical)
