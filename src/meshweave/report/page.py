"""The frame, style and tables of all HTML pages. Pages load nothing from anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from html import escape
from importlib.resources import files


@lru_cache(maxsize=8)
def asset(name: str) -> str:
    """Return the text of a style sheet or script that stands beside this module."""
    return (files("meshweave.report") / name).read_text("utf-8")


def page(title: str, body: str, *, style: str = "", script: str = "") -> str:
    """Return a whole page; `title` is text, `body` HTML; `style` and `script` come after those of all pages."""
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{asset('page.css')}{style}</style></head>\n<body>\n"
        f'<button id="theme" type="button" title="colours of the page">colours</button>\n{body}\n'
        f"<script>{asset('page.js')}{script}</script></body></html>\n"
    )


def notes(texts: Sequence[str]) -> str:
    """Return an HTML list of what the numbers of a page do not know; "" for nothing."""
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f"<p>Not in these numbers:</p><ul>{items}</ul>" if items else ""


def table(head: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]], left: Sequence[str]) -> str:
    """Return an HTML table of `rows` of (class, cells as HTML). `head` is text; columns in `left` align left."""
    classes = [' class="l"' if name in left else "" for name in head]
    top = "".join(f"<th{c}>{escape(name)}</th>" for c, name in zip(classes, head, strict=True))
    lines = "".join(
        f'<tr class="{kind}">'
        + "".join(f"<td{c}>{cell}</td>" for c, cell in zip(classes, cells, strict=True))
        + "</tr>\n"
        for kind, cells in rows
    )
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>\n{lines}</tbody></table></div>'
