"""A tree of switches: fat where its upper links are wide, oversubscribed where they are narrow.

The children of a switch may have direct links besides: GPUs bridged in pairs on a PCIe tree, or the four GPUs
of a node that NVLinks join without a switch. A message between two such children takes their direct link.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from meshweave.base.errors import DescriptionError
from meshweave.base.limits import CHIPS
from meshweave.describe.machine.links import (
    AnyShapeNetwork,
    NetworkAxis,
    check_axis,
    require_at_least,
    slowest_axis,
)


@dataclass(frozen=True)
class TreeLevel:
    """Switches with `fanout` children each; each child hangs on `links` parallel full-duplex links.

    `direct` is the full-duplex link that any two children of one switch have besides, all parallel links of the
    two as one; None where there are none.
    """

    fanout: int
    axis: NetworkAxis
    links: int = 1
    direct: NetworkAxis | None = None

    def __post_init__(self) -> None:
        require_at_least("tree level", 1, fanout=self.fanout, links=self.links)

    @property
    def child_bytes_per_s(self) -> float:
        """Return the bytes per second in one direction of all parallel links of one child, evenly loaded."""
        return self.links * self.axis.link_bytes_per_s


@dataclass(frozen=True)
class TreeNetwork(AnyShapeNetwork):
    """Chips are the leaves, in order; `levels` go from the leaves up to the one switch at the top.

    A message climbs to the lowest switch above both of its ends and comes down again; switches never block.
    Where the two children of that switch have a direct link, it takes that link instead of the two to the
    switch.
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

    def axis(self, i: int, num_dims: int = 2, shape: tuple[int, ...] | None = None) -> NetworkAxis:
        """Return the links of the slowest level that groups of mesh axis `i` (of `num_dims`) cross.

        All parallel links of a child of a switch count as one.

        A ring over neighbouring leaves sends one flow up and one down each link that it crosses, so that the
        slowest level sets its pace. Latency is that of the level alone. Without a shape, the last of several mesh
        axes is taken to stay below the lowest switches, and any other to cross all levels.

        Raises:
            LayoutError: the mesh has no axis `i`, or `shape` does not use all chips.
        """
        check_axis(i, num_dims, shape, self.num_chips)
        stride, size = 1, self.num_chips
        if shape is not None:
            stride, size = math.prod(shape[i + 1 :]), shape[i]
        top = 0
        if shape is not None or not 0 < i == num_dims - 1:
            top = self._highest_level(size, size * stride)
        crossed: list[NetworkAxis] = []
        for number in range(top, -1, -1):
            level = self.levels[number]
            if level.direct is not None and (top == 0 or self._has_neighbours(number, stride, size)):
                crossed.append(level.direct)
            if level.direct is None or number < top:
                crossed.append(_as_one(level.axis, level.links))
        return slowest_axis(crossed)

    def axis_between(self, src: int, dst: int) -> NetworkAxis:
        """Return the slowest links that a message from chip `src` to `dst` takes, all parallel links as one.

        Of equally slow ones the highest in the tree; from a chip to itself, its link to the lowest switch.
        """
        crossed: list[NetworkAxis] = []
        for level, below in zip(self.levels, self.chips_below, strict=True):
            meet = src // (below * level.fanout) == dst // (below * level.fanout)
            if meet and level.direct is not None and src != dst:
                crossed.append(level.direct)
                break
            crossed.append(_as_one(level.axis, level.links))
            if meet:
                break
        return slowest_axis(reversed(crossed))

    def taken(self, src: NDArray[np.int64], dst: NDArray[np.int64]) -> list[tuple[NDArray[np.int64], float]]:
        """Return the links that messages between chips take: for each kind their numbers and bytes per second."""
        out: list[tuple[NDArray[np.int64], float]] = []
        for level, below in zip(self.levels, self.chips_below, strict=True):
            above = below * level.fanout
            apart, meet = src // below != dst // below, src // above == dst // above
            climbing = apart & ~meet if level.direct is not None else apart
            out += [(end[climbing] // below, level.child_bytes_per_s) for end in (src, dst)]
            if level.direct is not None:
                pairs = src // below * level.fanout + dst // below % level.fanout
                out.append((pairs[apart & meet], level.direct.link_bytes_per_s))
        return out

    def _has_neighbours(self, number: int, stride: int, size: int) -> bool:
        """Return whether two neighbours in a ring of `size`, `stride` chips apart, meet at a switch of a level."""
        chips = np.arange(self.num_chips)
        place = chips // stride % size
        after = chips + np.where(place == size - 1, (1 - size) * stride, stride)
        below = self.chips_below[number]
        above = below * self.levels[number].fanout
        return bool(((chips // above == after // above) & (chips // below != after // below)).any())

    def _highest_level(self, size: int, block: int) -> int:
        """Return the highest level that groups of `size` cross, each within `block` consecutive chips."""
        if size == 1:
            return 0
        crossed = (n for n, below in enumerate(self.chips_below) if below < self.num_chips and below % block)
        return max(crossed, default=0)

    def with_chips(self, chips: int) -> TreeNetwork:
        """Return the tree with `chips` chips: more or fewer children of the top switch, each as large as before.

        Raises DescriptionError unless `chips` is a positive multiple of the chips of such a child.
        """
        per_child = self.chips_below[-1]
        if chips % per_child:
            raise DescriptionError(
                f"{chips} chips are not whole subtrees of the top level; give a multiple of {per_child}"
            )
        *lower, top = self.levels
        return replace(self, levels=(*lower, replace(top, fanout=chips // per_child)))


def _as_one(axis: NetworkAxis, links: int) -> NetworkAxis:
    """Return parallel links as one."""
    return axis if links == 1 else replace(axis, link_bytes_per_s=links * axis.link_bytes_per_s)
