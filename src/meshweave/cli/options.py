"""What the verbs share: option values read (each mistake is a MeshweaveError of one line), JSON, progress bars."""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from meshweave.algorithms.table import PRODUCTS_2D
from meshweave.base.errors import (
    DescriptionError,
    LayoutError,
    ProgramError,
    UnsupportedError,
    printable,
    require_known,
)
from meshweave.base.limits import PROGRAM_BYTES
from meshweave.base.outputs import claim_output, note
from meshweave.base.progress import Progress, no_progress
from meshweave.base.units import DTYPES
from meshweave.cli.option_fields import option
from meshweave.describe.files import read_stdin, read_text
from meshweave.ir.program import Program
from meshweave.ir.program.parse import parse
from meshweave.tune import load_plan
from meshweave.tune.plan import Plan
from meshweave.tune.plan_description import catalog_differences
from meshweave.tune.unrolled import planned_names

MAX_RANKS = 1 << 12
MAX_SHOWN_RANKS = 64
JSON_HELP = "Print JSON instead of text."


def read_plan(path: str | Path) -> Plan:
    """Return the plan in a JSON file.

    The command's notes (`base.outputs.note`) say which of its model and cluster differ from the catalog's of
    that name, and for the plan of a step what its estimated times leave out. Raises DescriptionError where the
    file is missing or no plan.
    """
    plan = load_plan(Path(path))
    for sentence in catalog_differences(plan):
        note(sentence)
    for text in plan.not_priced if plan.kind == "step" else ():
        note(printable(text))
    return plan


def read_mesh(text: str) -> tuple[int, ...]:
    """Return the mesh shape of "2x4" or "2x4x2". Raises LayoutError for other text or over `MAX_RANKS` ranks."""
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
    """Return relative widths of slices: (1, 1, 1, 1) for "4", (1, 2, 1) for "1:2:1".

    Raises LayoutError for other text, and for a count above 65536.
    """
    parts = text.split(":")
    if not all(part.isdecimal() and len(part) < 10 and int(part) for part in parts):
        raise LayoutError(
            f"slices '{printable(text)}' is neither a count, such as 4, nor widths, such as 1:2:1"
        )
    numbers = tuple(int(part) for part in parts)
    count = len(numbers) if len(numbers) > 1 else numbers[0]
    if count > 1 << 16:
        raise LayoutError(f"{count} slices are more than the {1 << 16} that make sense")
    return numbers if len(numbers) > 1 else (1,) * count


def read_algorithms(text: str) -> tuple[str, ...]:
    """Return the names in a comma-separated list of algorithms for 2D products; all of `PRODUCTS_2D` for "all".

    To a list with "meshslice" and "wang", the variant "wang[S=meshslice]" is added, which has the slice counts
    of MeshSlice; likewise for "summa" (`tune.unrolled.planned_names`). Raises UnsupportedError where a name is
    unknown or the list is empty.
    """
    if text == "all":
        return tuple(PRODUCTS_2D)
    return planned_names(tuple(name.strip() for name in text.split(",") if name.strip()))


def is_plan_text(text: str) -> bool:
    """Return whether a text begins as the JSON of a plan does."""
    return re.match(r'\s*\{\s*"format":\s*"meshweave-plan-', text) is not None


def read_program(source: str) -> Program:
    """Return the program in a text file, or on stdin for "-".

    Raises DescriptionError where it cannot be read, and ProgramError where it is no program; where it is a plan,
    the message says so.
    """
    text = read_stdin(PROGRAM_BYTES) if source == "-" else read_text(source, PROGRAM_BYTES)
    if is_plan_text(text):
        raise ProgramError(
            f"{printable(source)} is a plan, and no program: meshweave show prints what it chose, meshweave "
            "simulate times it"
        )
    try:
        return parse(text)
    except ProgramError as error:
        raise ProgramError(f"{printable(source)}: {error}") from None


def read_names(text: str) -> tuple[str, ...] | None:
    """Return a comma-separated list of names; None for "all". Raises DescriptionError where it is empty."""
    if text == "all":
        return None
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise DescriptionError("the list of names is empty; give some, with commas between, or 'all'")
    return names


_BYTE_UNITS = {
    "": 1,
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}


BARE_BYTES = 1024
"""The least number above 0 that is read as bytes without a unit; of a smaller one the unit was forgotten."""
BARE_CHIP_BYTES = 10**6
"""The same for the memory of a chip, which is usually given in GB or MB."""


