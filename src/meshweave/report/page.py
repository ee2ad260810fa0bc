"""The frame, style and tables of all HTML pages. Pages load nothing from anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2733; max-width: 1180px;
  margin: 32px auto; padding: 0 20px; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 19px; margin: 40px 0 8px; }
p { margin: 6px 0 12px; max-width: 900px; } .quiet { color: #5a6673; font-size: 13.5px; }
.lead { font-size: 16px; border-left: 4px solid #3b6fb6; padding: 4px 14px; margin: 18px 0; background: #f5f8fc; }
.wide { overflow-x: auto; margin: 10px 0 18px; }
table { border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 6px; text-align: right; white-space: nowrap; border-bottom: 1px solid #e3e7ec; }
th { color: #4a5562; font-weight: 600; white-space: normal; border-bottom: 2px solid #c6ced8; }
th { vertical-align: bottom; }
th.l, td.l { text-align: left; } tr.best td { background: #f5f8fc; font-weight: 600; }
tr.group td { border-top: 2px solid #c6ced8; }
.bar { display: block; max-width: none; } details { margin: 8px 0; } summary { cursor: pointer; color: #3b6fb6; }
.key { display: inline-block; width: 11px; height: 11px; margin: 0 5px 0 12px; }
"""


def page(title: str, body: str, *, style: str = "", script: str = "") -> str:
    """Return a whole page; `title` is text, `body` HTML; `style` comes after that of all pages."""
    scripts = f"<script>{script}</script>" if script else ""
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}{style}</style></head>\n<body>\n{body}\n{scripts}</body></html>\n"
    )


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
