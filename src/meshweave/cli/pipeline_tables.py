"""What `meshweave pipeline` prints of schedules: tables, JSON and a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import typer

from meshweave.algorithms.pipeline.action_graph import TransferRuntime
from meshweave.algorithms.pipeline.action_times import ExposedTransfer, TimedSchedule, peak_stashes
from meshweave.base.units import format_s, to_s
from meshweave.cli.pipeline_options import placement_of
from meshweave.report.page import page, table
from meshweave.report.pipeline_picture import draw_pipelines
from meshweave.report.tables import print_table

_NAMED = 5
"""Exposed transfers that the table names; JSON has `_LISTED`."""
_LISTED = 200
_HEAD = ("rank", "stages", "compute", "bubble", "of step", "exposed", "of step", "peak stashes")


@dataclass(frozen=True)
class ShownSchedule:
    """A schedule that was proved and timed.

    Attributes:
        name: the schedule's name or its file, as given on the command line.
        timed: when its actions run; its ticks are picoseconds.
        listed_here: whether meshweave added the sends and receives, because the schedule lists none.
    """

    name: str
    timed: TimedSchedule
    listed_here: bool


def headline(shown: ShownSchedule, runtime: TransferRuntime) -> str:
    """Return one line on a schedule: its stages, ranks, micro-batches and transfers, its time and idle share.

    `runtime` has the rules for transfers under which it was proved to end. The idle share is that of the ranks'
    time in which they do not compute.
    """
    schedule, timed = shown.timed.schedule, shown.timed
    transfers = "its transfers put in order here" if shown.listed_here else "its own transfers"
    if schedule.num_ranks == 1 or not schedule.has_communication:
        transfers = "no transfers"
    idle = sum(timed.duration - timed.busy(rank) for rank in range(schedule.num_ranks))
    share = idle / max(1, timed.duration * schedule.num_ranks)
    return (
        f"{shown.name}: {placement_of(schedule)}, {schedule.num_micro_batches} micro-batches, {transfers}; proved "
        f"to end ({runtime.value}); a step takes {format_s(to_s(timed.duration))}, {100 * share:.1f} % of it idle"
    )


def print_schedules(shown: Sequence[ShownSchedule], runtime: TransferRuntime) -> None:
    """Print a headline, a table of ranks, and the longest exposed transfers of each schedule.

    `runtime` has the rules for transfers under which the schedules were proved to end.
    """
    for item in shown:
        typer.echo(headline(item, runtime))
        print_table(_HEAD, _rows(item.timed), 2)
        typer.echo(f"{_exposed_line(item.timed)}\n")


def _rows(timed: TimedSchedule) -> list[list[str]]:
    peaks = peak_stashes(timed.schedule)
    whole = max(timed.duration, 1)
    rows = []
    for rank in range(timed.schedule.num_ranks):
        bubble, exposed = timed.bubble(rank), timed.exposed_on(rank)
        rows.append(
            [
                str(rank),
                " ".join(map(str, timed.schedule.stages_of(rank))),
                format_s(to_s(timed.busy(rank))),
                format_s(to_s(bubble)),
                f"{100 * bubble / whole:.1f} %",
                format_s(to_s(exposed)),
                f"{100 * exposed / whole:.1f} %",
                str(peaks[rank]),
            ]
        )
    return rows


def _exposed_line(timed: TimedSchedule) -> str:
    if not timed.exposed:
        return "no transfer is exposed"
    longest = _longest(timed, _NAMED)
    names = "; ".join(
        f"rank {item.rank} waits {format_s(to_s(item.ticks))} for {item.transfer} before {item.consumer}"
        for item in longest
    )
    more = len(timed.exposed) - len(longest)
    return f"exposed transfers: {names}{f'; and {more} more' if more else ''}"


def _longest(timed: TimedSchedule, count: int) -> list[ExposedTransfer]:
    return sorted(timed.exposed, key=lambda item: (-item.ticks, item.begin, item.rank))[:count]


def to_json(shown: Sequence[ShownSchedule], runtime: TransferRuntime) -> dict[str, Any]:
    """Return JSON values: the runtime's name under "runtime", a dict for each schedule under "schedules".

    A schedule's has the time of a step, the row of each rank in the table, and the `_LISTED` longest exposed
    transfers, with times in seconds.
    """
    return {"runtime": runtime.value, "schedules": [_schedule_json(item) for item in shown]}


def _schedule_json(shown: ShownSchedule) -> dict[str, Any]:
    timed, schedule = shown.timed, shown.timed.schedule
    peaks = peak_stashes(schedule)
    return {
        "name": shown.name,
        "stages": schedule.num_stages,
        "micro_batches": schedule.num_micro_batches,
        "transfers": "listed here" if shown.listed_here else "own" if schedule.has_communication else "none",
        "step_s": to_s(timed.duration),
        "largest_idle_span_s": to_s(timed.largest_idle_span),
        "ranks": [
            {
                "rank": rank,
                "stages": list(schedule.stages_of(rank)),
                "compute_s": to_s(timed.busy(rank)),
                "bubble_s": to_s(timed.bubble(rank)),
                "exposed_s": to_s(timed.exposed_on(rank)),
                "peak_stashes": peaks[rank],
            }
            for rank in range(schedule.num_ranks)
        ],
        "num_exposed": len(timed.exposed),
        "exposed": [
            {
                "rank": item.rank,
                "transfer": item.transfer,
                "before": item.consumer,
                "begin_s": to_s(item.begin),
                "exposed_s": to_s(item.ticks),
            }
            for item in _longest(timed, _LISTED)
        ],
    }


def schedules_picture(shown: Sequence[ShownSchedule], runtime: TransferRuntime) -> str:
    """Return an SVG of the timelines of all schedules on one axis of time.

    Its subtitle has the stages, ranks and micro-batches of the first one, and the name of `runtime`, the rules
    for transfers.
    """
    title = " beside ".join(item.name for item in shown)
    first = shown[0].timed.schedule
    subtitle = f"{placement_of(first)}, {first.num_micro_batches} micro-batches; {runtime.value} transfers"
    return draw_pipelines(title, [(item.name, item.timed) for item in shown], subtitle=subtitle)


def schedules_page(shown: Sequence[ShownSchedule], runtime: TransferRuntime) -> str:
    """Return an HTML page with the timelines of all schedules, and the headline and table of ranks of each.

    `runtime` has the rules for transfers under which the schedules were proved to end.
    """
    title = " beside ".join(item.name for item in shown)
    body = [f"<h1>{escape(title)}</h1>", f'<div class="wide">{schedules_picture(shown, runtime)}</div>']
    for item in shown:
        body.append(f'<p class="lead">{escape(headline(item, runtime))}</p>')
        body.append(table(_HEAD, _rows(item.timed), ("rank", "stages")))
        body.append(f'<p class="quiet">{escape(_exposed_line(item.timed))}</p>')
    return page(title, "\n".join(body))
