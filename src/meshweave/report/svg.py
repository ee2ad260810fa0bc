"""What pictures in SVG share: their frames, keys in a row, and pieces too small to be seen apart.

Charts stand on white, with sizes for a page. Pictures of time bring a light background of their own, so that they
read the same on light and dark pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from html import escape
from typing import TypeVar

LETTER, TIME_LETTER = 6.4, 6.7
"""The widths of a letter in charts, and in pictures of time."""
GREY, INK = "#57606a", "#1c232b"

Piece = TypeVar("Piece")


def chart_frame(title: str, width: int, height: int, parts: Iterable[str]) -> str:
    """Return an SVG of `width` x `height` pixels on white, with `parts` (SVG elements) in it.

    `title` is not drawn: it names the picture for screen readers.
    """
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="12" role="img" aria-label="{escape(title)}">'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>'
    )


def chart_heading(title: str) -> str:
    """Return the SVG text element of a chart's title, at the top left."""
    return f'<text x="16" y="20" font-weight="bold" font-size="14">{escape(title)}</text>'


def time_frame(title: str, subtitle: str, width: int, bottom: float, parts: Iterable[str]) -> str:
    """Return the text of an SVG with a frame, a title, a subtitle ("" for none) and `parts`, SVG elements.

    `parts` are all else that is drawn, the axis and the legend too, in pixels from the top left corner. They are
    not moved: leave y up to 62 (44 without a subtitle) to the heading. Titles are escaped here.

    Args:
        width: width of the picture in pixels.
        bottom: y at which the timelines end, in pixels. The height of the picture is `bottom` + 60, with room for
            the numbers of an axis and a legend.
    """
    height = int(bottom + 60)
    head = f'<text x="16" y="26" font-size="15" font-weight="bold">{escape(title)}</text>'
    if subtitle:
        head += f'<text x="16" y="45" fill="{GREY}">{escape(subtitle)}</text>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="Helvetica, Arial, DejaVu Sans, sans-serif" font-size="12" '
        f'fill="{INK}" role="img" aria-label="{escape(title)}"><rect x="0.5" y="0.5" width="{width - 1}" '
        f'height="{height - 1}" rx="6" fill="white" stroke="#d0d7de"/>{head}{"".join(parts)}</svg>\n'
    )


def shape_keys(shapes: Iterable[tuple[str, str]], y: float) -> list[str]:
    """Return the SVG elements of a legend in one row, each shape with its name at its right.

    Args:
        shapes: (name, shape) of each entry, a shape being SVG elements drawn from x = 0 on, at height `y`.
        y: the middle of the row, in pixels.
    """
    out, x = [], 16.0
    for name, shape in shapes:
        text = f'<text x="26" y="{y + 4:.1f}">{escape(name)}</text>'
        out.append(f'<g transform="translate({x:.0f} 0)">{shape}{text}</g>')
        x += 26 + LETTER * len(name) + 24
    return out


def colour_keys(colours: Iterable[tuple[str, str]], left: int, y: float) -> list[str]:
    """Return the SVG elements of a legend in one row, a box of each colour with its name at its right.

    Args:
        colours: (name, colour) of each entry; a name is SVG text, not escaped here.
        left, y: where the row begins, and the baseline of its text, in pixels.
    """
    out, x = [], float(left)
    for name, colour in colours:
        out.append(
            f'<rect x="{x:.0f}" y="{y - 10:.0f}" width="12" height="12" fill="{colour}"/>'
            f'<text x="{x + 18:.0f}" y="{y:.0f}">{name}</text>'
        )
        x += 18 + TIME_LETTER * len(name) + 22
    return out


def narrow_runs(pieces: Iterable[Piece], is_wide: Callable[[Piece, Piece], bool]) -> Iterator[list[Piece]]:
    """Yield `pieces` in order, as lists of neighbours that are too narrow to be drawn one by one.

    A piece is appended to the current list unless `is_wide(first piece of the list, piece)`, which begins a new
    list.
    """
    run: list[Piece] = []
    for piece in pieces:
        if run and is_wide(run[0], piece):
            yield run
            run = []
        run.append(piece)
    if run:
        yield run
