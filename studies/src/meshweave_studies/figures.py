"""Figures of papers as data: panels of rows and columns, whatever the paper."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

from meshweave.base.errors import UnsupportedError, printable
from meshweave.base.progress import Progress, no_progress
from meshweave.report.bars import Bar, Group, bar_chart
from meshweave_studies.markdown import markdown_table, markdown_words
from meshweave_studies.published import StudyT

Cell = str | float | None


@dataclass(frozen=True)
class FigurePanel:
    """The part of a figure for one model: a table with a name per column; None where there is no value.

    Attributes:
        published: (row, column, value) of each value that the paper states.
        notes: what to know of the columns.
    """

    model: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    published: tuple[tuple[str, str, float], ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Figure:
    """A figure of a paper, computed again.

    `draws` draws one of its panels; None where `pictures` knows figures of this number.
    """

    number: int
    title: str
    unit: str
    panels: tuple[FigurePanel, ...] = field(default=())
    draws: Callable[[Figure, FigurePanel], str] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the figure as plain values."""
        return {
            "figure": self.number,
            "title": self.title,
            "unit": self.unit,
            "panels": [
                {
                    "model": panel.model,
                    "columns": list(panel.columns),
                    "rows": [list(row) for row in panel.rows],
                    "published": [list(point) for point in panel.published],
                    **({"notes": list(panel.notes)} if panel.notes else {}),
                }
                for panel in self.panels
            ],
        }

    def markdown(self) -> str:
        """Return the figure as Markdown tables."""
        parts = [f"## Figure {self.number}: {self.title} ({self.unit})"]
        for panel in self.panels:
            cells = (tuple(map(_cell, row)) for row in panel.rows)
            table = markdown_table(panel.columns, "l" + "r" * (len(panel.columns) - 1), cells)
            parts.append(f"{markdown_words(panel.model)}\n\n{table.rstrip()}")
            if panel.published:
                points = ", ".join(
                    f"{markdown_words(str(row))}, {column}: {value:.4g}"
                    for row, column, value in panel.published
                )
                parts.append(f"Published, or derived from published numbers: {points}.")
            if panel.notes:
                parts.append("\n".join(f"- {markdown_words(note)}" for note in panel.notes))
        return "\n\n".join(parts) + "\n"


def _cell(value: Cell) -> str:
    return "-" if value is None else value if isinstance(value, str) else f"{value:.4g}"


def parse_figure_numbers(names: Sequence[str], known: Iterable[int]) -> tuple[int, ...]:
    """Return the numbers of the named figures. Raises UnsupportedError for a name that is not known."""
    numbers = {str(number): number for number in known}
    for name in names:
        if name not in numbers:
            raise UnsupportedError(
                f"there is no figure '{printable(name)}' here; figures: {', '.join(numbers)}"
            )
    return tuple(numbers[name] for name in names)


@dataclass(frozen=True)
class PaperFigures(Generic[StudyT]):
    """The figures of a paper that are computed: by number the function that makes one from a study."""

    makers: Mapping[int, Callable[[StudyT], Figure]]

    def __call__(
        self, study: StudyT, numbers: Sequence[int] = (), progress: Progress = no_progress
    ) -> list[Figure]:
        """Return the figures of these numbers, or all, in order."""
        wanted = [number for number in self.makers if not numbers or number in numbers]
        out = []
        for done, number in enumerate(wanted):
            out.append(self.makers[number](study))
            progress(done + 1, len(wanted))
        return out


def bars_by_row(figure: Figure, panel: FigurePanel, *, families: bool = False) -> str:
    """Return an SVG with a group of bars for each row of a panel, one for each column that has a value.

    Bars of one column have one colour where there are `families`; one below zero is then drawn as nothing.
    """
    groups = []
    for row in panel.rows:
        bars = [
            Bar(name, max(value, 0.0), value, value, f"{value:.4g}", family=name)
            if families
            else Bar(name, value, value, value, f"{value:.4g}")
            for name, value in zip(panel.columns[1:], row[1:], strict=True)
            if isinstance(value, float)
        ]
        groups.append(Group(str(row[0]), tuple(bars)))
    title = f"{panel.model}: {figure.title}"
    return bar_chart(title, groups, figure.unit, bar_name=figure.unit, spread_name="")
