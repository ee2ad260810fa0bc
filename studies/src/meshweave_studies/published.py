"""The published numbers of a paper, from `published/PAPER.toml`, and which rows do not count (`listed.toml`)."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.resources import files
from typing import Any

from meshweave.base.errors import UnsupportedError, did_you_mean, printable
from meshweave.base.progress import Progress
from meshweave_studies.verdict import JudgedRow, Listed, OurValue, Tolerance, tolerance_of

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
    listed: Listed = ""

    @property
    def models(self) -> tuple[str, ...]:
        """What the row is computed for."""
        return tuple(self.values) or MODELS

    def beside(self, subject: str, ours: OurValue, fits: bool = True) -> JudgedRow:
        """Return the row of one of `models`, our value beside the published one.

        Args:
            fits: whether constants were fitted for ours, so that rows for fits (`fitted`) do not count.
        """
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
            "fitted" if self.fitted and fits else self.listed,
        )


def published_rows(paper: str) -> tuple[PublishedRow, ...]:
    """Return all rows of a paper, in the order of the file."""
    listed = listed_patterns(paper)
    return tuple(_row(entry, listed) for whole in _load(paper)["row"] for entry in _readings(whole))


def listed_patterns(paper: str) -> dict[Listed, list[str]]:
    """Return the ids of rows that are listed and do not count, by reason; `*` stands for any text."""
    patterns: dict[Listed, list[str]] = _load("listed").get(paper, {})
    return patterns


def _load(name: str) -> dict[str, Any]:
    text = (files("meshweave_studies") / "published" / f"{name}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def _readings(entry: dict[str, Any]) -> list[dict[str, Any]]:
    """Return an entry of the file, or one for each of its readings."""
    if "readings" not in entry:
        return [entry]
    return [
        {**entry, "id": f"{entry['id']}_{reading}", "what": f"{entry['what']}, by {reading}"}
        for reading in entry["readings"]
    ]


def _number(value: float | str) -> float:
    """Return a value of the file: a number, or a quotient as text."""
    if isinstance(value, str):
        dividend, divisor = value.split("/")
        return float(dividend) / float(divisor)
    return float(value)


def _row(entry: dict[str, Any], listed: Mapping[Listed, Sequence[str]]) -> PublishedRow:
    values = {name: _number(value) for name, value in entry.items() if name not in _KEYS}
    why, name = entry.get("why", ""), entry["id"]
    reasons = [reason for reason, ids in listed.items() if any(fnmatchcase(name, wanted) for wanted in ids)]
    return PublishedRow(
        name,
        entry["what"],
        entry["where"],
        entry["unit"],
        values,
        tolerance_of(entry["unit"], entry.get("points"), entry.get("judge")),
        entry.get("scored", True),
        entry.get("use") == "cal",
        why if isinstance(why, dict) else dict.fromkeys((*MODELS, BOTH, *values), why),
        reasons[0] if reasons else "",
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
