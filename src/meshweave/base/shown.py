"""Objects that notebooks show as pictures and tables."""

from __future__ import annotations

from importlib import import_module


class Shown:
    """Base of what a notebook shows by HTML. `meshweave.notebook` writes it, above all folders.

    It is found by its name when a notebook asks: a notebook asks the object itself, and an object knows no
    pictures.
    """

    def _repr_html_(self) -> str:
        """Return the object as HTML with its styles inline, without scripts."""
        html: str = import_module("meshweave.notebook").html_of(self)
        return html
