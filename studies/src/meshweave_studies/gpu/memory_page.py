"""A run on a GPU in detail as one HTML page: its kernels, and what its memory did over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from meshweave.base.units import format_bytes, format_s, to_s
from meshweave.report.chart import COLOURS
from meshweave.report.page import page, table
from meshweave.trace import Counter, Span, Trace

_WIDTH, _LEFT, _RIGHT, _PANEL, _LANE = 1120, 68, 272, 120, 22
_COLUMNS = 390
"""Steps that a panel shows at most, each a mean of what falls into it."""


def memory_page(
    title: str, subject: str, lead: str, trace: Trace, traffic_bytes: Mapping[str, int], waits: str
) -> str:
    """Return the page of a run.

    Args:
        subject, lead: two lines below the title: what ran where, and its main numbers.
        traffic_bytes: bytes that memory read and wrote, by what for.
        waits: a sentence about who waited for whom.
    """
    whole = max(sum(traffic_bytes.values()), 1)
    traffic = [
        [escape(name), format_bytes(count), f"{100 * count / whole:.1f} %"]
        for name, count in traffic_bytes.items()
    ]
    kernels = [
        [escape(span.label), format_s(to_s(span.start_ps)), format_s(to_s(span.end_ps - span.start_ps))]
        for span in trace.spans
    ]
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="quiet">{escape(subject)}; one GPU down to its memory controllers, which stands for all.</p>',
        f'<p class="lead">{escape(lead)}</p>',
        f'<div class="wide">{draw_counters(trace)}</div>',
        f'<p class="quiet">{escape(waits)}</p>',
        "<h2>Kernels</h2>",
        table(["kernel", "from", "took"], kernels, ("kernel",)),
        "<h2>Memory traffic</h2>",
        table(["of", "bytes", "share"], traffic, ("of",)),
    ]
    return page(title, "\n".join(body))


def draw_counters(trace: Trace) -> str:
    """Return an SVG: the spans of a trace on top, below them a panel of each counter, its series stacked."""
    last = max([1, *(span.end_ps for span in trace.spans)])
    scale = (_WIDTH - _LEFT - _RIGHT) / last
    parts = [part for span in trace.spans for part in _span(span, scale)]
    top = _LANE + 34
    for counter in trace.counters:
        parts += _panel(counter, last, scale, top)
        top += _PANEL + 46
    for number in range(6):
        x = _LEFT + last * number / 5 * scale
        parts.append(
            f'<text x="{x:.1f}" y="{top - 14}" text-anchor="middle" fill="#4a5562">'
            f"{format_s(to_s(last * number // 5))}</text>"
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top}" width="{_WIDTH}" height="{top}" '
        'font-family="sans-serif" font-size="12" role="img" aria-label="memory over time">'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>'
    )


def _span(span: Span, scale: float) -> list[str]:
    x, wide = _LEFT + span.start_ps * scale, max((span.end_ps - span.start_ps) * scale, 1)
    took = format_s(to_s(span.end_ps - span.start_ps))
    text = f'<text x="{x + 4:.1f}" y="19" fill="white">{escape(span.label)}</text>' if wide > 80 else ""
    colour = COLOURS[0] if span.activity == "compute" else COLOURS[1]
    return [
        f'<rect x="{x:.1f}" y="4" width="{wide:.1f}" height="{_LANE}" fill="{colour}" stroke="white">'
        f"<title>{escape(span.label)}: {took}</title></rect>{text}"
    ]


def _panel(counter: Counter, last: int, scale: float, top: float) -> list[str]:
    """Return a panel: stacked steps of each series, a grid, and a legend with the mean of each."""
    count = min(_COLUMNS, max(len(counter.times_ps), 1))
    stacks = [_steps(counter.times_ps, values, last, count) for values in counter.values.values()]
    highest = max([1e-9, *(sum(column) for column in zip(*stacks, strict=True))])
    bottom, wide = top + _PANEL, last / count * scale
    parts = [f'<text x="{_LEFT}" y="{top - 6}" font-weight="bold">{escape(counter.name)}</text>']
    for share in (0, 0.5, 1):
        y = bottom - share * _PANEL
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}" stroke="#e3e7ec"/>'
            f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end" fill="#4a5562">{highest * share:.3g}</text>'
        )
    below = [0.0] * count
    for number, (name, steps) in enumerate(zip(counter.values, stacks, strict=True)):
        above = [low + value for low, value in zip(below, steps, strict=True)]
        forth, back = (
            [
                f"{_LEFT + at * wide:.1f},{bottom - edge[place] / highest * _PANEL:.1f}"
                for place in range(count)
                for at in (place, place + 1)
            ]
            for edge in (above, below)
        )
        colour, y = COLOURS[number % len(COLOURS)], top + 10 + 18 * number
        mean = sum(steps) / count
        parts.append(
            f'<polygon points="{" ".join((*forth, *reversed(back)))}" fill="{colour}">'
            f"<title>{escape(name)}</title></polygon>"
            f'<rect x="{_WIDTH - _RIGHT + 12}" y="{y - 9}" width="11" height="11" fill="{colour}"/>'
            f'<text x="{_WIDTH - _RIGHT + 29}" y="{y}">{escape(name)}: {mean:.3g}</text>'
        )
        below = above
    return parts


def _steps(times_ps: Sequence[int], values: Sequence[float], last: int, count: int) -> list[float]:
    """Return the means of a series over `count` equal parts of the time to `last`."""
    sums, seen = [0.0] * count, [0] * count
    for at_ps, value in zip(times_ps, values, strict=True):
        place = min(at_ps * count // last, count - 1)
        sums[place] += value
        seen[place] += 1
    return [total / max(number, 1) for total, number in zip(sums, seen, strict=True)]
