"""The frame, style and tables of all HTML pages. Pages load nothing from anywhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from html import escape
from importlib.resources import files


@lru_cache(maxsize=8)
def asset(name: str) -> str:
    """Return the text of the style sheet or script `name` in the folder of this module, such as "page.css"."""
    return (files("meshweave.report") / name).read_text("utf-8")


def page(title: str, body: str, *, style: str = "", script: str = "") -> str:
    """Return a whole HTML page; `title` is plain text, `body` HTML.

    `style` (CSS) and `script` (JavaScript) come after those that all pages have.
    """
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{asset('page.css')}{style}</style></head>\n<body>\n"
        f'<button id="theme" type="button" title="colours of the page">colours</button>\n{body}\n'
        f"<script>{asset('page.js')}{script}</script></body></html>\n"
    )


def notes(texts: Sequence[str]) -> str:
    """Return an HTML list of what the page's numbers leave out, plain text each; "" if `texts` is empty."""
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f"<p>Not in these numbers:</p><ul>{items}</ul>" if items else ""


def bar(parts: Iterable[tuple[float, str]], whole: float, width: int = 150, height: int = 13) -> str:
    """Return an inline SVG of a stacked horizontal bar, `width` x `height` pixels.

    Args:
        parts: (amount, colour) of each part, from left to right.
        whole: the amount that fills the width.
    """
    x, boxes = 0.0, []
    for amount, colour in parts:
        wide = width * amount / whole if whole else 0.0
        boxes.append(f'<rect x="{x:.1f}" width="{wide:.1f}" height="{height}" fill="{colour}"/>')
        x += wide
    return f'<svg class="bar" width="{width}" height="{height}">{"".join(boxes)}</svg>'


def key(colour: str, text: str) -> str:
    """Return the HTML of a legend entry: a box of `colour`, then `text`, which is HTML."""
    return f'<span class="key" style="background:{colour}"></span>{text}'


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    left: Sequence[str],
    kinds: Mapping[int, str] | None = None,
) -> str:
    """Return an HTML table.

    Args:
        head: the titles of the columns, as plain text.
        rows: the cells of each row, as HTML.
        left: the titles of the columns that are aligned to the left.
        kinds: the CSS classes of rows, by the row's index from 0; rows that are not in it have none.
    """
    kinds = kinds or {}
    classes = [' class="l"' if name in left else "" for name in head]
    top = "".join(f"<th{c}>{escape(name)}</th>" for c, name in zip(classes, head, strict=True))
    lines = "".join(
        f'<tr class="{kinds.get(number, "")}">'
        + "".join(f"<td{c}>{cell}</td>" for c, cell in zip(classes, cells, strict=True))
        + "</tr>\n"
        for number, cells in enumerate(rows)
    )
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>\n{lines}</tbody></table></div>'
