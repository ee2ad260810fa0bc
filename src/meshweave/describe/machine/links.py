"""The links that networks are made of: one axis of links, and the constants of collectives along it."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from meshweave.base.errors import DescriptionError, LayoutError, require_known
from meshweave.describe.files import Duration, Rate, key
from meshweave.describe.layout.shapes import factorisations

COMM_KINDS = (
    *("all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce", "all_to_all"),
    *("send_recv", "accumulate"),
)
"""Kinds of communication. `send_recv` covers gets and puts; `accumulate` adds into another chip's memory."""

# The kinds whose constants stand in for those of a kind that has none, in this order; then the link itself.
_FALLBACK: dict[str, tuple[str, ...]] = {
    "all_gather": ("reduce_scatter",),
    "reduce_scatter": ("all_gather",),
    "all_reduce": ("all_gather", "reduce_scatter"),
    "broadcast": ("all_gather", "reduce_scatter"),
    "reduce": ("reduce_scatter", "all_gather"),
    "all_to_all": ("all_gather", "reduce_scatter"),
    "send_recv": ("all_gather", "reduce_scatter"),
    "accumulate": ("send_recv", "all_gather", "reduce_scatter"),
}

ONE_DIRECTION = ("broadcast", "reduce", "send_recv", "accumulate")
"""Kinds whose messages go one way round a ring."""


def require_at_least(owner: str, low: float, **values: float) -> None:
    """Raise DescriptionError, which begins with `owner`, unless every value is finite and at least `low`."""
    for name, value in values.items():
        if not (math.isfinite(value) and value >= low):
            raise DescriptionError(f"{owner}: {name} is {value}; give a finite number of at least {low:g}")


@dataclass(frozen=True)
class CommConstants:
    """Constants of one kind of communication: it takes `launch_s + (P - 1) (sync_s + shard_bytes / bytes_per_s)`.

    P is the number of chips along the axis (MeshSlice, ISCA '25, section 3.2.2).

    Attributes:
        bytes_per_s: the rate at which one chip receives shard bytes during the operation. A bidirectional ring
            counts both directions together; broadcast, reduce, send_recv and accumulate use one direction.
        sync_s: seconds of synchronisation per step.
        launch_s: seconds to launch the operation.

    Raises:
        DescriptionError: a value is out of range.
    """

    bytes_per_s: Annotated[Rate, key("bytes per second into one chip, a number of at least 1")]
    sync_s: Annotated[Duration, key("seconds of synchronisation per step, from 0 to 1e6")]
    launch_s: Annotated[Duration, key("seconds to launch the operation, from 0 to 1e6")]

    def __post_init__(self) -> None:
        require_at_least("communication constants", 1, bytes_per_s=self.bytes_per_s)
        require_at_least("communication constants", 0, sync_s=self.sync_s, launch_s=self.launch_s)


