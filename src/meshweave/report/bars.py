"""Groups of horizontal bars as SVG: rivals side by side, with marks for what was expected of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from meshweave.report.chart import COLOURS, WIDTH, axis_scale, linear_ticks
from meshweave.report.svg import LETTER, chart_frame, chart_heading, shape_keys

ROW, BAR = 22, 13
"""The height of a row of charts, and of the bar in it."""
_HEADER, _TOP, _RIGHT = 30, 30, 24
Scale = Callable[[float], float]
GREY = "#4a5562"


@dataclass(frozen=True)
class Bar:
    """A horizontal bar.

    Attributes:
        name: stands at its left.
        value: its length, in the chart's unit and not negative.
        low, high: the ends of its whisker; equal ones draw none.
        text: stands at its right, after whisker and marks: mostly the value with its unit.
        marks: expected values, one for each of the chart's `mark_names`; None for no mark.
        family: bars of one family have one colour in all groups; "" stands for `name`.
    """

    name: str
    value: float
    low: float
    high: float
    text: str
    marks: tuple[float | None, ...] = ()
    family: str = ""


@dataclass(frozen=True)
class Group:
    """Bars under one heading, in the order of drawing."""

    title: str
    bars: tuple[Bar, ...]


def bar_chart(
    title: str,
    groups: Sequence[Group],
    x_label: str,
    *,
    mark_names: Sequence[str] = (),
    bar_name: str = "median",
    spread_name: str = "fastest to slowest",
    line_at: float | None = None,
    line_name: str = "",
    notes: Sequence[str] = (),
) -> str:
    """Return an SVG of horizontal bars from 0 on one linear scale; "" where there are none.

    Args:
        x_label: what the scale is, with its unit.
        mark_names: what the first and the second mark of each bar mean; two at most.
        bar_name, spread_name: what a bar's length and its whisker mean, in the legend; `spread_name` "" leaves
            whiskers out of the legend, not out of the chart.
        line_at: x, in the unit of the bars, of a vertical line through all groups, such as a bound; None for no
            line.
        line_name: what the line means, in the legend; "" leaves it out there.
        notes: lines of small text at the bottom.
    """
    bars = [bar for group in groups for bar in group.bars]
    if not bars:
        return ""
    assert len(mark_names) <= len(_MARKS), "more marks than shapes"
    left = 20 + int(LETTER * max(len(bar.name) for bar in bars))
    right = _RIGHT + int(LETTER * max(len(bar.text) for bar in bars))
    most = max(max(bar.high, bar.value, *(mark or 0.0 for mark in bar.marks)) for bar in bars)
    most = max(most, line_at or 0.0)
    ticks = linear_ticks(most)
    x_at = axis_scale(ticks, False, left, WIDTH - right)
    families = list(dict.fromkeys(bar.family or bar.name for bar in bars))
    colours = {family: COLOURS[number % len(COLOURS)] for number, family in enumerate(families)}
    drawn, y = [], float(_TOP)
    for group in groups:
        y += _HEADER
        drawn.append(f'<text x="16" y="{y - 9:.0f}" font-weight="bold">{escape(group.title)}</text>')
        for bar in group.bars:
            drawn += _bar(bar, colours[bar.family or bar.name], y, left, x_at, mark_names)
            y += ROW
    bottom = y + 4
    grid = ticks_above(ticks, x_at, _TOP, bottom)
    if line_at is not None:
        grid.append(dashed(x_at(line_at), _TOP, bottom))
    middle = (left + WIDTH - right) / 2
    grid.append(f'<text x="{middle:.1f}" y="{bottom + 36:.0f}" text-anchor="middle">{escape(x_label)}</text>')
    legend, y = _legend(bar_name, spread_name, mark_names, line_name, bottom + 58)
    for note in notes:
        legend.append(f'<text x="16" y="{y:.0f}" font-size="11" fill="{GREY}">{escape(note)}</text>')
        y += 16
    parts = (chart_heading(title), *grid, *drawn, *legend)
    return chart_frame(title, WIDTH, int(y), parts) + "\n"


def ticks_above(ticks: Sequence[float], x_at: Scale, top: float, bottom: float) -> list[str]:
    """Return the SVG elements of a grid: for each tick a vertical line, and its number below.

    Args:
        ticks: values on the x axis.
        x_at: maps a tick to its x in pixels.
        top, bottom: where the lines begin and end, in pixels.
    """
    grid = []
    for tick in ticks:
        x = x_at(tick)
        grid.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom:.0f}" stroke="#e3e7ec"/>')
        grid.append(
            f'<text x="{x:.1f}" y="{bottom + 16:.0f}" text-anchor="middle" fill="{GREY}">{tick:g}</text>'
        )
    return grid


def _bar(bar: Bar, colour: str, y: float, left: int, x_at: Scale, mark_names: Sequence[str]) -> list[str]:
    centre, end = y + BAR / 2, x_at(bar.value)
    low, high = x_at(bar.low), x_at(bar.high)
    parts = [
        f'<text x="{left - 8}" y="{centre + 4:.1f}" text-anchor="end">{escape(bar.name)}</text>',
        f'<rect x="{left}" y="{y:.1f}" width="{max(end - left, 0.5):.1f}" height="{BAR}" fill="{colour}">'
        f"<title>{escape(f'{bar.name}: {bar.text}')}</title></rect>",
    ]
    if high > low:
        parts.append(_whisker(low, high, centre))
    furthest = max(end, high)
    for name, value, shape in zip(mark_names, bar.marks, _MARKS, strict=False):
        if value is not None:
            parts.append(_mark(x_at(value), centre, shape, f"{bar.name}, {name}: {value:.2f}"))
            furthest = max(furthest, x_at(value))
    parts.append(f'<text x="{furthest + 8:.1f}" y="{centre + 4:.1f}" fill="{GREY}">{escape(bar.text)}</text>')
    return parts


# Around (0, 0): a tall thin bar, then a hollow diamond.
_MARKS = (
    f'd="M-1.5 -{BAR / 2 + 3} h3 v{BAR + 6} h-3 Z" fill="black"',
    'd="M0 -5 L5 0 L0 5 L-5 0 Z" fill="white" stroke="black" stroke-width="1.5"',
)


def _mark(x: float, y: float, shape: str, title: str) -> str:
    return f'<path {shape} transform="translate({x:.1f} {y:.1f})"><title>{escape(title)}</title></path>'


def _whisker(low: float, high: float, y: float) -> str:
    return (
        f'<path d="M{low:.1f} {y:.1f} H{high:.1f} M{low:.1f} {y - 3:.1f} v6 M{high:.1f} {y - 3:.1f} v6" '
        'stroke="#1c232b" fill="none"/>'
    )


def dashed(x: float, top: float, bottom: float) -> str:
    """Return the SVG of a dashed vertical line at `x`, from `top` to `bottom`, in pixels."""
    ends = f'x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{bottom:.1f}"'
    return f'<line {ends} stroke="{GREY}" stroke-dasharray="5 3"/>'


def _legend(
    bar_name: str, spread_name: str, mark_names: Sequence[str], line_name: str, y: float
) -> tuple[list[str], float]:
    """Return a legend of the shapes, and the y below it."""
    box = f'<rect y="{y - BAR / 2}" width="18" height="{BAR}" fill="{COLOURS[0]}"/>'
    entries = [(bar_name, box)] + ([(spread_name, _whisker(0, 18, y))] if spread_name else [])
    entries += [(name, _mark(9, y, shape, name)) for name, shape in zip(mark_names, _MARKS, strict=False)]
    if line_name:
        entries.append((line_name, dashed(9, y - 9, y + 9)))
    return shape_keys(entries, y), y + 30
