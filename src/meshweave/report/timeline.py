"""Timelines of traces: as text for a terminal, as SVG for a page, as Chrome trace events for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

from meshweave.base.outputs import write_file
from meshweave.base.units import PS_PER_S, format_s
from meshweave.trace import Span, Trace, to_chrome

_GLYPH = {"compute": "█", "move": "▒", "communicate": "━"}
_COLOUR = {"compute": "#3b6fb6", "move": "#9aa7b5", "communicate": "#d9822b"}


def timeline_text(trace: Trace, rank: int, width: int = 80) -> str:
    """Return a timeline as text: each lane of `rank` by name with a bar of `width` characters, then the scale.

    A character shows the activity that lasts longest in its share of the time: `█` product or call, `▒` copy or
    add, `━` communication. Time is from the first span of any rank to the last end. Without spans it is
    "(empty trace)".
    """
    if not trace.spans:
        return "(empty trace)"
    begin = min(span.start_ps for span in trace.spans)
    length = max(max(span.end_ps for span in trace.spans) - begin, 1)
    lanes = sorted({span.lane for span in trace.spans if span.rank == rank})
    label = max(map(len, lanes), default=0)
    lines = []
    for lane in lanes:
        shares: list[dict[str, int]] = [{} for _ in range(width)]
        for span in trace.spans:
            if span.rank == rank and span.lane == lane:
                _spread(span, begin, length, shares)
        cells = (_GLYPH[max(share, key=lambda kind: share[kind])] if share else " " for share in shares)
        lines.append(f"{lane:<{label}} │{''.join(cells)}│")
    lines.append(f"{'':<{label}}  0{format_s(length / PS_PER_S):>{width - 1}}")
    return "\n".join(lines)


def _spread(span: Span, begin: int, length: int, shares: list[dict[str, int]]) -> None:
    width, kind = len(shares), span.activity
    first = (span.start_ps - begin) * width // length
    last = min((span.end_ps - begin) * width // length, width - 1)
    for column in range(first, last + 1):
        lo, hi = begin + column * length // width, begin + (column + 1) * length // width
        shared = min(span.end_ps, hi) - max(span.start_ps, lo)
        if shared > 0:
            shares[column][kind] = shares[column].get(kind, 0) + shared


def timeline_svg(traces: Sequence[tuple[str, Trace]], rank: int | None = None, width: int = 960) -> str:
    """Return an SVG of the lanes of one rank: traces under each other on one scale of time.

    Each trace begins at the left, with the first span of any rank.

    Args:
        traces: (title, trace) of each; a title is plain text.
        rank: a global rank; None for the lowest rank of each trace.
        width: pixels.
    """
    lane_height, gap, left, top = 22, 34, 96, 28
    longest = max((trace.duration_s for _, trace in traces), default=0.0) or 1e-12
    rows: list[str] = []
    y = top
    for title, trace in traces:
        rows.append(
            f'<text x="{left}" y="{y - 8}" font-weight="bold">{escape(title)}: {format_s(trace.duration_s)}</text>'
        )
        begin = min((span.start_ps for span in trace.spans), default=0)
        own = min((span.rank for span in trace.spans), default=0) if rank is None else rank
        for lane in sorted({span.lane for span in trace.spans if span.rank == own}):
            rows.append(f'<text x="{left - 8}" y="{y + 15}" text-anchor="end">{escape(lane)}</text>')
            rows.append(
                f'<rect x="{left}" y="{y}" width="{width - left - 12}" height="{lane_height - 4}" fill="#f2f4f6"/>'
            )
            for span in trace.spans:
                if span.rank == own and span.lane == lane:
                    rows.append(_box(span, begin, left, y, lane_height - 4, (width - left - 12) / longest))
            y += lane_height
        y += gap
    legend = "".join(
        f'<rect x="{left + 150 * i}" y="{y - 16}" width="12" height="12" fill="{_COLOUR[kind]}"/>'
        f'<text x="{left + 150 * i + 18}" y="{y - 6}">{text}</text>'
        for i, (kind, text) in enumerate(
            (("compute", "product"), ("move", "copy or add"), ("communicate", "communication"))
        )
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y + 8}" '
        f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
        f"{''.join(rows)}{legend}</svg>\n"
    )


def _box(span: Span, begin: int, left: int, y: int, height: int, per_second: float) -> str:
    x = left + (span.start_ps - begin) / PS_PER_S * per_second
    wide = max((span.end_ps - span.start_ps) / PS_PER_S * per_second, 0.5)
    title = f"{span.label}: {format_s((span.end_ps - span.start_ps) / PS_PER_S)}"
    return (
        f'<rect x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{height}" fill="{_COLOUR[span.activity]}" '
        f'stroke="white" stroke-width="0.4"><title>{escape(title)}</title></rect>'
    )


def write_chrome(path: Path, traces: Sequence[Trace]) -> None:
    """Write a Chrome / Perfetto trace of several traces beside each other.

    Raises DescriptionError where writing fails.
    """
    write_file(path, json.dumps(to_chrome(traces)) + "\n")
