"""Objects that notebooks show as pictures and tables."""

from __future__ import annotations

from importlib import import_module


class Shown:
    """Base of objects that a notebook shows as HTML.

    `meshweave.notebook` writes the HTML. It is imported when a notebook calls `_repr_html_`, so that this module
    depends on no other.
    """

    def _repr_html_(self) -> str:
        """Return the object as HTML with its styles inline, without scripts."""
        html: str = import_module("meshweave.notebook").html_of(self)
        return html
