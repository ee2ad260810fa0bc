"""The figures drawn: one SVG for each model of each figure."""

from __future__ import annotations

from meshweave.report.bars import Bar, Group, bar_chart
from meshweave.report.chart import Series, line_chart
from meshweave_studies.figures import Cell, Figure, FigurePanel
from meshweave_studies.stacks import Stack, stacked_chart

_CUT = 6.0
"""Figure 10 ends here: 1D tensor parallelism would leave no room for the others."""


def pictures(figure: Figure) -> dict[str, str]:
    """Return the pictures of a figure: an SVG by model."""
    return {panel.model: _picture(figure, panel) for panel in figure.panels}


def _picture(figure: Figure, panel: FigurePanel) -> str:
    title = f"{panel.model}: {figure.title}"
    if figure.draws is not None:
        return figure.draws(figure, panel)
    if figure.number == 10:
        stacks = [Stack(str(row[0]), tuple(map(_number, row[1:]))) for row in panel.rows]
        return stacked_chart(
            title,
            stacks,
            panel.columns[1:],
            "times the time of the products",
            scale_end=_CUT,
            line_at=1.0,
            line_name="all of it could be hidden up to here",
        )
    if figure.number == 11:
        return _bars(title, panel)
    return _lines(title, figure, panel)


def _number(cell: Cell) -> float:
    assert isinstance(cell, float | int)
    return float(cell)


def _bars(title: str, panel: FigurePanel) -> str:
    groups = []
    for row in panel.rows:
        bars = [
            Bar(name, value, value, value, f"{value:.1f} %")
            for name, value in zip(panel.columns[1:], row[1:], strict=True)
            if isinstance(value, float)
        ]
        groups.append(Group(str(row[0]), tuple(bars)))
    return bar_chart(title, groups, "FLOP utilisation (%)", bar_name="FLOP utilisation", spread_name="")


_X_LABELS = {
    2: "batch size m",
    3: "batch size m",
    9: "chips",
    12: "chips",
    13: "mesh (rows x columns)",
    14: "slice count S",
}


def _lines(title: str, figure: Figure, panel: FigurePanel) -> str:
    names = [str(row[0]) for row in panel.rows]
    counted = figure.number != 13
    places = [float(name) if counted else float(number) for number, name in enumerate(names)]
    series = []
    for column, name in enumerate(panel.columns[1:], start=1):
        values = [(x, row[column]) for x, row in zip(places, panel.rows, strict=True)]
        points = tuple((x, value) for x, value in values if isinstance(value, float))
        best = max(range(len(points)), key=lambda i: points[i][1], default=0)
        ringed = (best,) if figure.number in (13, 14) else ()
        # Crosses, since a line of simulations would cover that of estimates.
        series.append(Series(name, points, ringed, joined=name != "simulation"))
    stated = tuple((places[names.index(row)], value) for row, _, value in panel.published if row in names)
    if stated:
        series.append(Series("published", stated, joined=False))
    return line_chart(
        title,
        series,
        _X_LABELS[figure.number],
        "FLOP utilisation (%)",
        x_ticks=list(zip(places, names, strict=True)),
        x_log=counted,
        y_log=False,
        y_text=lambda value: f"{value:.1f} %",
    )
