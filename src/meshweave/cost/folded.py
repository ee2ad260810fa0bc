"""A machine of which one part stands for several that are alike: replicas in hosts of their own.

Replicas that lie `copies` times one after the other in whole hosts do the same at the same time. The first of them
is laid on a cluster of that many times fewer hosts. A collective over the replicas has all of its members. Each of
those that are left out is an image of one that is there, and so are its links.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from meshweave.cost.machine import Machine
from meshweave.cost.placed import HostSpan, Link
from meshweave.describe.machine.links import NetworkAxis
from meshweave.describe.machine.network import HostsNetwork


@dataclass(frozen=True)
class FoldedMachine(Machine):
    """The simulated part of a cluster of hosts, in which one replica stands for several that do the same.

    Attributes:
        whole: the machine with all replicas, whose meshes have the names of those here. Prices are those on it.
        folded: (mesh axis, copies) of each axis along which replicas are left out: the groups of the whole
            machine have `copies` times as many members along it.
    """

    whole: Machine | None = None
    folded: tuple[tuple[str, int], ...] = ()

    @property
    def copies(self) -> Mapping[str, int]:
        """Return {mesh axis: members of its groups in the whole machine over those that are simulated}."""
        return dict(self.folded)

    @property
    def priced(self) -> Machine:
        """Return the whole machine, whose groups are priced."""
        assert self.whole is not None
        return self.whole

    @cached_property
    def _axes(self) -> dict[str, tuple[NetworkAxis, NetworkAxis, NetworkAxis]]:
        return self.priced._axes

    @cached_property
    def _host_spans(self) -> dict[str, HostSpan]:
        return self.priced._host_spans

    def image_path(self, src: int, dst: int, route: int) -> tuple[Link, ...]:
        """Return the links that a message from chip `src` to a copy of chip `dst` takes, in order.

        The copy lies on hosts that are not simulated, but loads the same links as `dst`: the message leaves by the
        NICs of the host of `src` and arrives by those of the host of `dst`. `route` is 0 or 1 for a message, and
        `RING_ROUTE` or above for a collective, which loads only the links that stand for all NICs of a host.
        """
        network = self.cluster.network
        assert isinstance(network, HostsNetwork)
        return self._nic_path(network, src, dst, route)
