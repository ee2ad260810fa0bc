"""Reading option values that several verbs share. Each mistake is a MeshweaveError of one line."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from meshweave.algorithms.matmul2d import ALGORITHMS
from meshweave.base.errors import DescriptionError, LayoutError, UnsupportedError
from meshweave.describe.files import printable
from meshweave.tune.search import Progress
from meshweave.tune.unrolled import planned_names

MAX_RANKS = 1 << 12
MAX_SHOWN_RANKS = 64
JSON_HELP = "Print JSON instead of text."


def read_mesh(text: str) -> tuple[int, ...]:
    """ "2x4" as (2, 4), "2x4x2" as (2, 4, 2)."""
    parts = text.lower().split("x")
    if len(parts) not in (2, 3) or not all(part.isdecimal() and int(part[:10]) for part in parts):
        raise LayoutError(
            f"mesh '{printable(text)}' is not written ROWSxCOLS or ROWSxCOLSxDEPTH, such as 2x4"
        )
    if any(len(part) > 9 for part in parts) or math.prod(map(int, parts)) > MAX_RANKS:
        raise LayoutError(
            f"mesh '{printable(text)}' has more than {MAX_RANKS} ranks, which is all that is shown"
        )
    return tuple(map(int, parts))


def read_slices(text: str) -> tuple[int, ...]:
    """ "4" as four equal slices, "1:2:1" as three of these relative widths."""
    parts = text.split(":")
    if not all(part.isdecimal() and len(part) < 10 and int(part) for part in parts):
        raise LayoutError(
            f"slices '{printable(text)}' is neither a count, such as 4, nor widths, such as 1:2:1"
        )
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
    return planned_names(names)


def read_ranks(text: str) -> tuple[int, ...]:
    """ "0,5" as (0, 5), each once; nothing as none."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if (
        not all(part.isdecimal() and part.isascii() and len(part) < 10 for part in parts)
        or len(parts) > MAX_SHOWN_RANKS
    ):
        raise LayoutError(
            f"ranks '{printable(text)}' are not at most {MAX_SHOWN_RANKS} whole numbers separated by commas, "
            "such as 0,1"
        )
    return tuple(dict.fromkeys(map(int, parts)))


def check_writable(path: Path | None) -> None:
    """Before any work is done: raises DescriptionError where a file cannot be written there."""
    if path is None:
        return
    try:
        is_dir, has_parent = path.is_dir(), path.parent.is_dir()
        writable = os.access(path if path.exists() else path.parent, os.W_OK)
    except (OSError, ValueError):  # ValueError: a NUL in the path
        is_dir, has_parent, writable = False, True, False
    if is_dir:
        reason = "it is a directory; give a file"
    elif not has_parent:
        reason = f"there is no directory {printable(path.parent)}"
    elif not writable:
        reason = "not permitted; give a file in a directory of yours"
    else:
        return
    raise DescriptionError(f"{printable(path)}: cannot write: {reason}")


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
