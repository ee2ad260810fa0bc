"""What the script of a step's page draws, as JSON: timelines, curves, and time against memory."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from meshweave.algorithms.step.timeline import StepTimeline
    from meshweave.tune.plan_records import DegreesRecord, StepsRecord
    from meshweave.tune.step_search.curves import StepCurve

_DRAWN_OVER_FRONT = 1.5
"""Configurations slower than that many times the slowest of the Pareto front are left out of its picture."""
_KINDS = {
    "forward": ("forward", "#3b6fb6"),
    "backward": ("backward", "#b0562a"),
    "input gradient": ("input gradient", "#c9771f"),
    "weight gradient": ("weight gradient", "#4f8f57"),
    "optimizer": ("optimizer", "#7a5cc0"),
    "issuing": ("issued by the host", "#a0522d"),
    "software": ("software", "#6b7b8c"),
    "products": ("product or attention", "#3b6fb6"),
    "element-wise": ("element-wise", "#7fa3d1"),
    "hidden": ("communication, hidden", "#94a1af"),
    "exposed": ("communication, exposed", "#d0433c"),
}
"""The name in the legend and the colour of each kind of `StepSpan`."""


def step_data(
    steps: StepsRecord,
    choice_text: Callable[[DegreesRecord], str],
    timelines: Sequence[tuple[str, StepTimeline]],
    curves: Sequence[StepCurve],
) -> str:
    """Return the JSON that `step_page.js` draws from, without "<", so that it may stand in a script element.

    Args:
        steps: the ranking; its first two rows name the lines of the curves.
        choice_text: returns a configuration in words.
        timelines: (title, timeline) pairs, in the order in which they are offered.
        curves: one for each quantity that varies; each has a line for the best configuration, then one for the
            runner-up.
    """
    names: dict[str, int] = {}
    data = {
        "timelines": [_timeline(title, timeline, names) for title, timeline in timelines],
        "names": list(names),
        "kinds": list(_KINDS.values()),
        "choices": [choice_text(record.degrees) for record in steps.ranked[:2]],
        "curves": [_curve(curve) for curve in curves],
        "front": _front(steps, choice_text),
        "limit": steps.memory_limit_bytes,
    }
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _timeline(title: str, timeline: StepTimeline, names: dict[str, int]) -> dict[str, Any]:
    """Return a timeline whose spans are lists: begin, end, kind, name, micro-batch and stage, -1 for none."""
    kinds = {kind: number for number, kind in enumerate(_KINDS)}
    lanes = []
    for lane in timeline.lanes:
        spans = [
            [
                round(span.begin_s, 10),
                round(span.end_s, 10),
                kinds[span.kind],
                names.setdefault(span.name, len(names)) if span.name else -1,
                -1 if span.micro_batch is None else span.micro_batch,
                -1 if span.stage is None else span.stage,
            ]
            for span in lane.spans
        ]
        lanes.append({"group": lane.group, "name": lane.name, "spans": spans})
    return {"title": title, "end": timeline.duration_s, "remark": timeline.remark, "lanes": lanes}


def _curve(curve: StepCurve) -> dict[str, Any]:
    lines = [
        [[p.x, p.step_s, p.tokens_per_s_per_chip, p.mfu, p.memory_bytes, int(p.fits)] for p in line]
        for line in curve.lines
    ]
    return {"name": curve.name, "xText": curve.x_text, "here": curve.here, "lines": lines}


def _front(steps: StepsRecord, choice_text: Callable[[DegreesRecord], str]) -> list[list[object]]:
    """Return bytes, seconds, configuration, and whether it is on the Pareto front, of what is not far from it."""
    front = {record.degrees for record in steps.front}
    slowest_s = _DRAWN_OVER_FRONT * max((record.step_s for record in steps.front), default=0.0)
    others = [each for each in steps.ranked if each.degrees not in front and each.step_s <= slowest_s]
    return [
        [record.memory_bytes, record.step_s, choice_text(record.degrees), int(record.degrees in front)]
        for record in (*others, *steps.front)
    ]
