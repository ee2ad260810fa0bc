"""Simulated runs drawn under each other on one axis of time: the lanes of one rank each, idle time as gaps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING

from meshweave.base.units import PS_PER_S, format_s
from meshweave.lower.rings import BACK
from meshweave.report.chart import linear_ticks
from meshweave.report.svg import GREY, TIME_LETTER, colour_keys, narrow_runs, time_frame

if TYPE_CHECKING:
    from meshweave.simulate.rank_timeline import RankTimeline, Stretch
    from meshweave.tune.cases import SimulatedCase

_COLOUR = {"compute": "#3b6fb6", "move": "#8a97a6", "communicate": "#d9822b", "wait": "#f3d9b8"}
_LEGEND = (
    ("compute", "product"),
    ("move", "copy or add"),
    ("communicate", "communication"),
    ("wait", "waiting for a partner"),
    ("idle", "idle"),
)
_IDLE, _GRID = "#eef1f4", "#d5dbe1"
_LANE, _STEP, _HEADER, _RIGHT = 14, 17, 24, 88
_LANE_NAMES = {"row": "between rows", "col": "between columns", "depth": "along depth"}
_FINEST = 0.35
"""Pixels. Shorter stretches of a lane are drawn together, so that a picture of many ops stays small."""


def draw_rank_timelines(
    title: str, timelines: Sequence[RankTimeline], *, subtitle: str = "", width: int = 900, names: bool = True
) -> str:
    """Return an SVG of all timelines on one axis of time; "" where there are none.

    It brings its own light background, so that it reads the same on light and dark pages.

    Args:
        subtitle: a line below the title; "" for none.
        width: pixels.
        names: whether lanes of mesh axes are called by what they join: "between rows" for "row".
    """
    if not timelines:
        return ""
    shown = [_named(timeline) if names else timeline for timeline in timelines]
    labels = [lane for timeline in shown for lane, _ in timeline.lanes]
    left = 24 + int(TIME_LETTER * max(map(len, labels), default=0))
    longest_s = max(timeline.duration_ps for timeline in shown) / PS_PER_S or 1e-12
    scale = (width - left - _RIGHT) / longest_s
    y, drawn = 62.0 if subtitle else 44.0, []
    top = y
    for timeline in shown:
        drawn += _timeline(timeline, y, left, width, scale)
        y += _HEADER + _STEP * len(timeline.lanes) + 8
    axis, legend = _axis(longest_s, left, scale, top, y), colour_keys(_legend(shown), left, y + 42)
    return time_frame(title, subtitle, width, y, (*axis, *drawn, *legend))


def draw_cases(cases: Sequence[SimulatedCase]) -> str:
    """Return the SVG picture of one or more simulated cases.

    Of a single case all of its `ranks` are drawn, of several cases the first of the `ranks` of each. Several
    cases that compute the same product are named by what differs, such as the algorithm and the mesh.
    """
    first = cases[0]
    if len(cases) == 1:
        lines = [first.timeline(rank, f"rank {rank}") for rank in first.ranks]
        return draw_rank_timelines(first.case.title, lines, subtitle=first.case.subject)
    # A subject ends in the mesh: one product on several meshes is still one product.
    products, meshes = zip(*(item.case.subject.rpartition(", ")[::2] for item in cases), strict=True)
    alike = len(set(products)) == 1 and len({item.case.name for item in cases}) == len(cases)
    if not alike:
        lines = [item.timeline(item.ranks[0], item.case.title) for item in cases]
        return draw_rank_timelines(f"{len(cases)} simulated runs", lines, subtitle=first.chip)
    title, _, sizes = products[0].partition(": ")
    notes = [item.case.note for item in cases]
    if len(set(meshes)) == 1:
        where = f"{meshes[0]}; {first.chip}"
    else:
        shapes = [mesh.partition(" mesh of ")[0] for mesh in meshes]
        notes = [", ".join(filter(None, pair)) for pair in zip(notes, shapes, strict=True)]
        ranks = {item.ranks[0] for item in cases}
        which = f"rank {ranks.pop()} of each" if len(ranks) == 1 else "on each mesh the chip in the middle"
        where = f"{meshes[0].partition(' mesh of ')[2]}; {which}"
    lines = [
        item.timeline(item.ranks[0], item.case.name, note) for item, note in zip(cases, notes, strict=True)
    ]
    return draw_rank_timelines(title, lines, subtitle=f"{sizes}, {where}")


def _named(timeline: RankTimeline) -> RankTimeline:
    return replace(timeline, lanes=tuple((_lane_name(lane), stretches) for lane, stretches in timeline.lanes))


def _lane_name(lane: str) -> str:
    forwards = lane.removesuffix(BACK)
    name = _LANE_NAMES.get(forwards, forwards)
    return name if lane == forwards else f"{name}, back"


def _timeline(timeline: RankTimeline, y: float, left: int, width: int, scale: float) -> list[str]:
    """Return one run: a line of text, its lanes, and its duration at the right."""
    # One text element with two spans: what follows the bold title then needs no measuring.
    note = (
        f'<tspan font-weight="normal" fill="{GREY}" dx="10">{escape(timeline.note)}</tspan>'
        if timeline.note
        else ""
    )
    out = [f'<text x="{left}" y="{y + 15:.0f}" font-weight="bold">{escape(timeline.title)}{note}</text>']
    y += _HEADER
    whole = timeline.duration_ps / PS_PER_S * scale
    for number, (lane, stretches) in enumerate(timeline.lanes):
        top = y + _STEP * number
        out.append(
            f'<text x="{left - 8}" y="{top + 11:.0f}" text-anchor="end" fill="{GREY}">{escape(lane)}</text>'
            f'<rect x="{left}" y="{top:.0f}" width="{whole:.2f}" height="{_LANE}" fill="{_IDLE}"/>'
        )
        out += [_box(stretch, left, top, scale) for stretch in _joined(stretches, scale)]
    middle = y + _STEP * len(timeline.lanes) / 2 + 3
    out.append(
        f'<text x="{width - 14}" y="{middle:.0f}" text-anchor="end" font-size="14" font-weight="bold">'
        f"{_time(timeline.duration_ps / PS_PER_S)}</text>"
    )
    return out


def _box(stretch: Stretch, left: int, top: float, scale: float) -> str:
    x = left + stretch.start_ps / PS_PER_S * scale
    seconds = (stretch.end_ps - stretch.start_ps) / PS_PER_S
    wide = max(seconds * scale, _FINEST)
    edge = ' stroke="white" stroke-width="0.5"' if wide > 3 else ""
    return (
        f'<rect x="{x:.2f}" y="{top:.0f}" width="{wide:.2f}" height="{_LANE}" fill="{_COLOUR[stretch.activity]}"'
        f"{edge}><title>{escape(f'{stretch.label}: {format_s(seconds)}')}</title></rect>"
    )


def _joined(stretches: Iterable[Stretch], scale: float) -> Iterator[Stretch]:
    """Return stretches, those too small to be seen apart as one."""
    least_ps = _FINEST / scale * PS_PER_S
    return map(_merged, narrow_runs(stretches, lambda first, each: each.end_ps - first.start_ps > least_ps))


def _merged(bucket: Sequence[Stretch]) -> Stretch:
    """Return one stretch over all, with the activity that lasts longest among them."""
    first = bucket[0]
    if len(bucket) == 1:
        return first
    lasted: dict[str, int] = {}
    for stretch in bucket:
        lasted[stretch.activity] = lasted.get(stretch.activity, 0) + stretch.end_ps - stretch.start_ps
    longest = max(bucket, key=lambda stretch: lasted[stretch.activity])
    end_ps = max(stretch.end_ps for stretch in bucket)
    label = f"{first.label} and {len(bucket) - 1} more"
    return replace(longest, start_ps=first.start_ps, end_ps=end_ps, label=label)


def _axis(longest_s: float, left: int, scale: float, top: float, bottom: float) -> list[str]:
    factor, unit = _unit(longest_s)
    out = []
    for tick in linear_ticks(longest_s / factor):
        x = left + tick * factor * scale
        if tick * factor > longest_s * 1.001:
            continue
        out.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top:.0f}" y2="{bottom:.0f}" stroke="{_GRID}"/>'
            f'<text x="{x:.1f}" y="{bottom + 15:.0f}" text-anchor="middle" fill="{GREY}">{tick:g} {unit}</text>'
        )
    return out


def _unit(seconds: float) -> tuple[float, str]:
    return next(((f, u) for f, u in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")) if seconds >= f), (1e-9, "ns"))


def _time(seconds: float) -> str:
    factor, unit = _unit(seconds)
    value = seconds / factor
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"


def _legend(timelines: Iterable[RankTimeline]) -> list[tuple[str, str]]:
    """Return the names and colours of the activities that occur; grey is idle."""
    activities: set[str] = {
        s.activity for timeline in timelines for _, stretches in timeline.lanes for s in stretches
    }
    activities.add("idle")
    return [(text, _COLOUR.get(kind, _IDLE)) for kind, text in _LEGEND if kind in activities]
