"""Results of `meshweave bench` as tables, files and pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from meshweave.base.errors import ProgramError
from meshweave.base.outputs import write_file
from meshweave.base.units import format_s
from meshweave.cli.options import print_json, say_written
from meshweave.report.bars import Bar, Group, bar_chart

if TYPE_CHECKING:
    from meshweave_lab.bench.results import MeasuredRound, RivalTimes
    from meshweave_lab.bench.shapes import ShapeComparison

UNPACED_NOTE = (
    "unpaced: tells of this machine's cores rather than of schedules; its bound is that of the links"
)
NOT_COMPARABLE = "not the same task, so not comparable: inputs already gathered on every rank"


def heading(measured: MeasuredRound) -> str:
    """Return the pass, product, mesh, ratio and bound of a round."""
    problem, ratio = measured.round.problem, measured.round.ratio
    what = f"{measured.round.pass_name}, {problem.dataflow} {problem.m} x {problem.n} x {problem.k}"
    mesh = "x".join(map(str, problem.mesh_shape))
    if not measured.round.flops_per_s:
        return f"{what} on {mesh}: unpaced, {format_s(measured.bound_s)} of communication"
    balance = f", compute {ratio:g} x communication" if ratio is not None else ""
    return f"{what} on {mesh}{balance}: bound {format_s(measured.bound_s)}"


def report_results(
    record: dict[str, Any],
    measured: Sequence[MeasuredRound],
    headings: Sequence[str],
    title: str,
    out: Path | None,
    svg: Path | None,
    json: bool,
    *,
    comparison: ShapeComparison | None = None,
) -> None:
    """Print results as tables, or with `json` print `record`; write `record` to `out` and a picture to `svg`.

    The picture shows multiples of the bound, or with a `comparison` seconds.

    Args:
        headings: one for each round of `measured`.

    Raises:
        ProgramError: a result differs from the dense product.
    """
    if svg is not None:
        write_file(svg, picture(measured, headings, title, in_seconds=comparison is not None))
    if out is not None:
        write_file(out, dumps(record, indent=1) + "\n")
    if json:
        print_json(record)
    else:
        typer.echo(title)
        for one, heading in zip(measured, headings, strict=True):
            typer.echo("\n" + "\n".join(table(one, heading)))
        for line in () if comparison is None else gain_lines(comparison):
            typer.echo(line)
        for line in ("", *notes(measured)):
            typer.echo(line)
        say_written(out, svg)
    for one, heading in zip(measured, headings, strict=True):
        for result in one.results:
            if result.error:
                raise ProgramError(
                    f"{heading}: {result.name} differs from the dense product by {result.error:g}"
                )


def table(measured: MeasuredRound, heading: str) -> list[str]:
    """Return the lines of a round, within 100 columns.

    Rivals that start from the same shards come first, the fastest on top. Those that start from something else
    stand below, under a line that says so.
    """
    has_estimates = any(result.estimate_s is not None for result in measured.results)
    last = f"{'x estimate':>12}" if has_estimates else ""
    lines = [heading, f"  {'':<36}{'median':>9}{'x bound':>9}{'x theory':>10}{last}   fastest to slowest"]
    is_comparable = True
    for result in measured.ranked():
        if result.precondition and is_comparable:
            is_comparable = False
            lines.append(f"  {NOT_COMPARABLE}")
        last = f"{_ratio_text(result.over_estimate):>12}" if has_estimates else ""
        lines.append(
            f"  {_shortened(result.name):<36}{format_s(result.median_s):>9}"
            f"{_ratio_text(result.over_bound):>9}{_ratio_text(result.over_theory):>10}{last}   "
            f"{format_s(result.fastest_s)} to {format_s(result.slowest_s)}"
            + ("" if result.error == 0 else f"  WRONG by {result.error:g}")
        )
    overruns, products = measured.overruns
    if overruns:
        lines.append(f"  pace: {overruns} of {products} products took longer than the pace allows")
    return lines


def gain_lines(comparison: ShapeComparison) -> list[str]:
    """Return lines that say what the shapes gain, by algorithm."""
    lines = ["", f"times faster than on {comparison.labs[0]}"]
    for family, gains in comparison.gains().items():
        for lab, gain in zip(comparison.labs[1:], gains[1:], strict=True):
            expected = ", ".join(
                f"{_ratio_text(gain[key])} by {key}"
                for key in ("theory", "estimate")
                if gain[key] is not None
            )
            lines.append(
                f"  {_shortened(family):<36}{_ratio_text(gain['measured']):>9} on {lab} ({expected})"
            )
    return lines


def _ratio_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _shortened(name: str) -> str:
    return name if len(name) <= 35 else f"{name[:32]}..."


def notes(measured: Sequence[MeasuredRound]) -> list[str]:
    """Return notes to print below results: what some rivals start from, and what unpaced rounds do not show."""
    preconditions = dict.fromkeys(
        result.precondition for one in measured for result in one.results if result.precondition
    )
    is_paced = all(one.round.flops_per_s for one in measured)
    return [*preconditions] if is_paced else [*preconditions, UNPACED_NOTE]


def picture(
    measured: Sequence[MeasuredRound], headings: Sequence[str], title: str, *, in_seconds: bool = False
) -> str:
    """Return an SVG of bars: median time over the bound, or in seconds.

    Rivals that do not start from the same shards stand in groups of their own at the bottom.
    """
    rounds = list(zip(measured, headings, strict=True))
    groups = [*_groups(rounds, in_seconds, comparable=True), *_groups(rounds, in_seconds, comparable=False)]
    results = [result for one in measured for result in one.results]
    mark_names = ["theory without latency"]
    if any(result.estimate_s is not None for result in results):
        mark_names.append("estimate")
    return bar_chart(
        title,
        groups,
        "seconds" if in_seconds else "time over max(compute, bytes per axis / rate)",
        mark_names=mark_names,
        bar_name=f"median of {len(results[0].runs_s)} runs",
        line_at=None if in_seconds else 1.0,
        line_name="" if in_seconds else "bound",
        notes=notes(measured),
    )


def _groups(
    rounds: Sequence[tuple[MeasuredRound, str]], in_seconds: bool, *, comparable: bool
) -> Iterator[Group]:
    """Yield the bars of each round, of the rivals that are comparable or of the others, if there are any."""
    for one, heading in rounds:
        bars = [
            _bar(result, in_seconds) for result in one.ranked() if (result.precondition == "") == comparable
        ]
        if bars:
            yield Group(heading if comparable else f"{NOT_COMPARABLE} ({heading})", tuple(bars))


def _bar(result: RivalTimes, in_seconds: bool) -> Bar:
    unit = 1.0 if in_seconds else result.bound_s
    text = format_s(result.median_s)
    return Bar(
        _shortened(result.name),
        result.median_s / unit,
        result.fastest_s / unit,
        result.slowest_s / unit,
        text if in_seconds else f"{result.over_bound:.2f} x, {text}",
        tuple(None if mark is None else mark / unit for mark in (result.theory_s, result.estimate_s)),
        result.family,
    )
