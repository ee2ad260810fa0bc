"""Reading option values that several verbs share. Each mistake is a MeshweaveError of one line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer

from meshweave.algorithms.matmul import ALGORITHMS, algorithm
from meshweave.errors import LayoutError, UnsupportedError
from meshweave.tune.search import Progress

JSON_HELP = "Print JSON instead of text."


def read_mesh(text: str) -> tuple[int, int]:
    """ "2x4" as (2, 4)."""
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdigit() and int(part) for part in parts):
        raise LayoutError(f"mesh '{text}' is not written ROWSxCOLS, such as 2x4")
    return int(parts[0]), int(parts[1])


def read_slices(text: str) -> tuple[int, ...]:
    """ "4" as four equal slices, "1:2:1" as three of these relative widths."""
    parts = text.split(":")
    if not all(part.isdigit() and int(part) for part in parts):
        raise LayoutError(f"slices '{text}' is neither a count, such as 4, nor widths, such as 1:2:1")
    numbers = tuple(int(part) for part in parts)
    if len(numbers) > 1:
        return numbers
    if numbers[0] > 1 << 16:
        raise LayoutError(f"{numbers[0]} slices are more than the {1 << 16} that make sense")
    return (1,) * numbers[0]


def read_algorithms(text: str) -> tuple[str, ...]:
    """ "all" or a comma-separated list of names, as table keys."""
    if text == "all":
        return tuple(ALGORITHMS)
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise UnsupportedError(f"no algorithm named; there are {', '.join(ALGORITHMS)}")
    return tuple(algorithm(name).name for name in names)


def print_json(data: Any) -> None:
    typer.echo(json.dumps(data, indent=1))


@contextmanager
def progress_bar(title: str) -> Iterator[Progress]:
    """A bar on stderr that appears when the work takes over a second; nothing where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    import time

    from rich.console import Console
    from rich.progress import Progress as Bar

    began = time.monotonic()
    with Bar(console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        task: Any = None

        def advance(done: int, total: int) -> None:
            nonlocal task
            if task is None:
                if time.monotonic() - began < 1:
                    return
                task = bar.add_task(title, total=total)
            bar.update(task, completed=done)
            bar.refresh()

        yield advance
