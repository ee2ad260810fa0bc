"""A simulated run in words, tables and one HTML page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from meshweave.base.units import format_bytes, format_s, to_s
from meshweave.report.page import page, table
from meshweave.report.simulation_picture import draw_strips, strip_of
from meshweave.simulate.critical import CATEGORIES, CriticalPath, Step, link_name
from meshweave.simulate.result import PARTS, LinkUse, Simulation

_COLOURS = {
    "compute": "#3b6fb6",
    "copy": "#8a97a6",
    "launch": "#8e5ea2",
    "sync": "#4f9d8c",
    "transfer": "#d9822b",
    "wait": "#f3d9b8",
}
MAX_STEPS = 300
"""Of the critical path that are listed on a page."""


@dataclass(frozen=True)
class Found:
    """One run with what is told of it. `closed_form_s` is None where it was not asked for."""

    title: str
    name: str
    note: str
    what: str
    run: Simulation
    path: CriticalPath
    ranks: tuple[int, ...]
    closed_form_s: float | None = None


@dataclass(frozen=True)
class LinkClass:
    """All links of one kind and direction together."""

    name: str
    count: int
    mean: float
    most: float
    carried_bytes: int


def link_classes(run: Simulation) -> list[LinkClass]:
    """By axis (level, NIC or port) and direction, the busiest first."""
    groups: dict[str, list[LinkUse]] = defaultdict(list)
    for use in run.links:
        what, _, axis, direction = use.link
        words = {1: "forwards", -1: "backwards"}
        name = f"axis {axis}, {words[direction]}" if what == "link" else f"{what} level {axis}"
        groups[name if what in ("link", "up", "down") else what].append(use)
    found = [
        LinkClass(
            name,
            len(uses),
            sum(use.utilisation for use in uses) / len(uses),
            max(use.utilisation for use in uses),
            sum(use.carried_bytes for use in uses),
        )
        for name, uses in groups.items()
    ]
    return sorted(found, key=lambda one: (-one.most, one.name))


def busiest_links(run: Simulation, count: int) -> list[LinkUse]:
    """By share of what a link could have carried; equal ones in the order of chips."""
    return sorted(run.links, key=lambda use: (-use.utilisation, use.link))[:count]


def mean_parts(run: Simulation) -> dict[str, float]:
    """Seconds of each part, averaged over all ranks."""
    rows = run.found["parts_ps"].reshape(-1, len(PARTS))
    mean = rows.mean(axis=0) if len(rows) else np.zeros(len(PARTS))
    return {name: float(value) / 1e12 for name, value in zip(PARTS, mean, strict=True)}


def to_json(found: Found, links: int) -> dict[str, Any]:
    """All that is told of a run; a time of the critical path is in seconds."""
    run, path = found.run, found.path
    return {
        "title": found.title,
        "what": found.what,
        "program": run.program.name,
        "cluster": run.machine.cluster.name,
        "num_chips": run.machine.cluster.num_chips,
        "logical": run.machine.logical,
        "num_ranks": len(run.ranks),
        "num_ops": run.num_ops,
        "num_events": run.num_events,
        "duration_s": run.duration_s,
        **({} if found.closed_form_s is None else {"estimate_s": found.closed_form_s}),
        "mean": mean_parts(run),
        "ranks": {str(rank): run.parts(rank) | {"exposed_s": run.exposed_s(rank)} for rank in found.ranks},
        "links": [
            {
                "link": list(use.link),
                "name": link_name(use),
                "bytes": use.carried_bytes,
                "bytes_per_s": use.rate_bytes_per_s,
                "utilisation": use.utilisation,
            }
            for use in busiest_links(run, links)
        ],
        "critical_path": {
            "verdict": path.verdict,
            "parts_s": {name: to_s(ps) for name, ps in path.parts_ps.items()},
            "transfer_s": {axis: to_s(ps) for axis, ps in path.axes_ps.items()},
            "slowed_s": to_s(path.slowed_ps),
            "bounds_s": {bound.name: to_s(bound.ps) for bound in path.bounds},
            "over_bound": path.over_bound,
            "steps": [
                {
                    "rank": step.rank,
                    "label": step.label,
                    "kind": step.kind,
                    "start_s": to_s(step.start_ps),
                    "end_s": to_s(step.end_ps),
                }
                for step in path.steps
            ],
        },
    }


# --- the page -------------------------------------------------------------------------------------------


def simulation_page(title: str, runs: Sequence[Found], chip: str, links: int = 24) -> str:
    """One page of all runs; `chip` says whose timelines are shown where several runs are compared."""
    body = [f"<h1>{escape(title)}</h1>"]
    body.append(
        '<p class="quiet">Simulated by meshweave: every op of every rank, messages sharing links and memory.</p>'
    )
    if len(runs) > 1:
        strips = [strip_of(found.run, found.ranks[0], found.title, "") for found in runs]
        body.append(f'<div class="wide">{draw_strips("All runs", strips, subtitle=chip)}</div>')
    body += [_section(found, links) for found in runs]
    return page(title, "\n".join(body))


def _section(found: Found, links: int) -> str:
    run, path = found.run, found.path
    lead = f"<b>{format_s(run.duration_s)}</b>, {escape(path.verdict)}."
    if found.closed_form_s:
        off = 100 * (run.duration_s / found.closed_form_s - 1)
        lead += f" The closed form, without contention: {format_s(found.closed_form_s)} ({off:+.1f} %)."
    strips = [strip_of(run, rank, f"rank {rank}") for rank in found.ranks]
    return "\n".join(
        [
            f"<h2>{escape(found.title)}</h2>",
            f'<p class="quiet">{escape(found.what)}; {len(run.ranks)} ranks, {run.num_ops} ops.</p>',
            f'<p class="lead">{lead}</p>',
            f'<div class="wide">{draw_strips(found.title, strips)}</div>',
            _parts(found),
            _links(run, links),
            _critical(path),
        ]
    )


def _parts(found: Found) -> str:
    run = found.run
    head = ["rank", *(name.removesuffix("_s") for name in PARTS), "exposed"]
    rows = [
        (
            "",
            [
                str(rank),
                *(format_s(value) for value in run.parts(rank).values()),
                format_s(run.exposed_s(rank)),
            ],
        )
        for rank in found.ranks
    ]
    rows.append(("best", ["mean of all", *(format_s(value) for value in mean_parts(run).values()), ""]))
    return (
        "<h3>Parts of a rank's time</h3>"
        + table(head, rows, ("rank",))
        + '<p class="quiet">Summed over its ops, overlapped or not, so they may exceed the duration. Wait: for '
        "partners that came later. Exposed: no product runs.</p>"
    )


def _links(run: Simulation, count: int) -> str:
    if not run.links:
        return ""
    classes = [
        ("", [escape(c.name), str(c.count), _share(c.mean), _share(c.most), format_bytes(c.carried_bytes)])
        for c in link_classes(run)
    ]
    busiest = [
        (
            "",
            [
                escape(link_name(use)),
                _share(use.utilisation),
                format_bytes(use.carried_bytes),
                f"{format_bytes(use.rate_bytes_per_s)}/s",
            ],
        )
        for use in busiest_links(run, count)
    ]
    return (
        "<h3>Links</h3>"
        + table(["links", "number", "mean use", "most used", "bytes"], classes, ("links",))
        + f"<details><summary>The {len(busiest)} busiest</summary>"
        + table(["link", "use", "bytes", "rate"], busiest, ("link",))
        + "</details>"
    )


def _critical(path: CriticalPath) -> str:
    whole = max(path.duration_ps, 1)
    width, x, boxes = 700, 0.0, []
    rows = []
    for name in CATEGORIES:
        ps = path.parts_ps[name]
        if not ps:
            continue
        wide = width * ps / whole
        boxes.append(f'<rect x="{x:.1f}" width="{wide:.1f}" height="16" fill="{_COLOURS[name]}"/>')
        x += wide
        key = f'<span class="key" style="background:{_COLOURS[name]}"></span>{name}'
        by_axis = "; ".join(f"{axis} {format_s(to_s(t))}" for axis, t in path.axes_ps.items())
        rows.append(
            ("", [key, format_s(to_s(ps)), _share(ps / whole), by_axis if name == "transfer" else ""])
        )
    bounds = [
        (
            "",
            [
                bound.name,
                format_s(to_s(bound.ps)),
                f"{path.duration_ps / bound.ps:.2f} x",
                escape(bound.what),
            ],
        )
        for bound in path.bounds
        if bound.ps
    ]
    shown = path.steps[:MAX_STEPS]
    more = f"<p>And {len(path.steps) - len(shown)} more.</p>" if len(path.steps) > len(shown) else ""
    return (
        f'<h3>Critical path</h3><svg class="bar" width="{width}" height="16">{"".join(boxes)}</svg>'
        + table(["part", "time", "share", " "], rows, ("part", " "))
        + f'<p class="quiet">Its steps took {format_s(to_s(path.slowed_ps))} longer than alone on an idle '
        "machine. Below, times that no order of the same products and messages can go below.</p>"
        + table(["bound", "time", "duration over it", "of"], bounds, ("bound", "of"))
        + f"<details><summary>The path's {len(path.steps)} steps</summary>"
        + table(["rank", "op", "from", "took"], [("", _row(step)) for step in shown], ("op",))
        + f"{more}</details>"
    )


def _row(step: Step) -> list[str]:
    took = format_s(to_s(step.end_ps - step.start_ps))
    return [str(step.rank), escape(step.label), format_s(to_s(step.start_ps)), took]


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"
