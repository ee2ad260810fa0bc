"""Simulated runs drawn under each other on one axis of time: the lanes of one rank each, idle time as gaps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape

from meshweave.base.units import PS_PER_S, format_s
from meshweave.lower.rings import BACK
from meshweave.report.chart import _linear_ticks
from meshweave.report.timeline import kind_of
from meshweave.simulate.partners import Partners
from meshweave.simulate.result import Simulation

_COLOUR = {"compute": "#3b6fb6", "move": "#8a97a6", "communicate": "#d9822b", "wait": "#f3d9b8"}
_LEGEND = (
    ("compute", "product"),
    ("move", "copy or add"),
    ("communicate", "communication"),
    ("wait", "waiting for a partner"),
    ("idle", "idle"),
)
_IDLE, _GREY, _GRID, _INK, _FRAME = "#eef1f4", "#57606a", "#d5dbe1", "#1c232b", "#d0d7de"
_LANE, _STEP, _HEADER, _LETTER, _RIGHT = 14, 17, 24, 6.7, 88
_LANE_NAMES = {"row": "between rows", "col": "between columns", "depth": "along depth"}
_FINEST = 0.35
"""Pixels. Shorter pieces of one kind are drawn together, so that a picture of many ops stays small."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a lane; `kind` is "compute", "move", "communicate" or "wait"."""

    kind: str
    start_ps: int
    end_ps: int
    label: str


@dataclass(frozen=True)
class Strip:
    """One run: its lanes in the order of drawing, each with its pieces in the order of time."""

    title: str
    note: str
    lanes: tuple[tuple[str, tuple[Piece, ...]], ...]
    duration_ps: int


def strip_of(run: Simulation, rank: int, title: str, note: str = "") -> Strip:
    """The lanes of one rank that do anything. Waiting for a late partner is set apart from communication."""
    lanes: dict[str, list[Piece]] = {}
    first, partners = int(run.starts[run.position(rank)]), Partners(run)
    for span in run.spans(rank):
        pieces = lanes.setdefault(span.lane, [])
        start, kind = span.start_ps, kind_of(span)
        waited = partners.wait_ps(first + span.index) if kind == "communicate" else 0
        if waited:
            pieces.append(Piece("wait", start, start + waited, f"{span.label} waits"))
        if span.end_ps > start + waited:
            pieces.append(Piece(kind, start + waited, span.end_ps, span.label))
    order = {lane: (lane != "compute", number) for number, lane in enumerate(_ordered(run, lanes))}
    named = sorted(lanes, key=order.__getitem__)
    return Strip(
        title,
        note,
        tuple((lane, tuple(sorted(lanes[lane], key=lambda p: p.start_ps))) for lane in named),
        run.duration_ps,
    )


def _ordered(run: Simulation, lanes: Iterable[str]) -> list[str]:
    """Lanes of mesh axes in the order of the axes, so that runs under each other compare; then the others."""
    axes = [axis for mesh in run.program.meshes for axis in mesh.axes]
    declared = [lane.name for lane in run.program.lanes if lane.name in set(lanes)]
    return sorted(declared, key=lambda lane: axes.index(lane) if lane in axes else len(axes))


def draw_strips(
    title: str, strips: Sequence[Strip], *, subtitle: str = "", width: int = 900, names: bool = True
) -> str:
    """An SVG of all strips on one axis of time; "" where there are none.

    It brings its own light background, so that it reads the same on light and dark pages. `names` calls lanes of
    mesh axes by what moves along them ("between rows").
    """
    if not strips:
        return ""
    shown = [_named(strip) if names else strip for strip in strips]
    labels = [lane for strip in shown for lane, _ in strip.lanes]
    left = 24 + int(_LETTER * max(map(len, labels), default=0))
    longest_s = max(strip.duration_ps for strip in shown) / PS_PER_S or 1e-12
    scale = (width - left - _RIGHT) / longest_s
    y, drawn = 62.0 if subtitle else 44.0, []
    top = y
    for strip in shown:
        drawn += _strip(strip, y, left, width, scale)
        y += _HEADER + _STEP * len(strip.lanes) + 8
    axis = _axis(longest_s, left, scale, top, y)
    legend = _legend(shown, left, y + 42)
    height = int(y + 60)
    head = f'<text x="16" y="26" font-size="15" font-weight="bold">{escape(title)}</text>'
    if subtitle:
        head += f'<text x="16" y="45" fill="{_GREY}">{escape(subtitle)}</text>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="Helvetica, Arial, DejaVu Sans, sans-serif" font-size="12" fill="{_INK}" '
        f'role="img" aria-label="{escape(title)}"><rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" '
        f'rx="6" fill="white" stroke="{_FRAME}"/>{head}{"".join((*axis, *drawn, *legend))}</svg>\n'
    )


