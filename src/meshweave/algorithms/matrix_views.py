"""Views of buffers that hold matrices."""

from __future__ import annotations

from meshweave.ir.program.expressions import Index
from meshweave.ir.program.views import FULL, Selector, View


def full_matrix(buffer: str) -> View:
    """Return the view of a whole matrix."""
    return View(buffer, (FULL, FULL))


def matrix_slice(buffer: str, dim: int, selector: Selector, slot: Index = 0) -> View:
    """Return the view of a matrix that a selector restricts in one dim; the other dim is whole."""
    return View(buffer, (selector, FULL) if dim == 0 else (FULL, selector), slot)
