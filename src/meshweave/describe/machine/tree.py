"""A tree of switches: fat where its upper links are wide, oversubscribed where they are narrow."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from meshweave.base.errors import DescriptionError
from meshweave.base.limits import CHIPS
from meshweave.describe.machine.links import (
    NetworkAxis,
    check_axis,
    check_dims,
    factorisations,
    require_at_least,
    slowest_axis,
)


@dataclass(frozen=True)
class TreeLevel:
    """Switches with `fanout` children each; each child hangs on `links` parallel full-duplex links."""

    fanout: int
    axis: NetworkAxis
    links: int = 1

    def __post_init__(self) -> None:
        require_at_least("tree level", 1, fanout=self.fanout, links=self.links)

    @property
    def child_bytes_per_s(self) -> float:
        """Return the bytes per second in one direction of all parallel links of one child, evenly loaded."""
        return self.links * self.axis.link_bytes_per_s


@dataclass(frozen=True)
class TreeNetwork:
    """Chips are the leaves, in order; `levels` go from the leaves up to the one switch at the top.

    A message climbs to the lowest switch above both of its ends and comes down again; switches never block.
    """

    levels: tuple[TreeLevel, ...]

    def __post_init__(self) -> None:
        if not self.levels:
            raise DescriptionError("tree: levels is empty; give one table per level of switches")
        if self.num_chips > CHIPS.most:
            raise DescriptionError(f"tree: {CHIPS.refusal(self.num_chips)}: give smaller fanouts")

    @cached_property
    def num_chips(self) -> int:
        """Return the number of chips of the whole tree: the product of its fanouts."""
        return math.prod(level.fanout for level in self.levels)

    @cached_property
    def chips_below(self) -> tuple[int, ...]:
        """Return the number of chips below one child of a switch, for each level; 1 at the lowest."""
        return tuple(accumulate((level.fanout for level in self.levels[:-1]), operator.mul, initial=1))

    def mesh_shapes(self, num_dims: int = 2) -> tuple[tuple[int, ...], ...]:
        """Return all ordered factorisations of the number of chips. Raises LayoutError."""
        check_dims(num_dims)
        return factorisations(self.num_chips, num_dims)

    def axis(self, i: int, num_dims: int = 2, shape: tuple[int, ...] | None = None) -> NetworkAxis:
        """Return the links of the slowest level that groups of mesh axis `i` cross, all links of a child as one.

        A ring over neighbouring leaves sends one flow up and one down each link that it crosses, so that the
        slowest level sets its pace. If a group takes every n-th leaf, n groups share the upper links; only
        simulation accounts for that, as for the NICs of hosts. Latency is that of the level alone. Without a
        shape, the last of several mesh axes is taken to stay below the lowest switches, and any other to cross
        all levels. Raises LayoutError.
        """
        check_axis(i, num_dims, shape, self.num_chips)
        if shape is None:
            top = 0 if 0 < i == num_dims - 1 else self._highest_level(self.num_chips, self.num_chips)
        else:
            top = self._highest_level(shape[i], math.prod(shape[i:]))
        return slowest_axis(
            replace(level.axis, link_bytes_per_s=level.child_bytes_per_s) for level in self.levels[top::-1]
        )

    def _highest_level(self, size: int, block: int) -> int:
        """Return the highest level that groups of `size` cross, each within `block` consecutive chips."""
        if size == 1:
            return 0
        crossed = (n for n, below in enumerate(self.chips_below) if below < self.num_chips and below % block)
        return max(crossed, default=0)

    def with_chips(self, chips: int) -> TreeNetwork:
        """Return the tree with more or fewer subtrees at the top. Raises DescriptionError for part of one."""
        per_child = self.chips_below[-1]
        if chips % per_child:
            raise DescriptionError(
                f"{chips} chips are not whole subtrees of the top level; give a multiple of {per_child}"
            )
        *lower, top = self.levels
        return replace(self, levels=(*lower, replace(top, fanout=chips // per_child)))
