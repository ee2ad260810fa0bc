"""The lanes of one rank of a simulated run, waiting for a late partner set apart from communication."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from meshweave.simulate.partners import Partners
from meshweave.simulate.result import Simulation


@dataclass(frozen=True, slots=True)
class Stretch:
    """A span of a lane (issue queue) of one rank, from `start_ps` to `end_ps` after the start of the run.

    `activity` is "compute" for products and calls, "move" for copies and additions, "communicate", or "wait" for
    a late partner. `label` is the name of the op.
    """

    activity: Literal["compute", "move", "communicate", "wait"]
    start_ps: int
    end_ps: int
    label: str


@dataclass(frozen=True)
class RankTimeline:
    """The lanes of one rank of a run, to be drawn under `title` with the text `note`.

    Attributes:
        lanes: (name, stretches in order of time) of each lane, in the order of drawing.
        duration_ps: that of the whole run, in picoseconds.
    """

    title: str
    note: str
    lanes: tuple[tuple[str, tuple[Stretch, ...]], ...]
    duration_ps: int


def rank_timeline(run: Simulation, rank: int, title: str, note: str = "") -> RankTimeline:
    """Return the lanes in which a global rank has ops.

    They are in the order "compute", lanes named like mesh axes in the order of these, others. `title` and `note`
    are texts for the drawing.

    Raises LayoutError for a rank that was not simulated.
    """
    lanes: dict[str, list[Stretch]] = {}
    first, partners = int(run.starts[run.position(rank)]), Partners(run)
    for span in run.spans(rank):
        stretches = lanes.setdefault(span.lane, [])
        start, activity = span.start_ps, span.activity
        waited = partners.wait_ps(first + span.index) if activity == "communicate" else 0
        if waited:
            stretches.append(Stretch("wait", start, start + waited, f"{span.label} waits"))
        if span.end_ps > start + waited:
            stretches.append(Stretch(activity, start + waited, span.end_ps, span.label))
    ordered = sorted(_by_axis(run, lanes), key=lambda lane: lane != "compute")
    return RankTimeline(
        title,
        note,
        tuple((lane, tuple(sorted(lanes[lane], key=lambda s: s.start_ps))) for lane in ordered),
        run.duration_ps,
    )


def _by_axis(run: Simulation, lanes: Iterable[str]) -> list[str]:
    """Return lanes of mesh axes in the order of the axes, so that runs compare line by line, then other lanes."""
    axes = [axis for mesh in run.program.meshes for axis in mesh.axes]
    used = set(lanes)
    declared = [lane.name for lane in run.program.lanes if lane.name in used]
    return sorted(declared, key=lambda lane: axes.index(lane) if lane in axes else len(axes))
