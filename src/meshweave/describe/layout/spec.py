"""Spec strings such as `S0RR` and `S01R`, as papers on cross-mesh resharding write how a tensor lies on a mesh.

One letter for each tensor dim: R for replicated, S with the mesh axes along which the dim is sharded (AlpaComm,
MLSys '23, section 2.2, after GSPMD; the axes are superscripts there). A mesh axis that no dim names replicates.
"""

from __future__ import annotations

import re

from meshweave.base.errors import LayoutError
from meshweave.describe.layout.layouts import Layout, Placement, Replicate, Shard
from meshweave.describe.layout.mesh import Mesh

_DIM = re.compile(r"R|S\^?\{?([0-9]+)\}?")


def layout_of_spec(spec: str, mesh: Mesh) -> Layout:
    """Return the layout on `mesh` that a spec string names, such as "S0R" or "S01R".

    The string has one entry for each dim of the tensor: R for replicated, or S and the numbers of the
    mesh axes (one digit each) that shard the dim, the lower one first and outermost. Mesh axes that no
    entry names replicate. Across dims axes come in any order: "S1S0" is a spec.

    Raises:
        LayoutError: the string is no spec, names an axis twice or one that the mesh lacks, or lists the
            axes of one dim out of order.
    """
    compact = "".join(spec.split())
    dims = list(_DIM.finditer(compact))
    if "".join(dim.group() for dim in dims) != compact:
        raise LayoutError(
            f"spec '{spec}': give R (replicated) or S and mesh axes (sharded) for each tensor dim, as in S0RR"
        )
    placements: list[Placement] = [Replicate()] * len(mesh.shape)
    for number, dim in enumerate(dims):
        axes = [int(digit) for digit in dim.group(1) or ""]
        if axes != sorted(axes):
            raise LayoutError(
                f"spec '{spec}': {dim.group()} lists mesh axes out of order; write the lower one first"
            )
        for axis in axes:
            if axis >= len(placements):
                raise LayoutError(
                    f"spec '{spec}': {dim.group()} names mesh axis {axis}, and mesh {mesh.name} has the axes "
                    f"0 to {len(placements) - 1}"
                )
            if isinstance(placements[axis], Shard):
                raise LayoutError(
                    f"spec '{spec}': two dims, or one twice, are sharded along mesh axis {axis}"
                )
            placements[axis] = Shard(number)
    return Layout(mesh, tuple(placements))


def spec_of(layout: Layout, num_dims: int) -> str:
    """Return the spec string of a layout of shards and replicas, for a tensor of `num_dims` dims.

    Raises LayoutError for other placements, for a dim that the tensor lacks and for shards on mesh axes above 9.
    """
    axes: list[str] = [""] * num_dims
    for axis, placement in enumerate(layout.placements):
        if isinstance(placement, Shard) and placement.dim < num_dims and axis < 10:
            axes[placement.dim] += str(axis)
        elif not isinstance(placement, Replicate):
            raise LayoutError(f"{layout}: a spec string cannot say {placement}")
    return "".join(f"S{digits}" if digits else "R" for digits in axes)
