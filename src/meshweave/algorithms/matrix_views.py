"""Views of buffers that hold matrices."""

from __future__ import annotations

from meshweave.ir.program.expressions import Index
from meshweave.ir.program.views import FULL, Selector, View


def full_matrix(buffer: str) -> View:
    """Return the view of a whole matrix, of the first slot of its buffer."""
    return View(buffer, (FULL, FULL))


def matrix_slice(buffer: str, dim: int, selector: Selector, slot: Index = 0) -> View:
    """Return the view of the rows (`dim` 0) or columns (`dim` 1) of a matrix that a selector picks.

    The other dim is whole. `slot` is which of the buffer's copies the view is of.
    """
    return View(buffer, (selector, FULL) if dim == 0 else (FULL, selector), slot)