@dataclass(frozen=True)
class NetworkAxis:
    """The links along one axis of a network (or the port of a chip to a switch, or a NIC).

    Attributes:
        link_bytes_per_s: bytes per second of one link in one direction.
        link_latency_s: seconds of latency of one link.
        num_directions: the number of directions that a ring collective uses, 1 or 2 (key `ways` of a file).
        constants: (kind, CommConstants) pairs, kinds from `COMM_KINDS`.
        launch_s: seconds to launch a collective that has no constants.
        source: where the numbers are from.
        burst_bytes: bytes that a link passes at once after a while of idleness, as a token bucket does.

    Raises:
        DescriptionError: a value is out of range, or a kind is unknown.
    """

    name: str
    link_bytes_per_s: float
    link_latency_s: float = 0.0
    num_directions: Literal[1, 2] = 1
    constants: tuple[tuple[str, CommConstants], ...] = ()
    launch_s: float = 0.0
    source: str = ""
    burst_bytes: int = 0

    def __post_init__(self) -> None:
        require_at_least(f"axis {self.name}", 1, link_bytes_per_s=self.link_bytes_per_s)
        require_at_least(
            f"axis {self.name}",
            0,
            link_latency_s=self.link_latency_s,
            launch_s=self.launch_s,
            burst_bytes=self.burst_bytes,
        )
        if self.num_directions not in (1, 2):
            raise DescriptionError(f"axis {self.name}: ways is {self.num_directions}; give 1 or 2")
        for kind, _ in self.constants:
            _known_kind(kind)

    def comm(self, kind: str) -> CommConstants:
        """Return the constants of a kind of communication along this axis.

        Those that the kind has itself are taken as they are. Without them it takes those of all_gather, else of
        reduce_scatter; reduce tries reduce_scatter first, accumulate send_recv. Broadcast, reduce, send_recv and
        accumulate use one direction: of all_gather's or reduce_scatter's rate they take half if `num_directions`
        is 2. Where there are none to take, they follow from the link: `link_bytes_per_s` (times `num_directions`
        but for those of one direction), `link_latency_s` and `launch_s`.

        Raises:
            DescriptionError: `kind` is unknown.
        """
        _known_kind(kind)
        own = dict(self.constants)
        for candidate in (kind, *_FALLBACK[kind]):
            if candidate in own:
                constants = own[candidate]
                if kind in ONE_DIRECTION and candidate not in ONE_DIRECTION and self.num_directions == 2:
                    return replace(constants, bytes_per_s=max(constants.bytes_per_s / 2, 1.0))
                return constants
        directions = 1 if kind in ONE_DIRECTION else self.num_directions
        return CommConstants(directions * self.link_bytes_per_s, self.link_latency_s, self.launch_s)

    @property
    def ring_bytes_per_s(self) -> float:
        """Return the bytes per second into a chip during an all-gather, at most the rate of its links."""
        return min(self.comm("all_gather").bytes_per_s, self.num_directions * self.link_bytes_per_s)

    def has_own_constants(self, kind: str) -> bool:
        """Return whether a kind of communication has constants of its own, so that no others stand in."""
        return any(known == kind for known, _ in self.constants)


def _known_kind(kind: str) -> None:
    require_known(kind, COMM_KINDS, "unknown kind of communication", DescriptionError, "known:")


def slowest_axis(axes: Iterable[NetworkAxis]) -> NetworkAxis:
    """Return the axis with the lowest `ring_bytes_per_s`; of equally slow ones the first."""
    return min(axes, key=lambda axis: axis.ring_bytes_per_s)


def check_axis(i: int, num_dims: int, shape: tuple[int, ...] | None, num_chips: int) -> None:
    """Raise LayoutError where a mesh of `num_dims` axes has no axis `i`, or `num_dims` is below 1.

    Also where `shape`, unless it is None, is not `num_dims` sizes whose product is `num_chips`.
    """
    check_dims(num_dims)
    if not 0 <= i < num_dims:
        raise LayoutError(f"a mesh of {num_dims} axes has no axis {i}")
    if shape is not None and (len(shape) != num_dims or math.prod(shape) != num_chips):
        raise LayoutError(f"mesh shape {shape} is not one of {num_dims} sizes for {num_chips} chips")


def check_dims(num_dims: int) -> None:
    """Raise LayoutError unless `num_dims`, a number of mesh axes, is at least 1."""
    if num_dims < 1:
        raise LayoutError(f"a mesh needs at least 1 axis, not {num_dims}")


class AnyShapeNetwork:
    """Base of networks on which meshes of all shapes fit, if they have one rank per chip."""

    @property
    @abstractmethod
    def num_chips(self) -> int:
        """Return the number of chips of the whole network."""

    def mesh_shapes(self, num_dims: int = 2) -> tuple[tuple[int, ...], ...]:
        """Return all ordered factorisations of the number of chips. Raises LayoutError for `num_dims` below 1."""
        check_dims(num_dims)
        return factorisations(self.num_chips, num_dims)
