"""Sides of tensors: how many units a dim has, and how mesh axes deal them out, evenly or not.

A dim of `count` units of `unit` elements is dealt to an axis in runs of ceil(count / ranks) whole units: the first
ranks have that many, the next one the rest, and the last ones may have none. That is `Shard` where all have
equally many or one axis deals single elements, else `Tile`. Two axes that share a dim deal it one after another.
"""

from __future__ import annotations

from meshweave.algorithms.block.roles import AxisDims, Side, Sides
from meshweave.describe.layout import Layout, Partial, Replicate, Shard, Tile
from meshweave.describe.layout.layouts import Placement
from meshweave.describe.layout.mesh import Mesh
from meshweave.ir.program.expressions import Index, Var, maximum, minimum


def layout_of(mesh: Mesh, sides: Sides, dims: AxisDims) -> Layout:
    """Return the layout of a tensor with these sides (dims) on a mesh.

    Units of a side are never split. An uneven split is `Shard` if one axis divides single elements, else `Tile`.

    Args:
        dims: for each mesh axis the `dim` of the side that it shards, "" to replicate, "partial" for partial sums.
    """
    left = [side.count for side in sides]
    is_even = [True] * len(sides)
    places = {side.dim: number for number, side in enumerate(sides)}
    placements: list[Placement] = []
    for dim, parts in zip(dims, mesh.shape, strict=True):
        if not dim or dim == "partial":
            placements.append(Partial() if dim else Replicate())
            continue
        at = places[dim]
        run = -(-left[at] // parts)
        divides = is_even[at] and left[at] % parts == 0
        is_plain = divides or (sides[at].unit == 1 and left[at] == sides[at].count)
        placements.append(Shard(at) if is_plain else Tile(at, run * sides[at].unit))
        left[at], is_even[at] = run, divides
    return Layout(mesh, tuple(placements))


PEER = Var("peer")
"""The position of a member of a collective."""


def extent(mesh: Mesh, side: Side, dims: AxisDims, other_axis: int = -1, other: Index = PEER) -> Index:
    """Return how many elements of a side a rank has: an int, or an expression in the rank's mesh coordinates.

    Args:
        dims: for each mesh axis the `dim` of the side that it shards, or "" or "partial".
        other_axis: index of a mesh axis, to ask for the rank whose coordinate along it is `other` instead of this
            rank's own; -1 to ask for this rank.
        other: a coordinate, or an expression for it.
    """
    count: Index = side.count
    most = side.count
    for number, (dim, parts, axis) in enumerate(zip(dims, mesh.shape, mesh.axes, strict=True)):
        if dim != side.dim or not dim:
            continue
        run = -(-most // parts)
        if isinstance(count, int) and count % parts == 0:
            count = run
        else:
            at = other if number == other_axis else Var(f"{mesh.name}.{axis}")
            count = minimum(maximum(count - run * at, 0), run)
        most = run
    return count * side.unit


def within(side: Side, mesh: Mesh, dims: AxisDims, num_axes: int) -> int | None:
    """Return how many elements of a side the ranks along the last `num_axes` mesh axes have together.

    These are the elements that the axes before leave to each of their coordinates; None if these axes do not
    divide the side evenly. `dims` has for each mesh axis the `dim` of the side that it shards, or "" or "partial".
    """
    count = side.count
    for dim, parts in list(zip(dims, mesh.shape, strict=True))[:-num_axes]:
        if dim == side.dim and dim:
            count, rest = divmod(count, parts)
            if rest:
                return None
    return count * side.unit


def largest_extent(mesh: Mesh, side: Side, dims: AxisDims) -> int:
    """Return how many elements of one dim of a tensor (`side`) the rank with most of them has, which is rank 0.

    They are whole units. `dims` names for each mesh axis the dim that it shards, "" or "partial" for none; an axis
    shards the side where it names `side.dim`.
    """
    count = side.count
    for dim, parts in zip(dims, mesh.shape, strict=True):
        if dim == side.dim and dim:
            count = -(-count // parts)
    return count * side.unit