def _named(strip: Strip) -> Strip:
    return replace(strip, lanes=tuple((_lane_name(lane), pieces) for lane, pieces in strip.lanes))


def _lane_name(lane: str) -> str:
    forwards = lane.removesuffix(BACK)
    name = _LANE_NAMES.get(forwards, forwards)
    return name if lane == forwards else f"{name}, back"


def _strip(strip: Strip, y: float, left: int, width: int, scale: float) -> list[str]:
    """One run: a line of text, its lanes, and its duration at the right."""
    # One text element with two spans: what follows the bold title then needs no measuring.
    note = (
        f'<tspan font-weight="normal" fill="{_GREY}" dx="10">{escape(strip.note)}</tspan>'
        if strip.note
        else ""
    )
    out = [f'<text x="{left}" y="{y + 15:.0f}" font-weight="bold">{escape(strip.title)}{note}</text>']
    y += _HEADER
    whole = strip.duration_ps / PS_PER_S * scale
    for number, (lane, pieces) in enumerate(strip.lanes):
        at = y + _STEP * number
        out.append(
            f'<text x="{left - 8}" y="{at + 11:.0f}" text-anchor="end" fill="{_GREY}">{escape(lane)}</text>'
            f'<rect x="{left}" y="{at:.0f}" width="{whole:.2f}" height="{_LANE}" fill="{_IDLE}"/>'
        )
        for piece in _joined(pieces, scale):
            x = left + piece.start_ps / PS_PER_S * scale
            wide = max((piece.end_ps - piece.start_ps) / PS_PER_S * scale, _FINEST)
            edge = ' stroke="white" stroke-width="0.5"' if wide > 3 else ""
            took = format_s((piece.end_ps - piece.start_ps) / PS_PER_S)
            out.append(
                f'<rect x="{x:.2f}" y="{at:.0f}" width="{wide:.2f}" height="{_LANE}" fill="{_COLOUR[piece.kind]}"'
                f"{edge}><title>{escape(f'{piece.label}: {took}')}</title></rect>"
            )
    middle = y + _STEP * len(strip.lanes) / 2 + 3
    out.append(
        f'<text x="{width - 14}" y="{middle:.0f}" text-anchor="end" font-size="14" font-weight="bold">'
        f"{_time(strip.duration_ps / PS_PER_S)}</text>"
    )
    return out


def _joined(pieces: Iterable[Piece], scale: float) -> Iterator[Piece]:
    """Pieces too small to be seen apart as one, of the kind that lasts longest among them."""
    least_ps = _FINEST / scale * PS_PER_S
    bucket: list[Piece] = []
    for piece in pieces:
        if bucket and piece.end_ps - bucket[0].start_ps > least_ps:
            yield _one(bucket)
            bucket = []
        bucket.append(piece)
    if bucket:
        yield _one(bucket)


def _one(bucket: Sequence[Piece]) -> Piece:
    if len(bucket) == 1:
        return bucket[0]
    lasted: dict[str, int] = {}
    for piece in bucket:
        lasted[piece.kind] = lasted.get(piece.kind, 0) + piece.end_ps - piece.start_ps
    kind = max(lasted, key=lambda name: lasted[name])
    end_ps = max(piece.end_ps for piece in bucket)
    return Piece(kind, bucket[0].start_ps, end_ps, f"{bucket[0].label} and {len(bucket) - 1} more")


def _axis(longest_s: float, left: int, scale: float, top: float, bottom: float) -> list[str]:
    factor, unit = _unit(longest_s)
    out = []
    for tick in _linear_ticks(longest_s / factor):
        x = left + tick * factor * scale
        if tick * factor > longest_s * 1.001:
            continue
        out.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top:.0f}" y2="{bottom:.0f}" stroke="{_GRID}"/>'
            f'<text x="{x:.1f}" y="{bottom + 15:.0f}" text-anchor="middle" fill="{_GREY}">{tick:g} {unit}</text>'
        )
    return out


def _unit(seconds: float) -> tuple[float, str]:
    return next(((f, u) for f, u in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")) if seconds >= f), (1e-9, "ns"))


def _time(seconds: float) -> str:
    factor, unit = _unit(seconds)
    value = seconds / factor
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"


def _legend(strips: Iterable[Strip], left: int, y: float) -> list[str]:
    """Of the kinds that occur."""
    kinds = {piece.kind for strip in strips for _, pieces in strip.lanes for piece in pieces}
    out, x = [], float(left)
    for kind, text in _LEGEND:
        if kind not in kinds and kind != "idle":
            continue
        out.append(
            f'<rect x="{x:.0f}" y="{y - 10:.0f}" width="12" height="12" fill="{_COLOUR.get(kind, _IDLE)}"/>'
            f'<text x="{x + 18:.0f}" y="{y:.0f}">{text}</text>'
        )
        x += 18 + _LETTER * len(text) + 22
    return out
