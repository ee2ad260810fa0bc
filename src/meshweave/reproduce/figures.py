"""Figures of papers as data: panels of rows and columns, whatever the paper."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshweave.base.errors import UnsupportedError
from meshweave.describe.files import printable
from meshweave.tune.search import Progress

Cell = str | float | None


@dataclass(frozen=True)
class FigurePanel:
    """One model's part of a figure: a table with a name per column; None where there is no such value.

    `published` lists (row, column, value) of what the paper states of it, `notes` what to know of the columns."""

    model: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    published: tuple[tuple[str, str, float], ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Figure:
    number: int
    title: str
    unit: str
    panels: tuple[FigurePanel, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
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
        parts = [f"## Figure {self.number}: {self.title} ({self.unit})"]
        for panel in self.panels:
            head = f"| {' | '.join(panel.columns)} |"
            rule = "|---" + "|---:" * (len(panel.columns) - 1) + "|"
            lines = [f"| {' | '.join(map(_cell, row))} |" for row in panel.rows]
            parts.append("\n".join([f"{panel.model}\n", head, rule, *lines]))
            if panel.published:
                told = ", ".join(f"{row}, {column}: {value:.4g}" for row, column, value in panel.published)
                parts.append(f"Published, or derived from published numbers: {told}.")
            if panel.notes:
                parts.append("\n".join(f"- {note}" for note in panel.notes))
        return "\n\n".join(parts) + "\n"


def _cell(value: Cell) -> str:
    return "-" if value is None else value if isinstance(value, str) else f"{value:.4g}"


def parse_figure_numbers(names: Sequence[str], known: Iterable[int]) -> tuple[int, ...]:
    """Numbers of figures, of those that are known. Raises UnsupportedError for one that there is not."""
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
    """Those of the known figures that `numbers` lists, or all, in the order of the known ones."""
    wanted = [number for number in known if not numbers or number in numbers]
    out = []
    for done, number in enumerate(wanted):
        out.append(make(number))
        progress(done + 1, len(wanted))
    return out
