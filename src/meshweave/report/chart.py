"""Line charts as SVG: axes, labels, units and a legend, without a plotting library or a network."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from meshweave.report.svg import LETTER, chart_frame

COLOURS = (
    *("#3b6fb6", "#d9822b", "#2a9d76", "#b5477a", "#7a5cc0", "#8a6d3b", "#4aa3c7"),
    *("#c23b3b", "#5f6b7a", "#7d9b22", "#1f3f73", "#e0a0c0", "#000000"),
)
WIDTH = 960
"""Pixels of a chart across."""
_LEFT, _TOP = 68, 34


@dataclass(frozen=True)
class Series:
    """A line of a chart.

    Attributes:
        name: its name in the legend.
        points: (x, y) of each point in the order in which the line joins them; y is positive.
        chosen: indices into `points` of those that are ringed.
        joined: whether a line joins the points; else they are black crosses, to compare lines with, and none is
            ringed.
    """

    name: str
    points: tuple[tuple[float, float], ...]
    chosen: tuple[int, ...] = ()
    joined: bool = True


def line_chart(
    title: str,
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    *,
    x_ticks: Sequence[tuple[float, str]] | None = None,
    x_log: bool = False,
    y_log: bool | None = None,
    y_text: Callable[[float], str] = lambda value: f"{value:g}",
    height: int = 360,
) -> str:
    """Return an SVG line chart, `height` pixels high; "" without points.

    Args:
        x_ticks: (x, text) of each tick; by default ticks stand at the x of the points. The axis ends with them.
        x_log: whether the x axis is logarithmic.
        y_log: whether the y axis is logarithmic; else it begins at 0. None for logarithmic where the greatest y
            is over 8 times the least.
        y_text: returns the text of a y value in tooltips, with its unit.
    """
    points = [point for line in series for point in line.points]
    if not points:
        return ""
    ticks = x_ticks or [(x, f"{x:g}") for x in sorted({x for x, _ in points})]
    longest = max(len(text) for _, text in ticks)
    right = 28 + int(LETTER * max(len(line.name) for line in series)) + 16
    across = WIDTH - _LEFT - right
    turned = len(ticks) * (longest + 2) * LETTER > across
    bottom = 44 + (int(longest * LETTER) if turned else 14)
    x_at = axis_scale([x for x, _ in ticks], x_log, _LEFT + 14, _LEFT + across - 14)
    lowest, highest = min(y for _, y in points), max(y for _, y in points)
    logarithmic = highest > 8 * lowest if y_log is None else y_log
    y_ticks = _log_ticks(lowest, highest) if logarithmic else linear_ticks(highest)
    y_at = axis_scale(y_ticks, logarithmic, height - bottom, _TOP)
    parts = [f'<text x="{_LEFT}" y="16" font-weight="bold">{escape(title)}</text>']
    for y in y_ticks:
        at = y_at(y)
        parts.append(
            f'<line x1="{_LEFT}" x2="{_LEFT + across}" y1="{at:.1f}" y2="{at:.1f}" stroke="#e3e7ec"/>'
            f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end" fill="#4a5562">{y:g}</text>'
        )
    parts += _x_axis(ticks, x_at, height - bottom, across, turned)
    middle = (_TOP + height - bottom) / 2
    parts.append(
        f'<text x="{_LEFT + across / 2:.1f}" y="{height - 8}" text-anchor="middle">{escape(x_label)}</text>'
        f'<text transform="translate(16 {middle:.1f}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_label + (', logarithmic' if logarithmic else ''))}</text>"
    )
    texts = dict(ticks)
    for number, line in enumerate(series):
        parts += _line(line, number, x_at, y_at, lambda x: texts.get(x, f"{x:g}"), y_text)
        y, x = _TOP + 8 + 20 * number, _LEFT + across + 16
        dash = f'<line x1="{x - 8}" x2="{x + 10}" y1="{y}" y2="{y}" stroke="{_colour(number)}" stroke-width="2"/>'
        key = dash + _marker(x + 1, y, number, "") if line.joined else _cross(x + 1, y, "")
        parts.append(f'{key}<text x="{x + 16}" y="{y + 4}">{escape(line.name)}</text>')
    return chart_frame(title, WIDTH, height, parts)


def _x_axis(
    ticks: Sequence[tuple[float, str]], x_at: Callable[[float], float], y: float, across: float, turned: bool
) -> list[str]:
    parts = [f'<line x1="{_LEFT}" x2="{_LEFT + across}" y1="{y}" y2="{y}" stroke="#4a5562"/>']
    for x, text in ticks:
        at = x_at(x)
        place = f'transform="translate({at + 4:.1f} {y + 10}) rotate(-90)" text-anchor="end"'
        if not turned:
            place = f'x="{at:.1f}" y="{y + 18}" text-anchor="middle"'
        parts.append(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{y}" y2="{y + 4}" stroke="#4a5562"/>'
            f'<text {place} fill="#4a5562">{escape(text)}</text>'
        )
    return parts


def _line(
    line: Series,
    number: int,
    x_at: Callable[[float], float],
    y_at: Callable[[float], float],
    x_text: Callable[[float], str],
    y_text: Callable[[float], str],
) -> list[str]:
    colour = _colour(number)
    if not line.joined:
        return [_cross(x_at(x), y_at(y), f"{line.name}, {x_text(x)}: {y_text(y)}") for x, y in line.points]
    path = " ".join(f"{x_at(x):.1f},{y_at(y):.1f}" for x, y in line.points)
    parts = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>']
    for place, (x, y) in enumerate(line.points):
        if place in line.chosen:
            parts.append(
                f'<circle cx="{x_at(x):.1f}" cy="{y_at(y):.1f}" r="8" fill="none" stroke="{colour}" '
                'stroke-width="2"/>'
            )
        parts.append(_marker(x_at(x), y_at(y), number, f"{line.name}, {x_text(x)}: {y_text(y)}"))
    return parts


def _marker(x: float, y: float, number: int, title: str) -> str:
    """Return a circle, square, diamond or triangle, so that lines differ in more than their colour."""
    shapes = (
        "M-3.5 0 a3.5 3.5 0 1 0 7 0 a3.5 3.5 0 1 0 -7 0",
        "M-3.2 -3.2 h6.4 v6.4 h-6.4 Z",
        "M0 -4.5 L4.5 0 L0 4.5 L-4.5 0 Z",
        "M0 -4.2 L4 3.2 L-4 3.2 Z",
    )
    inside = f"<title>{escape(title)}</title>" if title else ""
    return (
        f'<path d="{shapes[number % len(shapes)]}" transform="translate({x:.1f} {y:.1f})" '
        f'fill="{_colour(number)}">{inside}</path>'
    )


def _cross(x: float, y: float, title: str) -> str:
    inside = f"<title>{escape(title)}</title>" if title else ""
    return (
        f'<path d="M-5 -5 L5 5 M-5 5 L5 -5" transform="translate({x:.1f} {y:.1f})" stroke="black" '
        f'stroke-width="2.5" fill="none">{inside}</path>'
    )


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def axis_scale(values: Sequence[float], log: bool, start: float, stop: float) -> Callable[[float], float]:
    """Return a function that maps a value to pixels: the least of `values` to `start`, the greatest to `stop`.

    Between and beyond them it is linear, or logarithmic with `log`. Where all `values` are equal it returns the
    middle.
    """
    kind: Callable[[float], float] = math.log if log else float
    low, high = kind(min(values)), kind(max(values))
    if high == low:
        return lambda value: (start + stop) / 2
    return lambda value: start + (kind(value) - low) / (high - low) * (stop - start)


def linear_ticks(highest: float) -> list[float]:
    """Return the ticks of an axis from 0 to at least `highest`, which is positive.

    They are four to eight equal steps of 1, 2 or 5 times a power of ten.
    """
    power = 10.0 ** math.floor(math.log10(highest))
    step = next(s for s in (0.1, 0.2, 0.5, 1.0, 2.0) if highest / (s * power) <= 8) * power
    return [round(step * i, 12) for i in range(math.ceil(highest / step - 1e-9) + 1)]


def _log_ticks(lowest: float, highest: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten, the first at most `lowest`, the last at least `highest`."""
    first, last = math.floor(math.log10(lowest)), math.ceil(math.log10(highest))
    steps = (1, 2, 5) if last - first <= 4 else (1,)
    ticks = [float(f"{s}e{e}") for e in range(first, last + 1) for s in steps]
    low = max((t for t in ticks if t <= lowest), default=ticks[0])
    high = min((t for t in ticks if t >= highest), default=ticks[-1])
    return [t for t in ticks if low <= t <= high]
