"""Parts of views along a dim in which they are boxes, their sizes and sub-views; meshes for scratch of a rank."""

from __future__ import annotations

from dataclasses import replace

from meshweave.base.errors import ProgramError
from meshweave.ir.program import Program
from meshweave.ir.program.expressions import Index, Var, select
from meshweave.ir.program.views import Range, View


def view_extent(program: Program, view: View, dim: int) -> Index:
    """Return the size of a view along `dim`, an int or an expression in mesh coordinates and loop indices.

    Raises:
        ProgramError: the view selects blocks along that dim, not one range.
    """
    selector = _range(view, dim)
    if selector.stop is not None:
        return selector.stop - selector.start
    buffer = program.buffer_of[view.buffer]
    if buffer.tensor is None:
        return buffer.shape[dim] - selector.start
    mesh = program.mesh_of[buffer.mesh]
    extents: list[Index] = [program.local_shape(buffer.name, rank)[dim] for rank in mesh.ranks]
    for axis, size in zip(reversed(mesh.axes), reversed(mesh.shape), strict=True):
        rows = (extents[at : at + size] for at in range(0, len(extents), size))
        extents = [select(row, Var(f"{mesh.name}.{axis}")) for row in rows]
    return extents[0] - selector.start


def sub_view(view: View, dim: int, start: Index, stop: Index) -> View:
    """Return the part [start, stop) of a view along `dim`, counted from the view's own first element.

    Raises:
        ProgramError: the view selects blocks along that dim, not one range.
    """
    selector = _range(view, dim)
    selectors = list(view.selectors)
    selectors[dim] = Range(selector.start + start, selector.start + stop)
    return replace(view, selectors=tuple(selectors))


def mesh_with(program: Program, rank: int, wanted: str) -> str:
    """Return the name of a mesh that has the global rank `rank`: `wanted` if it has, else the first that has."""
    return next(mesh.name for mesh in (program.mesh_of[wanted], *program.meshes) if rank in mesh)


def _range(view: View, dim: int) -> Range:
    selector = view.selectors[dim]
    if not isinstance(selector, Range):
        raise ProgramError(f"a ring moves boxes, not {view}", buffer=view.buffer)
    return selector
