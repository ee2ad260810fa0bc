"""Views of buffers that hold matrices."""

from __future__ import annotations

from meshweave.ir.program.expressions import Index
from meshweave.ir.program.views import FULL, Selector, View


def full_matrix(buffer: str) -> View:
    """Return the view of a whole matrix."""
    return View(buffer, (FULL, FULL))


def matrix_slice(buffer: str, dim: int, selector: Selector, slot: Index = 0) -> View:
    """Return the view of what a selector takes of one dim, and all of the other dim."""
    return View(buffer, (selector, FULL) if dim == 0 else (FULL, selector), slot)
