"""What is to be moved: tensors that lie on one mesh and shall lie on another."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from meshweave.base.errors import LayoutError
from meshweave.base.units import dtype_bytes
from meshweave.describe.layout import Layout, Partial


@dataclass(frozen=True)
class Item:
    """A tensor of global `shape` that lies as `src` says and shall lie as `dst` says.

    The meshes may share all, some or none of their ranks. Raises LayoutError for a layout that does not fit the
    shape, or is partial: sums are for the source mesh to make, before.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    src: Layout
    dst: Layout

    def __post_init__(self) -> None:
        for layout, which in ((self.src, "source"), (self.dst, "destination")):
            if any(isinstance(placement, Partial) for placement in layout.placements):
                raise LayoutError(
                    f"{self.name}: the {which} layout {layout} is partial; a reshard moves values and adds up none"
                )
            try:
                layout.local_shape(self.shape, layout.mesh.ranks[0])
            except LayoutError as error:
                raise LayoutError(f"{self.name}, {which}: {error}") from None
        dtype_bytes(self.dtype)

    @property
    def element_bytes(self) -> int:
        return dtype_bytes(self.dtype)


@dataclass(frozen=True)
class ReshardProblem:
    """Tensors that move in one schedule. Raises LayoutError where there are none."""

    items: tuple[Item, ...]

    def __post_init__(self) -> None:
        if not self.items:
            raise LayoutError("there is no tensor to reshard")

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that hold or get something, ascending."""
        meshes = dict.fromkeys(layout.mesh for item in self.items for layout in (item.src, item.dst))
        return tuple(sorted({rank for mesh in meshes for rank in mesh.ranks}))
