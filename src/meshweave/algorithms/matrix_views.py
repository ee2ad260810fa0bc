"""Views of buffers that hold matrices."""

from __future__ import annotations

from meshweave.ir.program.expressions import Index
from meshweave.ir.program.views import FULL, Selector, View


def full_matrix(buffer: str) -> View:
    """Return the view of all rows and columns of a matrix in slot 0 of `buffer`, the buffer's name."""
    return View(buffer, (FULL, FULL))


def matrix_slice(buffer: str, dim: int, selector: Selector, slot: Index = 0) -> View:
    """Return the view of some rows (`dim` 0), or some columns (`dim` 1), of the matrix in a buffer.

    Args:
        buffer: name of the buffer.
        dim: the dim that `selector` picks indices of; the other dim is whole.
        slot: number of the copy, for a buffer with several slots.
    """
    return View(buffer, (selector, FULL) if dim == 0 else (FULL, selector), slot)
