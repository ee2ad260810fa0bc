"""What a reshard moves: tensors from the layout that they have on one mesh to a layout on another."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from meshweave.base.errors import LayoutError, require_known
from meshweave.base.units import DTYPES, dtype_bytes
from meshweave.describe.layout import Layout, Partial


@dataclass(frozen=True)
class TensorMove:
    """A tensor of global `shape` that moves from layout `src` to layout `dst`.

    The two meshes may share all, some or none of their ranks.

    Raises:
        LayoutError: a layout does not fit the shape, or is partial (sums are reduced on the source mesh
            beforehand), or the dtype is unknown.
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
        require_known(self.dtype, DTYPES, f"{self.name}: unknown dtype", LayoutError)

    @property
    def element_bytes(self) -> int:
        """Return the bytes of one element."""
        return dtype_bytes(self.dtype)


@dataclass(frozen=True)
class ReshardProblem:
    """Tensors that move in one schedule.

    Raises:
        LayoutError: `moves` is empty.
    """

    moves: tuple[TensorMove, ...]

    def __post_init__(self) -> None:
        if not self.moves:
            raise LayoutError("there is no tensor to reshard")

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Return the global ranks of all source and destination meshes, ascending."""
        meshes = dict.fromkeys(layout.mesh for move in self.moves for layout in (move.src, move.dst))
        return tuple(sorted({rank for mesh in meshes for rank in mesh.ranks}))
