"""Files of published training runs: comma-separated rows, one measured run each, figures with their source.

    source,model,chips,tp,pp,cp,dp,vp,ep,mbs,gbs,seq,config,metric,value,second

`chips` is a number and a kind ("128 A100"), `vp` counts stages of a rank that are interleaved, `ep` is the degree
of experts, `mbs` and `gbs` are the sequences of a micro-batch and of a step, `config` says the rest in words,
`value` is in the unit that `metric` names, and `second` may hold another figure of the run. Empty is not stated,
and "n/a" neither. The order of columns does not matter, and further columns are left alone.
"""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from meshweave.base.errors import did_you_mean, printable
from meshweave.base.limits import RUNS
from meshweave.describe.files import Problem, fail, fail_with_all, read_text

SHIPPED = "training_runs.csv"
ALSO_SHIPPED = ("dense_runs.csv", "vtrain_runs.csv")
"""Files of `meshweave_studies/published` that ship with the package: the first, and those that came later."""
COUNTS = ("tp", "pp", "cp", "dp", "vp", "ep", "mbs", "gbs", "seq")
COLUMNS = ("source", "model", "chips", *COUNTS, "config", "metric", "value", "second")
OTHERS = ("dispatcher", "balance")
"""Columns of runs of models with experts, which a file need not have: words. A further one, `etp`, has a count."""
_REQUIRED = ("source", "model", "metric", "value")
_NOT_STATED = ("", "n/a", "-")
_MOST = 2**40


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """One row: a measured run as its source states it.

    Attributes:
        line: its line in the file, from 1.
        counts: the stated numbers of `COUNTS` and of `etp` by column.
        value: the figure, in the unit that `metric` names.
        second: another figure of the run, in words.
        others: words of the columns `OTHERS` that the file has.
    """

    line: int
    source: str
    model: str
    chips: str
    counts: Mapping[str, int]
    config: str
    metric: str
    value: float
    second: str
    others: Mapping[str, str] = field(default_factory=dict)

    def count(self, column: str) -> int | None:
        """Return a stated number of `counts`; None where it is not stated."""
        return self.counts.get(column)


def read_runs(path: str | Path) -> tuple[PublishedRun, ...]:
    """Return the runs of a file. Raises DescriptionError with one line, with line and column, for each bad row."""
    return parse_runs(read_text(path), path)


def shipped_runs(name: str = SHIPPED) -> tuple[PublishedRun, ...]:
    """Return the runs of a file that ships with the package."""
    folder = files("meshweave_studies").joinpath("published")
    return parse_runs(folder.joinpath(name).read_text("utf-8"), name)


def parse_runs(text: str, file: str | Path) -> tuple[PublishedRun, ...]:
    """Return the runs of a file with this text. Raises DescriptionError as `read_runs` does."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    runs: list[PublishedRun] = []
    problems: list[Problem] = []
    try:
        header = _header(next(reader, []), file)
        for row in _rows(reader, header):
            if isinstance(row, PublishedRun):
                runs.append(row)
            else:
                problems.append(row)
    except csv.Error as error:
        fail(file, f"line {reader.line_num}", f"is no row of comma-separated values ({error})")
    if len(runs) > RUNS.most:
        fail(file, "", RUNS.refusal(len(runs)))
    if problems:
        fail_with_all(file, problems)
    if not runs:
        fail(file, "", "has no rows; give one at least")
    return tuple(runs)


def _header(names: list[str], file: str | Path) -> list[str]:
    header = [name.strip() for name in names]
    for name, count in Counter(header).items():
        if name and count > 1:
            fail(file, "line 1", f"column '{printable(name)}' stands twice")
    for name in COLUMNS:
        if name not in header:
            hint = did_you_mean(name, header)
            fail(file, "line 1", f"no column '{name}'{hint}; runs need {', '.join(COLUMNS)}")
    return header


def _rows(reader: Iterator[list[str]], header: list[str]) -> Iterator[PublishedRun | Problem]:
    for values in reader:
        line = reader.line_num  # type: ignore[attr-defined]
        if not any(value.strip() for value in values):
            continue
        if len(values) != len(header):
            yield Problem(f"line {line}", f"has {len(values)} values where line 1 has {len(header)} columns")
            continue
        yield _row({name: value.strip() for name, value in zip(header, values, strict=True)}, line)


def _row(row: dict[str, str], line: int) -> PublishedRun | Problem:
    for column in COLUMNS:
        if not row[column].isprintable():
            return Problem(f"line {line}, column {column}", "has characters that cannot be printed")
    for column in _REQUIRED:
        if not row[column]:
            return Problem(f"line {line}, column {column}", "is empty; every run states it")
    counts = {}
    for column in (*COUNTS, "etp"):
        text = row.get(column, "")
        if text.lower() in _NOT_STATED:
            continue
        if not (text.isascii() and text.isdigit() and len(text) < 16 and 1 <= int(text) <= _MOST):
            wanted = f"is no whole number from 1 to {_MOST}; leave it empty where it is not stated"
            return Problem(f"line {line}, column {column}", f"'{printable(text[:60])}' {wanted}")
        counts[column] = int(text)
    try:
        value = float(row["value"])
    except ValueError:
        value = math.nan
    if not 0 < value < 1e18:
        shown = printable(row["value"][:60])
        return Problem(f"line {line}, column value", f"'{shown}' is no number above 0 and below 1e18")
    return PublishedRun(
        line,
        row["source"],
        row["model"],
        row["chips"],
        counts,
        row["config"],
        row["metric"],
        value,
        row["second"],
        {name: row[name] for name in OTHERS if row.get(name)},
    )
