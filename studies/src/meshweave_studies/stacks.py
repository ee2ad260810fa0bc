"""Stacked horizontal bars as SVG: each bar shows its parts and their sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from meshweave.report.bars import BAR, GREY, ROW, Scale, dashed, ticks_above
from meshweave.report.chart import COLOURS, axis_scale, linear_ticks
from meshweave.report.svg import LETTER, chart_frame, chart_heading, shape_keys

_TOP, _RIGHT = 36, 60


@dataclass(frozen=True)
class Stack:
    """A bar of `parts`, one for each of the chart's part names."""

    name: str
    parts: tuple[float, ...]


def stacked_chart(
    title: str,
    stacks: Sequence[Stack],
    part_names: Sequence[str],
    x_label: str,
    *,
    scale_end: float | None = None,
    line_at: float | None = None,
    line_name: str = "",
    width: int = 960,
) -> str:
    """Return an SVG of stacked bars from 0; "" where there are none.

    Args:
        scale_end: the value at which the scale ends; longer bars are cut there, and their number says so.
        line_at, line_name: x of a line through all bars, such as what could be hidden.
    """
    if not stacks:
        return ""
    longest = max(sum(stack.parts) for stack in stacks)
    end = min(longest, scale_end or longest)
    left = 20 + int(LETTER * max(len(stack.name) for stack in stacks))
    ticks = linear_ticks(end)
    x_at = axis_scale(ticks, False, left, width - _RIGHT)
    bottom = _TOP + ROW * len(stacks) + 4
    drawn = [chart_heading(title), *ticks_above(ticks, x_at, _TOP - 6, bottom)]
    for number, stack in enumerate(stacks):
        drawn += _bar(stack, part_names, _TOP + ROW * number, left, x_at, ticks[-1])
    if line_at is not None:
        drawn.append(dashed(x_at(line_at), _TOP - 6, bottom))
    middle = (left + width - _RIGHT) / 2
    drawn.append(f'<text x="{middle:.1f}" y="{bottom + 36}" text-anchor="middle">{escape(x_label)}</text>')
    drawn += _legend(part_names, line_name, bottom + 60)
    return chart_frame(title, width, bottom + 76, drawn) + "\n"


def _bar(stack: Stack, names: Sequence[str], y: float, left: int, x_at: Scale, end: float) -> list[str]:
    parts = [f'<text x="{left - 8}" y="{y + BAR / 2 + 4:.1f}" text-anchor="end">{escape(stack.name)}</text>']
    done = 0.0
    for number, (name, amount) in enumerate(zip(names, stack.parts, strict=True)):
        start, stop = min(done, end), min(done + amount, end)
        title = escape(f"{stack.name}, {name}: {amount:.3g}")
        parts.append(
            f'<rect x="{x_at(start):.1f}" y="{y:.1f}" width="{x_at(stop) - x_at(start):.1f}" height="{BAR}" '
            f'fill="{COLOURS[number]}"><title>{title}</title></rect>'
        )
        done += amount
    label = f"{done:.3g}" + (" (cut)" if done > end else "")
    parts.append(
        f'<text x="{x_at(min(done, end)) + 6:.1f}" y="{y + BAR / 2 + 4:.1f}" fill="{GREY}">{label}</text>'
    )
    return parts


def _legend(part_names: Sequence[str], line_name: str, y: float) -> list[str]:
    shapes = [
        (name, f'<rect y="{y - BAR / 2}" width="18" height="{BAR}" fill="{COLOURS[number]}"/>')
        for number, name in enumerate(part_names)
    ]
    if line_name:
        shapes.append((line_name, dashed(9, y - 9, y + 9)))
    return shape_keys(shapes, y)
