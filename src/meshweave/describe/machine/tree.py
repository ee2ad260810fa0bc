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
    most_split,
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

    def axis(
        self, i: int, num_dims: int = 2, shape: tuple[int, ...] | None = None, shared: bool = False
    ) -> NetworkAxis:
        """Return the links of the slowest level that groups of mesh axis `i` (of `num_dims`) cross.

        All parallel links of a child of a switch count as one.

        A ring over neighbouring leaves sends one flow up and one down each link that it crosses, so that the
        slowest level sets its pace. If a group takes every n-th leaf, n groups meet on the upper links, and twice
        as many where a child holds the end of one block of such groups and the beginning of the next: with
        `shared` each of them has its share of these (ATP, equation 3), and so have the two directions of a
        ring that uses both; else each has all. Latency is that of the level alone. Without a shape, the last
        of several mesh axes is taken to stay below the lowest switches, and any other to cross all levels.

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
            below = self.chips_below[number]
            flows = min(stride, below) if shared and size > 1 else 1
            if level.direct is not None and (top == 0 or self._has_neighbours(number, stride, size)):
                both = level.direct.num_directions if shared and size == 2 else 1
                crossed.append(_divided(level.direct, 1, flows * both))
            if level.direct is None or number < top:
                flows = most_split(below, size, stride) if shared and size > 1 else 1
                both = level.axis.num_directions if shared else 1
                crossed.append(_divided(level.axis, level.links, flows * both))
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
            crossed.append(_divided(level.axis, level.links, 1))
            if meet:
                break
        return slowest_axis(reversed(crossed))

    def longest_s(self, src: NDArray[np.int64], dst: NDArray[np.int64], shared: bool) -> float:
        """Return the seconds per byte of a message on the most loaded link: the messages on it over its rate.

        Args:
            src, dst: the chip that each message is from, and that it is to; shape (groups, messages of a group).
            shared: whether all groups send at once; else the result is that of the slowest group by itself.
        """
        fullest_s, chips = 0.0, self.num_chips
        group = np.zeros_like(src) if shared else np.broadcast_to(np.arange(len(src))[:, None], src.shape)
        for level, below in zip(self.levels, self.chips_below, strict=True):
            above = below * level.fanout
            here, there = group * chips + src // below, group * chips + dst // below
            apart, meet = here != there, src // above == dst // above
            climbing = apart & ~meet if level.direct is not None else apart
            taken = [(end[climbing], level.child_bytes_per_s) for end in (here, there)]
            if level.direct is not None:
                pairs = (here * level.fanout + dst // below % level.fanout)[apart & meet]
                taken.append((pairs, level.direct.link_bytes_per_s))
            for links, bytes_per_s in taken:
                most = np.unique(links, return_counts=True)[1].max(initial=0)
                fullest_s = max(fullest_s, float(most) / bytes_per_s)
        return fullest_s

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


def _divided(axis: NetworkAxis, links: int, flows: int) -> NetworkAxis:
    """Return parallel links as one, or the share of it that each of several flows has."""
    if links == flows == 1:
        return axis
    return replace(axis, link_bytes_per_s=max(links * axis.link_bytes_per_s / flows, 1.0))
