"""Tables and consoles of text, which all verbs print with."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def text_table(
    head: Sequence[str],
    rows: Iterable[Sequence[Any]],
    left: Collection[str] = (),
    *,
    title: str = "",
    whole: Collection[str] | None = None,
) -> Table:
    """Return a rich table for a console.

    Args:
        head: the titles of the columns.
        rows: the cells of each row: text with rich's markup, or what else rich renders.
        left: the titles of the columns that are aligned to the left; the others are to the right.
        title: stands above the table, to the left; "" for none.
        whole: the titles of the columns whose cells are never broken over lines; None for no column.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in head:
        is_whole = whole is not None and column in whole
        table.add_column(column, justify="left" if column in left else "right", no_wrap=is_whole)
    for row in rows:
        table.add_row(*row)
    return table


def text_console(least_width: int = 124) -> Console:
    """Return a rich console on stdout, as wide as the terminal.

    Where stdout is no terminal it is `least_width` characters wide, or wider where the environment says so.
    """
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=max(console.width, least_width), highlight=False)


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]], num_left: int) -> None:
    """Print a table on stdout: the titles of its columns in `head`, then `rows`.

    The first `num_left` columns are aligned to the left, the others to the right.
    """
    text_console(130).print(text_table(head, rows, head[:num_left]))
