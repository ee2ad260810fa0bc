"""Options that name an algorithm of the table, a problem for it and one of its configs."""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshweave.base.errors import LayoutError, printable
from meshweave.base.limits import PROGRAM_BYTES
from meshweave.cli.options import is_plan_text, read_program
from meshweave.describe.files import read_text
from meshweave.ir.program import Program

if TYPE_CHECKING:
    from meshweave.algorithms.contract import Algorithm

SettingsOption = Annotated[
    list[str],
    typer.Option(
        "--set",
        help="Of an algorithm: a field of its problem, as in --set m=64 or --set mesh_shape=2x4; may be repeated. "
        "Other fields are those of the algorithm's first example.",
    ),
]
ConfigOption = Annotated[
    int,
    typer.Option(
        "--config",
        min=0,
        help="Of an algorithm: the number of the config, as `meshweave tune algorithm` lists them.",
    ),
]


def is_file(source: str) -> bool:
    """Return whether an argument names a file or stdin, and not an algorithm.

    True for "-", for a name with a suffix, such as "plan.json", whether or not that file exists, and for a path
    that exists.
    """
    if source == "-" or Path(source).suffix:
        return True
    try:
        return Path(source).exists()
    except (OSError, ValueError):  # longer than the name of a file may be, or not to be encoded
        return False


def is_plan_file(source: str) -> bool:
    """Return whether an argument names a file whose text begins as the JSON of a plan does; False for "-".

    Raises DescriptionError where it names a file that cannot be read.
    """
    return source != "-" and is_file(source) and is_plan_text(read_text(source, PROGRAM_BYTES))


def read_entry(name: str, settings: list[str]) -> tuple[Algorithm[Any, Any], Any]:
    """Return the algorithm `name` and its first example problem, with the fields that `settings` replace.

    Args:
        settings: "field=value" each, such as "rows=32".

    Raises:
        UnsupportedError: there is no such algorithm.
        LayoutError: a setting is wrong, or the algorithm refuses the problem.
        DescriptionError: the problem of a step refuses a setting.
    """
    from meshweave.algorithms.settings import problem_from_settings
    from meshweave.algorithms.table import algorithm

    entry = algorithm(name)
    problem = problem_from_settings(entry, settings)
    refusal = entry.refusal(problem)
    if refusal is not None:
        raise LayoutError(f"{name} does not solve this problem: {refusal}")
    return entry, problem


def read_program_or_entry(source: str, settings: list[str], config: int) -> Program:
    """Return the program in a text file, on stdin for "-", or of an algorithm.

    Args:
        source: a file, "-", or the name of an algorithm.
        settings: fields of the algorithm's problem, as `read_entry` takes them; empty for a file.
        config: which of the algorithm's candidates for the problem, counted from 0; 0 for a file.

    Raises MeshweaveError where there is no such program or candidate, a setting is wrong, or a file comes with
    settings or a config.
    """
    if is_file(source):
        if settings or config:
            raise LayoutError(
                f"{printable(source)} is a program, which has its sizes: --set and --config are of algorithms"
            )
        return read_program(source)
    entry, problem = read_entry(source, settings)
    chosen = next(islice(entry.candidates(problem), min(config, sys.maxsize), None), None)
    if chosen is None:
        count = sum(1 for _ in entry.candidates(problem))
        raise LayoutError(
            f"--config {config}: {source} has {count} configs for this problem, 0 to {count - 1}"
        )
    return entry.program(problem, chosen)
