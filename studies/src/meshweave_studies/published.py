"""The published numbers of a paper, from `published/PAPER.toml`, and which rows do not count (`listed.toml`)."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib.resources import files
from typing import Any, Generic, TypeVar

from meshweave.base.errors import UnsupportedError, require_known
from meshweave.base.progress import Progress, no_progress
from meshweave_studies.verdict import JudgedRow, Listed, OurValue, Tolerance, tolerance_of

MODELS = ("gpt3", "megatron-nlg")
BOTH = "both"
_KEYS = frozenset({"id", "what", "where", "unit", "use", "points", "judge", "scored", "why", "readings"})
"""Of an entry; every other key names what a value is of. A value is a number, or a quotient "a / b"."""


@dataclass(frozen=True)
class PublishedRow:
    """A row of the file.

    Attributes:
        what, where: what the paper states, in words, and its figure, table or section.
        values: the published number by subject: a model, or what else the paper looks at, or `both`. If it is
            empty, the row is computed for `MODELS`.
        scored: whether the row has a verdict.
        fitted: whether the row does not count where constants were fitted.
        why: by subject, what a difference comes from.
        patterns: by reason, those of rows that are listed and do not count.
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
    patterns: Mapping[Listed, Sequence[str]] = field(default_factory=dict)

    @property
    def models(self) -> tuple[str, ...]:
        """The subjects that the row is computed for: those of `values`, else `MODELS`."""
        return tuple(self.values) or MODELS

    def listed(self, subject: str, reading: str = "") -> Listed:
        """Return why this row is listed and does not count in the score, for a subject and a reading of the paper.

        It is "" where the row counts.

        A pattern of `listed.toml` is that of an id, of "ID of SUBJECT" or of "ID by READING".
        """
        names = (self.id, f"{self.id} of {subject}", f"{self.id} by {reading}")
        for reason, patterns in self.patterns.items():
            if any(fnmatchcase(name, pattern) for name in names for pattern in patterns):
                return reason
        return ""

    def beside(self, subject: str, ours: OurValue, fits: bool = True, reading: str = "") -> JudgedRow:
        """Return the row of one of `models`, our value beside the published one.

        Args:
            fits: whether constants were fitted for ours, so that rows for fits (`fitted`) do not count.
            reading: the reading of the paper by which it is ours.
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
            "fitted" if self.fitted and fits else self.listed(subject, reading),
        )


def published_rows(paper: str) -> tuple[PublishedRow, ...]:
    """Return all rows of a paper, in the order of the file."""
    listed = listed_patterns(paper)
    return tuple(_row(entry, listed) for whole in _load(paper)["row"] for entry in _readings(whole))


def listed_patterns(paper: str) -> dict[Listed, list[str]]:
    """Return the patterns of rows that are listed and do not count, by reason; `*` stands for any text."""
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
    why = entry.get("why", "")
    return PublishedRow(
        entry["id"],
        entry["what"],
        entry["where"],
        entry["unit"],
        values,
        tolerance_of(entry["unit"], entry.get("points"), entry.get("judge")),
        entry.get("scored", True),
        entry.get("use") == "cal",
        why if isinstance(why, dict) else dict.fromkeys((*MODELS, BOTH, *values), why),
        listed,
    )


def select_rows(rows: Sequence[PublishedRow], ids: Sequence[str]) -> tuple[PublishedRow, ...]:
    """Return the rows with these ids, or all if none is named. Raises UnsupportedError for an unknown id."""
    known = [row.id for row in rows]
    for name in ids:
        require_known(name, known, "there is no row", UnsupportedError, "rows:")
    return tuple(row for row in rows if not ids or row.id in ids)


@dataclass(frozen=True)
class NamedReading:
    """A choice for what a paper leaves open.

    Attributes:
        name: that by which it is chosen.
        title: the choice in a few words.
        rows: the rows that it is of; () for all. A reading of some rows has no figures.
    """

    name: str
    title: str
    rows: tuple[str, ...] = field(default=(), kw_only=True)

    def covers(self, row: str) -> bool:
        """Return whether the reading says anything about a row of the paper."""
        return not self.rows or row in self.rows


ReadingT = TypeVar("ReadingT", bound=NamedReading)
StudyT = TypeVar("StudyT")


def by_name(*readings: ReadingT) -> dict[str, ReadingT]:
    """Return readings by their names."""
    return {reading.name: reading for reading in readings}


def reading_named(readings: Mapping[str, ReadingT], name: str) -> ReadingT:
    """Return the reading of a paper that has this name. Raises UnsupportedError for an unknown one."""
    require_known(name, readings, "there is no reading", UnsupportedError, "readings:")
    return readings[name]


@dataclass(frozen=True)
class PaperRows(Generic[StudyT]):
    """The rows of a paper that are computed.

    Attributes:
        paper: the paper's short name, that of its file.
        ours: for each id of the file the function that computes it, from a study and what the row is of.
        reading: that of rows by default; None where the paper leaves nothing open.
        fits: whether constants were fitted, by default.
    """

    paper: str
    ours: Mapping[str, Callable[[StudyT, str], OurValue | float]]
    reading: NamedReading | None = None
    fits: bool = True

    def row(
        self, study: StudyT, entry: PublishedRow, subject: str, fits: bool | None = None, reading: str = ""
    ) -> JudgedRow:
        """Return row `entry`, computed for a subject by the reading of this name.

        `fits`: whether constants were fitted for it, by default `self.fits`.
        """
        value = self.ours[entry.id](study, subject)
        value = value if isinstance(value, OurValue) else OurValue(value)
        return entry.beside(subject, value, self.fits if fits is None else fits, reading)

    def __call__(
        self,
        study: StudyT,
        ids: Sequence[str] = (),
        progress: Progress = no_progress,
        reading: NamedReading | None = None,
        fits: bool | None = None,
    ) -> list[JudgedRow]:
        """Return the rows with these ids, or all that a reading covers, computed.

        Raises UnsupportedError for an unknown id, or one that the reading does not cover.
        """
        reading = reading or self.reading
        if reading is not None:
            for name in ids:
                if name in self.ours and not reading.covers(name):
                    raise UnsupportedError(
                        f"reading {reading.name} says nothing about row {name}; give another reading"
                    )
            ids = tuple(ids) or tuple(name for name in self.ours if reading.covers(name))
        entries = select_rows(published_rows(self.paper), ids)
        jobs = [(entry, subject) for entry in entries for subject in entry.models]
        out = []
        for number, (entry, subject) in enumerate(jobs):
            out.append(self.row(study, entry, subject, fits, reading.name if reading else ""))
            progress(number + 1, len(jobs))
        return out
