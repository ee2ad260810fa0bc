"""Figures of papers as data: panels of rows and columns, whatever the paper."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshweave.base.errors import UnsupportedError, printable
from meshweave.base.progress import Progress
from meshweave.report.markdown import markdown_table, markdown_words

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


def build_figures(
    make: Callable[[int], Figure], known: Iterable[int], numbers: Sequence[int], progress: Progress
) -> list[Figure]:
    """Return the known figures that `numbers` lists, or all if it is empty, in the order of `known`."""
    wanted = [number for number in known if not numbers or number in numbers]
    out = []
    for done, number in enumerate(wanted):
        out.append(make(number))
        progress(done + 1, len(wanted))
    return out
