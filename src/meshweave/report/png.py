"""SVG pictures as PNG, for places that show no SVG. Needs the optional package resvg-py."""

from __future__ import annotations

from meshweave.base.errors import UnsupportedError


def check_png() -> None:
    """Raises UnsupportedError where PNG cannot be written."""
    try:
        import resvg_py  # noqa: F401
    except ImportError:
        raise UnsupportedError(
            "PNG pictures need the package resvg-py; install it with: pip install 'meshweave[png]'"
        ) from None


def to_png(svg: str) -> bytes:
    """At twice the size of the SVG, so that text stays sharp. Raises UnsupportedError."""
    check_png()
    import resvg_py

    return bytes(resvg_py.svg_to_bytes(svg_string=svg, zoom=2, background="white"))
