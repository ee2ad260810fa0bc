"""What an op may say of its run: that it releases its output by tiles, or is a step of a lowered collective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshweave.ir.program.expressions import Index

TileOrder = Literal["", "rows", "columns"]
TILE_ORDERS: tuple[TileOrder, ...] = ("", "rows", "columns")


@dataclass(frozen=True, slots=True)
class Release:
    """The release of an op's output tile by tile while the op runs, instead of all at its end.

    An op that reads a region later in the program waits for all released writes to it. This derived dependence is
    T3's track and trigger (section 4) and needs no fence. A product whose regions go to different memories is
    described by `ir.program.regions`: in ops, a product for each region, each of which joins the one before.

    Attributes:
        tile: elements of a tile along the first dims of the output, whose other dims are whole. () leaves the tile
            to the machine.
        order: tiles one after another along the "rows" (the last dim runs fastest) or down the "columns" (the
            first dim does). "" leaves the order to the machine.
        first: number of the tile in that order that is released first; those before it come last.
        update: add a tile to its target (near-memory op-and-store), do not store it.
        joins: whether these tiles follow those of the lane's product before in one kernel, which is launched once.
    """

    tile: tuple[Index, ...] = ()
    order: TileOrder = ""
    first: Index = 0
    update: bool = False
    joins: bool = False


@dataclass(frozen=True, slots=True)
class CollectiveStep:
    """Step `index` of `count` of a lowered collective.

    It runs at that collective's bandwidth and synchronisation cost, and only step 0 pays the launch.

    Attributes:
        collective: kind of the collective, such as "all_gather".
        axis: the mesh axis ("tp.row") that the step runs along, where the op does not say.
        num_directions: directions (1 or 2) in which the ring runs at once. They share the bandwidth; the step is
            of one of them. The text form calls it `ways`.
    """

    collective: str
    index: Index
    count: Index
    axis: str = ""
    num_directions: int = 1
