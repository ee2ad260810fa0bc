"""The published numbers of a paper, from `published/PAPER.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

from meshweave.base.errors import UnsupportedError, did_you_mean, printable
from meshweave.base.progress import Progress
from meshweave.reproduce.verdict import JudgedRow, OurValue, Tolerance

MODELS = ("gpt3", "megatron-nlg")
BOTH = "both"
_KEYS = frozenset({"id", "what", "where", "unit", "use", "points", "judge", "scored", "why", "readings"})
"""Of an entry; every other key names what a value is of. A value is a number, or a quotient "a / b"."""


@dataclass(frozen=True)
class PublishedRow:
    """A row of the file.

    `values` holds the published number by model (or by what else the paper looks at), or under `both`. If it is
    empty, the row is computed for all models.
    """

    id: str
    what: str
    where: str
    unit: str
    values: dict[str, float]
    tolerance: Tolerance
    scored: bool
    fitted: bool
    why: dict[str, str]

    @property
    def models(self) -> tuple[str, ...]:
        """What the row is computed for."""
        return tuple(self.values) or MODELS

    def beside(self, subject: str, ours: OurValue) -> JudgedRow:
        """Return the row of one of `models`, our value beside the published one."""
        return JudgedRow(
            self.id,
            self.what,
            self.where,
            subject,
            self.unit,
            self.values.get(subject),
            None if ours.value is None else float(ours.value),
            self.tolerance,
            self.scored,
            self.fitted,
            self.why.get(subject, ""),
            ours.detail,
            ours.reason,
        )


def published_rows(paper: str) -> tuple[PublishedRow, ...]:
    """Return all rows of a paper, in the order of the file."""
    text = (files("meshweave.reproduce") / "published" / f"{paper}.toml").read_text(encoding="utf-8")
    return tuple(row for entry in tomllib.loads(text)["row"] for row in _rows(entry))


def _rows(entry: dict[str, Any]) -> list[PublishedRow]:
    """Return the row of an entry, or one for each of its readings."""
    row = _row(entry)
    if "readings" not in entry:
        return [row]
    return [
        replace(row, id=f"{row.id}_{reading}", what=f"{row.what}, by {reading}")
        for reading in entry["readings"]
    ]


def _number(value: float | str) -> float:
    """Return a value of the file: a number, or a quotient as text."""
    if isinstance(value, str):
        dividend, divisor = value.split("/")
        return float(dividend) / float(divisor)
    return float(value)


def _row(entry: dict[str, Any]) -> PublishedRow:
    values = {name: _number(value) for name, value in entry.items() if name not in _KEYS}
    tolerance = Tolerance()
    if "points" in entry:
        tolerance = Tolerance(entry["points"] / 100, "points")
    elif "judge" in entry:
        tolerance = Tolerance(0.0, entry["judge"])
    why = entry.get("why", "")
    return PublishedRow(
        entry["id"],
        entry["what"],
        entry["where"],
        entry["unit"],
        values,
        tolerance,
        entry.get("scored", True),
        entry.get("use") == "cal",
        why if isinstance(why, dict) else dict.fromkeys((*MODELS, BOTH, *values), why),
    )


def select_rows(rows: Sequence[PublishedRow], ids: Sequence[str]) -> tuple[PublishedRow, ...]:
    """Return the rows with these ids, or all if none is named. Raises UnsupportedError for an unknown id."""
    known = [row.id for row in rows]
    for name in ids:
        if name not in known:
            raise UnsupportedError(
                f"there is no row '{printable(name)}'{did_you_mean(name, known)}; rows: {', '.join(known)}"
            )
    return tuple(row for row in rows if not ids or row.id in ids)


def judge_rows(
    paper: str, row: Callable[[PublishedRow, str], JudgedRow], ids: Sequence[str], progress: Progress
) -> list[JudgedRow]:
    """Return the rows of a paper with these ids, or all, computed by `row`.

    Raises UnsupportedError for an unknown id.
    """
    jobs = [(entry, subject) for entry in select_rows(published_rows(paper), ids) for subject in entry.models]
    out = []
    for number, (entry, subject) in enumerate(jobs):
        out.append(row(entry, subject))
        progress(number + 1, len(jobs))
    return out
