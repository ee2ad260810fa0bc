"""Timelines of pipelines: a row a rank, a box an action, transfers as thin lines below, on one axis of time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from meshweave.algorithms.pipeline.action_times import TimedSchedule
from meshweave.algorithms.pipeline.actions import COMPUTE_WORDS, Action, ActionKind
from meshweave.base.units import PS_PER_S, format_s, to_s
from meshweave.report.simulation_picture import _axis, _time
from meshweave.report.svg import GREY, TIME_LETTER, colour_keys, narrow_runs, time_frame

_COLOUR = {
    "forward": "#3b6fb6",
    "input gradient": "#d9822b",
    "weight gradient": "#5a9a5f",
    "backward": "#b0562a",
    "exposed transfer": "#e8b4b8",
    "transfer": "#7d5ba6",
}
_IDLE = "#eef1f4"
_LANE, _LINE, _STEP, _HEADER, _RIGHT = 18, 4, 26, 26, 88
_FINEST = 0.5
"""Pixels. Neighbouring boxes of one kind that are smaller are drawn together."""
_MOST_RANKS = 32
"""Ranks of one schedule that are drawn; of more, these many are chosen evenly."""


@dataclass(frozen=True)
class ActionBox:
    """An interval of time of one rank that is drawn as one box.

    Attributes:
        kind: what the rank does, as the legend names it: "forward", "exposed transfer".
        begin, end: in ticks of the schedule, from the start of the step.
        text: stands in the box where it fits, mostly the micro-batch.
        title: the tooltip.
        shade: from 0 to 1: how pale the box is, to tell the stages of a rank apart.
        half: 0 for the whole height, 1 and 2 for the upper and the lower half (the two actions of an overlap).
    """

    kind: str
    begin: int
    end: int
    text: str
    title: str
    shade: float = 0.0
    half: int = 0


def draw_pipelines(
    title: str, schedules: Sequence[tuple[str, TimedSchedule]], *, subtitle: str = "", width: int = 1100
) -> str:
    """Return an SVG of schedules under each other on one axis of time, a row for each rank.

    Of more than 32 ranks 32 are drawn, evenly spread from the first to the last.

    Args:
        title: the headline.
        schedules: (name, schedule) of each; their ticks are picoseconds.
        subtitle: a line below the headline; "" for none.
        width: pixels.
    """
    left, top = 70, 62 if subtitle else 44
    longest = max((timed.duration for _, timed in schedules), default=0) or 1
    scale = (width - left - _RIGHT) / longest
    y, drawn = float(top), list[str]()
    for name, timed in schedules:
        shown = _shown_ranks(timed)
        drawn += _panel(name, timed, shown, (left, y, scale, width))
        y += _HEADER + _STEP * len(shown) + 12
    present = {
        box.kind for _, timed in schedules for rank in _shown_ranks(timed) for box in _boxes(timed, rank)
    }
    present |= {"transfer"} if any(timed.schedule.has_communication for _, timed in schedules) else set()
    shown_kinds = [pair for pair in (*_COLOUR.items(), ("bubble", _IDLE)) if pair[0] in (*present, "bubble")]
    axis = _axis(to_s(longest), left, scale * PS_PER_S, top, y)
    return time_frame(title, subtitle, width, y, (*axis, *drawn, *colour_keys(shown_kinds, left, y + 42)))


def _shown_ranks(timed: TimedSchedule) -> list[int]:
    count = timed.schedule.num_ranks
    if count <= _MOST_RANKS:
        return list(range(count))
    return [index * (count - 1) // (_MOST_RANKS - 1) for index in range(_MOST_RANKS)]


def _panel(
    name: str, timed: TimedSchedule, shown: Sequence[int], frame: tuple[int, float, float, int]
) -> list[str]:
    """Return one schedule: its name, a row for each shown rank, and its duration at the right."""
    left, y, scale, width = frame
    note = "" if len(shown) == timed.schedule.num_ranks else f", {len(shown)} of its ranks"
    out = [f'<text x="{left}" y="{y + 16:.0f}" font-weight="bold">{escape(name + note)}</text>']
    y += _HEADER
    whole = timed.duration * scale
    for row, rank in enumerate(shown):
        top = y + _STEP * row
        out.append(
            f'<text x="{left - 8}" y="{top + 13:.0f}" text-anchor="end" fill="{GREY}">rank {rank}</text>'
            f'<rect x="{left}" y="{top:.0f}" width="{whole:.2f}" height="{_LANE}" fill="{_IDLE}"/>'
        )
        out += [_draw(box, left, top, scale) for box in _merged(_boxes(timed, rank), scale)]
        out += [_draw(box, left, top + _LANE + 1, scale) for box in _merged(_sends(timed, rank), scale)]
    out.append(
        f'<text x="{width - 14}" y="{y + _STEP * len(shown) / 2:.0f}" text-anchor="end" font-size="14" '
        f'font-weight="bold">{_time(to_s(timed.duration))}</text>'
    )
    return out


def _boxes(timed: TimedSchedule, rank: int) -> Iterator[ActionBox]:
    """Yield what a rank computes, and the transfers that it waits for, in order of their begins."""
    exposed = iter([transfer for transfer in timed.exposed if transfer.rank == rank])
    waits = next(exposed, None)
    stages = {stage: place for place, stage in enumerate(timed.schedule.stages_of(rank))}
    rows = zip(timed.schedule.actions[rank], timed.begins[rank], timed.ends[rank], strict=True)
    for action, begin, end in rows:
        if not action.kind.computes:
            continue
        while waits is not None and waits.begin < begin:
            until = waits.begin + waits.ticks
            took = format_s(to_s(waits.ticks))
            title = f"{waits.consumer} waits for {waits.transfer}: {took}"
            yield ActionBox("exposed transfer", waits.begin, until, "", title)
            waits = next(exposed, None)
        for half, leaf in enumerate(action.leaves, 1 if action.parts else 0):
            title = f"{leaf}: {format_s(to_s(end - begin))} from {format_s(to_s(begin))}"
            shade = stages[leaf.stage] / max(1, len(stages))
            yield ActionBox(COMPUTE_WORDS[leaf.kind], begin, end, str(leaf.micro_batch), title, shade, half)


def _sends(timed: TimedSchedule, rank: int) -> Iterator[ActionBox]:
    """Yield what a rank sends."""
    rows = zip(timed.schedule.actions[rank], timed.begins[rank], timed.ends[rank], strict=True)
    sends = [(begin, end, action) for action, begin, end in rows if _is_send(action) and end > begin]
    for begin, end, action in sorted(sends, key=lambda row: row[:2]):
        yield ActionBox("transfer", begin, end, "", f"{action}: {format_s(to_s(end - begin))}")


def _is_send(action: Action) -> bool:
    return action.kind in (ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD)


def _merged(boxes: Iterator[ActionBox], scale: float) -> Iterator[ActionBox]:
    """Return boxes, those too small to be seen apart as one of the kind that lasts longest."""
    return map(_joined, narrow_runs(boxes, lambda first, box: (box.end - first.begin) * scale > _FINEST))


def _joined(bucket: Sequence[ActionBox]) -> ActionBox:
    if len(bucket) == 1:
        return bucket[0]
    longest = max(bucket, key=lambda box: box.end - box.begin)
    title = f"{bucket[0].title} and {len(bucket) - 1} more"
    return ActionBox(longest.kind, bucket[0].begin, max(box.end for box in bucket), "", title)


def _draw(box: ActionBox, left: int, top: float, scale: float) -> str:
    x, wide = left + box.begin * scale, max((box.end - box.begin) * scale, _FINEST)
    height = _LINE if box.kind == "transfer" else _LANE if not box.half else _LANE / 2
    y = top + (height if box.half == 2 else 0)
    edge = ' stroke="white" stroke-width="0.6"' if wide > 3 else ""
    text = ""
    size = 8.5 if box.half or wide <= TIME_LETTER * len(box.text) + 2 else 11
    if box.text and wide > TIME_LETTER * len(box.text) * size / 11 + 1.5:
        text = (
            f'<text x="{x + wide / 2:.2f}" y="{y + height / 2 + size / 2 - 1.5:.1f}" text-anchor="middle" '
            f'font-size="{size}" fill="white" pointer-events="none">{box.text}</text>'
        )
    return (
        f'<rect x="{x:.2f}" y="{y:.1f}" width="{wide:.2f}" height="{height:g}" fill="{_COLOUR[box.kind]}" '
        f'fill-opacity="{1 - 0.5 * box.shade:.2f}"{edge}><title>{escape(box.title)}</title></rect>{text}'
    )
