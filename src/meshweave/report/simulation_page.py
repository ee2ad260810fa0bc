"""Simulated runs on one HTML page: timelines, parts of time, links, the critical path."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from meshweave.base.units import format_bytes, format_s, to_s
from meshweave.report.page import bar, key, page, table
from meshweave.report.simulation_picture import draw_rank_timelines

if TYPE_CHECKING:
    from meshweave.simulate.critical import CriticalPath, PathSegment
    from meshweave.tune.cases import SimulatedCase

_COLOURS = {
    "compute": "#3b6fb6",
    "copy": "#8a97a6",
    "launch": "#8e5ea2",
    "sync": "#4f9d8c",
    "transfer": "#d9822b",
    "host": "#b5484d",
    "wait": "#f3d9b8",
}
MAX_SEGMENTS = 300
"""The most segments of a critical path that a page lists."""


def simulation_page(cases: Sequence[SimulatedCase], num_links: int = 24) -> str:
    """Return one HTML page of one or more simulated cases, with the `num_links` busiest links of each."""
    first = cases[0]
    title = first.case.title if len(cases) == 1 else f"{len(cases)} runs, {first.run.machine.cluster.name}"
    body = [f"<h1>{escape(title)}</h1>"]
    body.append(
        '<p class="quiet">Simulated by meshweave: every op of every rank, messages sharing links and memory.</p>'
    )
    if len(cases) > 1:
        lines = [simulated.timeline(simulated.ranks[0], simulated.case.title) for simulated in cases]
        body.append(f'<div class="wide">{draw_rank_timelines("All runs", lines, subtitle=first.chip)}</div>')
    body += [_section(simulated, num_links) for simulated in cases]
    return page(title, "\n".join(body))


def _section(simulated: SimulatedCase, num_links: int) -> str:
    case, run, path = simulated.case, simulated.run, simulated.path
    lead = f"<b>{format_s(run.duration_s)}</b>, {escape(path.verdict)}."
    over = simulated.over_closed_form
    if simulated.closed_form_s and over is not None:
        lead += f" The closed form, without contention: {format_s(simulated.closed_form_s)} ({100 * over:+.1f} %)."
    lines = [simulated.timeline(rank, f"rank {rank}") for rank in simulated.ranks]
    return "\n".join(
        [
            f"<h2>{escape(case.title)}</h2>",
            f'<p class="quiet">{escape(case.subject)}; {len(run.ranks)} ranks, {run.num_ops} ops.</p>',
            f'<p class="lead">{lead}</p>',
            f'<div class="wide">{draw_rank_timelines(case.title, lines)}</div>',
            _parts(simulated),
            _links(simulated, num_links),
            _critical(path),
        ]
    )


def _parts(simulated: SimulatedCase) -> str:
    run, mean = simulated.run, simulated.mean_parts()
    head = ["rank", *(name.removesuffix("_s") for name in mean), "exposed"]
    rows = [
        [str(rank), *map(format_s, run.parts(rank).values()), format_s(run.exposed_s(rank))]
        for rank in simulated.ranks
    ]
    rows.append(["mean of all", *map(format_s, mean.values()), ""])
    return (
        "<h3>Parts of a rank's time</h3>"
        + table(head, rows, ("rank",), {len(rows) - 1: "best"})
        + '<p class="quiet">Summed over its ops, overlapped or not, so they may exceed the duration. Wait: for '
        "partners that came later. Exposed: no product runs.</p>"
    )


def _links(simulated: SimulatedCase, count: int) -> str:
    if not simulated.run.links:
        return ""
    classes = [
        [
            escape(links.name),
            str(links.count),
            _share(links.mean_utilisation),
            _share(links.max_utilisation),
            format_bytes(links.carried_bytes),
        ]
        for links in simulated.link_classes()
    ]
    busiest = [
        [
            escape(use.name),
            _share(use.utilisation),
            format_bytes(use.carried_bytes),
            f"{format_bytes(use.rate_bytes_per_s)}/s",
        ]
        for use in simulated.busiest_links(count)
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
    parts = {name: ps for name, ps in path.ps_by_category.items() if ps}
    by_axis = "; ".join(f"{axis} {format_s(to_s(t))}" for axis, t in path.transfer_ps_by_axis.items())
    rows = [
        [
            key(_COLOURS[name], name),
            format_s(to_s(ps)),
            _share(ps / whole),
            by_axis if name == "transfer" else "",
        ]
        for name, ps in parts.items()
    ]
    bounds = [
        [
            bound.name,
            format_s(to_s(bound.time_ps)),
            f"{path.duration_ps / bound.time_ps:.2f} x",
            escape(bound.detail),
        ]
        for bound in path.bounds
        if bound.time_ps
    ]
    shown = path.segments[:MAX_SEGMENTS]
    more = f"<p>And {len(path.segments) - len(shown)} more.</p>" if len(path.segments) > len(shown) else ""
    return (
        f"<h3>Critical path</h3>{bar([(ps, _COLOURS[name]) for name, ps in parts.items()], whole, 700, 16)}"
        + table(["part", "time", "share", " "], rows, ("part", " "))
        + f'<p class="quiet">Its steps took {format_s(to_s(path.slowed_ps))} longer than alone on an idle '
        "machine. Below, times that no order of the same products and messages can go below.</p>"
        + table(["bound", "time", "duration over it", "of"], bounds, ("bound", "of"))
        + f"<details><summary>The path's {len(path.segments)} steps</summary>"
        + table(["rank", "op", "from", "took"], map(_row, shown), ("op",))
        + f"{more}</details>"
    )


def _row(segment: PathSegment) -> list[str]:
    took = format_s(to_s(segment.end_ps - segment.start_ps))
    return [str(segment.rank), escape(segment.label), format_s(to_s(segment.start_ps)), took]


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"