def read_bytes(option: str, text: str, least_bare: int = BARE_BYTES) -> int:
    """Return the bytes of a size such as "512MiB", "1.5 GB" or "4096", rounded down to whole bytes.

    Args:
        option: the name of the option, for the error.
        least_bare: the least number above 0 that is read as bytes without a unit.

    Raises:
        LayoutError: the text is no size, or has no unit and is a number above 0 and below `least_bare`.
    """
    parts = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([A-Za-z]*)", text.strip())
    if parts is None or parts[2] not in _BYTE_UNITS:
        raise LayoutError(f"{option} '{printable(text)}' is no number of bytes, such as 512MiB, 2GB or 4096")
    if not parts[2] and 0 < float(parts[1]) < least_bare:
        raise LayoutError(f"{option} {parts[1]}: {parts[1]} what? Give a unit, such as {parts[1]}GB")
    return int(float(parts[1]) * _BYTE_UNITS[parts[2]])


def read_dtype(text: str) -> str:
    """Return `text`, the name of an element type.

    Raises UnsupportedError, with the nearest name, where it is none.
    """
    require_known(text, DTYPES, "there is no dtype", UnsupportedError, "there are")
    return text


def read_ranks(text: str) -> tuple[int, ...]:
    """Return the ranks in "0,5", each once; () for an empty text.

    Raises LayoutError for other text or more than `MAX_SHOWN_RANKS` ranks.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if (
        bool(text) != bool(parts)
        or not all(part.isdecimal() and part.isascii() and len(part) < 10 for part in parts)
        or len(parts) > MAX_SHOWN_RANKS
    ):
        raise LayoutError(
            f"ranks '{printable(text)}' are not at most {MAX_SHOWN_RANKS} whole numbers separated by commas, "
            "such as 0,1"
        )
    return tuple(dict.fromkeys(map(int, parts)))


def _claimed(context: typer.Context, param: typer.CallbackParam, value: Path | None) -> Path | None:
    """Return the path that an output option gives, checked before anything is computed."""
    if value is not None and not context.resilient_parsing:
        claim_output(value, next(name for name in param.opts if name.startswith("--")))
    return value


OutputOption = partial(typer.Option, callback=_claimed)
"""Of a file that a verb writes: refused at once where it cannot be written, or is an input or another output."""


def output(help: str, *names: str) -> Any:
    """Return a field of a dataclass for such a file, as `option_fields.option` does; its default is None."""
    return option(None, help, *names, callback=_claimed)


def say_written(*paths: Path | None) -> None:
    """Print which files were written, those of options that were given."""
    for path in paths:
        if path is not None:
            typer.echo(f"written: {path}")


OldSequenceOption = Annotated[int | None, typer.Option("--seq", hidden=True)]
"""The name that `--sequence` had, for one version."""


def read_sequence(sequence: int, old: int | None) -> int:
    """Return the tokens per sequence: the value `sequence` of `--sequence`, unless `--seq` is given.

    `old` is the value of `--seq`, the option's former name, or None where it is not given. It wins, and a note
    (`base.outputs.note`) gives the new name.
    """
    if old is None:
        return sequence
    note("--seq is --sequence now")
    return old


def print_json(data: Any) -> None:
    """Print a value of lists, dicts, strings and numbers on stdout as indented JSON."""
    typer.echo(json.dumps(data, indent=1))


PLAIN_LINES_EVERY_S = 10.0
"""The least seconds between lines of progress where stderr is no terminal."""


@contextmanager
def progress_bar(title: str, *, plain_lines: bool = False) -> Iterator[Progress]:
    """Yield a callback of (steps done, steps in all) that shows progress on stderr.

    On a terminal it shows a bar named `title`, once the work has taken over a second. Elsewhere it shows
    nothing; with `plain_lines` it prints a line such as "planning: 3 of 8" where the counts have changed, at
    most every `PLAIN_LINES_EVERY_S` seconds.
    """
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress as Bar

        with Bar(console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
            yield _on_terminal(bar, title)
    else:
        yield _in_lines(title) if plain_lines else no_progress


def _on_terminal(bar: Any, title: str) -> Progress:
    began, task = time.monotonic(), None

    def advance(done: int, total: int) -> None:
        nonlocal task
        if task is None:
            if time.monotonic() - began < 1:
                return
            task = bar.add_task(title, total=total)
        bar.update(task, completed=done)
        bar.refresh()

    return advance


def _in_lines(title: str) -> Progress:
    last, line = time.monotonic(), ""

    def advance(done: int, total: int) -> None:
        nonlocal last, line
        if time.monotonic() - last < PLAIN_LINES_EVERY_S:
            return
        changed = f"{title}: {done} of {total}"
        if changed != line:
            last, line = time.monotonic(), changed
            typer.echo(line, err=True)

    return advance
