"""Results of `meshweave bench` as tables, files and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from meshweave.base.errors import ProgramError
from meshweave.base.units import format_s
from meshweave.cli.options import print_json
from meshweave.report.bars import Bar, Group, bar_chart
from meshweave.report.timeline import write_text

if TYPE_CHECKING:
    from meshweave.lab.bench.rounds import Comparison, Measured, Result

UNPACED_NOTE = (
    "unpaced: tells of this machine's cores rather than of schedules; its bound is that of the links"
)


def heading(one: Measured) -> str:
    """Pass, product, mesh, ratio and bound of a round."""
    problem = one.round.problem
    what = f"{one.round.pass_name}, {problem.dataflow} {problem.m} x {problem.n} x {problem.k}"
    mesh = "x".join(map(str, problem.mesh_shape))
    if not one.round.flops_per_s:
        return f"{what} on {mesh}: unpaced, {format_s(one.bound_s)} of communication"
    ratio = f", compute {one.round.ratio:g} x communication" if one.round.ratio is not None else ""
    return f"{what} on {mesh}{ratio}: bound {format_s(one.bound_s)}"


def report_results(
    record: dict[str, Any],
    measured: Sequence[Measured],
    headings: Sequence[str],
    title: str,
    out: Path | None,
    svg: Path | None,
    json: bool,
    *,
    seconds: bool = False,
    comparison: Comparison | None = None,
) -> None:
    """Prints and writes results, `seconds` instead of multiples of the bound in the picture. Raises ProgramError
    where a result is wrong."""
    if svg is not None:
        write_text(svg, _picture(measured, headings, title, seconds))
    if out is not None:
        write_text(out, dumps(record, indent=1) + "\n")
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
        for path in (out, svg):
            if path is not None:
                typer.echo(f"written: {path}")
    for one, heading in zip(measured, headings, strict=True):
        for result in one.results:
            if result.error:
                raise ProgramError(
                    f"{heading}: {result.name} differs from the dense product by {result.error:g}"
                )


def table(one: Measured, heading: str) -> list[str]:
    """The lines of a round, the fastest rival first, within 100 columns."""
    estimated = any(result.estimate_s is not None for result in one.results)
    last = f"{'x estimate':>12}" if estimated else ""
    lines = [heading, f"  {'':<36}{'median':>9}{'x bound':>9}{'x theory':>10}{last}   fastest to slowest"]
    for result in one.ranked():
        last = f"{_times(result.over_estimate):>12}" if estimated else ""
        lines.append(
            f"  {_short(result.name):<36}{format_s(result.median_s):>9}{_times(result.over_bound):>9}"
            f"{_times(result.over_theory):>10}{last}   {format_s(result.fastest_s)} to "
            f"{format_s(result.slowest_s)}" + ("" if result.error == 0 else f"  WRONG by {result.error:g}")
        )
    overruns, products = one.overruns
    if overruns:
        lines.append(f"  pace: {overruns} of {products} products took longer than the pace allows")
    return lines


def gain_lines(comparison: Comparison) -> list[str]:
    """What the shapes gain, by algorithm."""
    lines = ["", f"times faster than on {comparison.labs[0]}"]
    for family, gains in comparison.gains().items():
        for lab, gain in zip(comparison.labs[1:], gains[1:], strict=True):
            expected = ", ".join(
                f"{_times(gain[key])} by {key}" for key in ("theory", "estimate") if gain[key] is not None
            )
            lines.append(f"  {_short(family):<36}{_times(gain['measured']):>9} on {lab} ({expected})")
    return lines


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _short(name: str) -> str:
    return name if len(name) <= 35 else f"{name[:32]}..."


def notes(measured: Sequence[Measured]) -> list[str]:
    """What to know about some of the results."""
    from meshweave.lab.bench.rounds import DTENSOR, REPLICATED_NOTE

    has_replicated = any(result.name == DTENSOR[1].name for one in measured for result in one.results)
    found = [REPLICATED_NOTE] if has_replicated else []
    return found if all(one.round.flops_per_s for one in measured) else [*found, UNPACED_NOTE]


def _picture(measured: Sequence[Measured], headings: Sequence[str], title: str, seconds: bool) -> str:
    def bar(result: Result) -> Bar:
        unit = 1.0 if seconds else result.bound_s
        marks = (result.theory_s, result.estimate_s)
        text = format_s(result.median_s)
        return Bar(
            _short(result.name),
            result.median_s / unit,
            result.fastest_s / unit,
            result.slowest_s / unit,
            text if seconds else f"{result.over_bound:.2f} x, {text}",
            tuple(None if mark is None else mark / unit for mark in marks),
            result.family,
        )

    results = [result for one in measured for result in one.results]
    names = ["theory without latency"]
    if any(result.estimate_s is not None for result in results):
        names.append("estimate")
    groups = [
        Group(heading, tuple(bar(result) for result in one.ranked()))
        for one, heading in zip(measured, headings, strict=True)
    ]
    return bar_chart(
        title,
        groups,
        "seconds" if seconds else "time over max(compute, bytes per axis / rate)",
        mark_names=names,
        bar_name=f"median of {len(results[0].runs_s)} runs",
        line_at=None if seconds else 1.0,
        line_name="" if seconds else "bound",
        notes=notes(measured),
    )
