"""SVG pictures as PNG, for places that show no SVG. Needs the optional package resvg-py."""

from __future__ import annotations

from pathlib import Path

from meshweave.base.errors import UnsupportedError
from meshweave.base.outputs import write_file


def require_png() -> None:
    """Raise UnsupportedError if the package that writes PNG is missing."""
    try:
        import resvg_py  # noqa: F401
    except ImportError:
        raise UnsupportedError(
            "PNG pictures need the package resvg-py; install it with: pip install 'meshweave[png]'"
        ) from None


def to_png(svg: str) -> bytes:
    """Return a picture as PNG at twice the size of the SVG, so that text stays sharp.

    Raises UnsupportedError if the package that writes PNG is missing.
    """
    require_png()
    import resvg_py

    return bytes(resvg_py.svg_to_bytes(svg_string=svg, zoom=2, background="white"))


def write_png(path: Path, svg: str) -> None:
    """Write an SVG picture as a PNG file.

    Raises UnsupportedError if the package that writes PNG is missing, DescriptionError where writing fails.
    """
    write_file(path, to_png(svg))
