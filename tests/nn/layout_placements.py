"""The DTensor placements of a layout: what `nn.dtensor.layout_of` is the inverse of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from meshweave.base.errors import LayoutError
from meshweave.describe.layout import Layout, Partial, Placement, Replicate, Shard, StridedShard, Tile
from meshweave.describe.layout.mesh import Mesh
from meshweave.execute.torch import compat
from meshweave.nn.dtensor import _same, _transposed, mesh_of


def placements_of(
    layout: Layout, shape: Sequence[int], device_mesh: DeviceMesh | None = None
) -> tuple[TorchPlacement, ...]:
    """Return the DTensor placements of a tensor of global `shape` in `layout`, one per dim of `device_mesh`.

    Without a device mesh they are in the order of the layout's own mesh axes. Where folds are, placements name the
    original dims. A Tile is a Shard if it holds the same for this shape; axes in another order than those of
    `device_mesh` become strided shards. The placements hold exactly what the layout says, on every rank.

    Raises LayoutError, naming the axis, where no placements do.
    """
    plain = layout
    for at, (axis, placement) in enumerate(zip(layout.mesh.axes, layout.placements, strict=True)):
        if isinstance(placement, Tile):
            plain = _with(plain, at, Shard(placement.dim))
            if not _same(plain, layout, shape):
                raise LayoutError(
                    f"{layout}: axis {axis}: {placement} of a tensor of shape {tuple(shape)} is no Shard, so "
                    "DTensor has no placement for it; tiles as large as the chunks of a Shard would have"
                )
    if device_mesh is not None:
        plain = _reordered(plain, mesh_of(device_mesh), shape)
    return tuple(map(_torch_placement, plain.placements))


def _torch_placement(placement: Placement) -> TorchPlacement:
    match placement:
        case Shard(dim=dim):
            return TorchShard(dim)
        case StridedShard(dim=dim, split_factor=factor):
            return compat.strided_shard(dim, factor)
        case Partial(op=op):
            return TorchPartial(op)
    assert isinstance(placement, Replicate), placement
    return TorchReplicate()


def _with(layout: Layout, at: int, placement: Placement) -> Layout:
    return replace(layout, placements=(*layout.placements[:at], placement, *layout.placements[at + 1 :]))


def _reordered(layout: Layout, mesh: Mesh, shape: Sequence[int]) -> Layout:
    """Return `layout` on `mesh`, which has the same ranks with the axes in another order."""
    own = layout.mesh
    axes = tuple(own.axes.index(axis) for axis in mesh.axes if axis in own.axes)
    if (
        len(axes) != len(own.axes)
        or (turned := _transposed(own, axes)).shape != mesh.shape
        or (turned.ranks != mesh.ranks)
    ):
        raise LayoutError(
            f"{layout} is on mesh {own.name} with axes {', '.join(own.axes)}, which is not mesh {mesh.name} with "
            f"axes {', '.join(mesh.axes)} in any order"
        )
    placements = []
    for place, axis in enumerate(axes):
        placement = layout.placements[axis]
        if isinstance(placement, Shard):
            earlier = [  # cut before this axis, and stand after it: what a strided shard reaches across
                own.shape[other]
                for other in axes[place + 1 :]
                if other < axis and getattr(layout.placements[other], "dim", None) == placement.dim
            ]
            if math.prod(earlier) > 1:
                placement = StridedShard(placement.dim, math.prod(earlier))
        placements.append(placement)
    reordered = Layout(mesh, tuple(placements), layout.folds)
    if not _same(reordered, layout, shape):
        strided = [
            name
            for name, placement, previous in zip(
                mesh.axes, placements, (layout.placements[a] for a in axes), strict=True
            )
            if placement != previous or isinstance(previous, StridedShard)
        ]
        raise LayoutError(
            f"{layout}: axes {', '.join(strided)} cut a tensor of shape {tuple(shape)} in an order for which "
            f"DTensor has no placements on mesh {mesh.name}; an even size would have"
        )
    return reordered
