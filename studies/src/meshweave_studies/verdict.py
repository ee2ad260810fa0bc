"""A published number beside ours, the verdict, and whether the row counts: one rule for every paper.

A row counts once for each number or statement that a paper prints and that ours could miss. All other rows are
listed with a reason (`LISTED`) and stand beside the counts: what follows from definitions, the same number read
once more, what cannot fail, goals of our own, and what constants were fitted on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

HOLDS, NEAR, DIFFERS, ALONE, MISSING = "holds", "near", "differs", "ours alone", "not reproduced"
Kind = Literal["share", "points", "gain", "goal", "exact", "least", "more"]
NEAR_AMOUNT = 0.1
"""What still counts as near: 10 % of the number, or 10 points of a percentage that is judged in points."""
GAIN_AMOUNT, NEAR_GAIN = 0.25, 0.5
"""A gain holds within a quarter of itself, and is near within half of itself."""
GAIN_UNITS = ("% faster", "% longer", "% lost")
"""Units of gains and losses: differences of two times or rates, which are judged by their own size."""
Listed = Literal["", "identity", "read again", "follows", "cannot fail", "one side", "our goal", "fitted"]
LISTED: dict[Listed, str] = {
    "identity": "by definition or by an equation of the paper",
    "read again": "another reading of a number that counts elsewhere",
    "follows": "arithmetic of rows that count",
    "cannot fail": "true by construction here",
    "one side": "the text has no number, and nearly any constants give the sign",
    "our goal": "not published",
    "fitted": "constants were fitted on it",
}
"""Why a row is listed and does not count."""


@dataclass(frozen=True)
class Tolerance:
    """By how much ours may differ from the published number and still hold.

    `amount` is a share of the published number, or, in `points`, of the 100 % that a percentage is of. A `gain` is
    judged by its own size (`GAIN_AMOUNT`). A `goal` is met by all that is at most as large; `least` by all that is
    at least as large, and `more` by what is larger by 0.01 at least, so that equals are no lead; `exact` allows
    nothing.
    """

    amount: float = 0.03
    kind: Kind = "share"

    def judge(self, published: float, ours: float) -> str:
        """Return the verdict on our value: HOLDS, NEAR or DIFFERS."""
        if self.kind == "goal":
            return HOLDS if ours <= published else DIFFERS
        if self.kind in ("least", "more"):
            needed = published + (0.01 if self.kind == "more" else 0.0)
            return HOLDS if ours >= needed else DIFFERS
        if self.kind == "exact":
            return HOLDS if ours == published else DIFFERS
        if self.kind == "gain":
            gap = round(abs(ours - published), 12)
            size = abs(published)
            return HOLDS if gap <= self.amount * size else NEAR if gap <= NEAR_GAIN * size else DIFFERS
        gap = abs(ours - published) / (100 if self.kind == "points" else abs(published))
        gap = round(gap, 12)  # 57.6 - 55.6 is no more than 2 points
        return HOLDS if gap <= self.amount else NEAR if gap <= NEAR_AMOUNT else DIFFERS


def tolerance_of(unit: str, points: float | None, judge: Kind | None) -> Tolerance:
    """Return the tolerance of a row: of kind `judge`, else as a gain if its unit is one, else within so many
    percentage points, or 3 % of the number if `points` is None.
    """
    if judge is not None:
        return Tolerance(GAIN_AMOUNT if judge == "gain" else 0.0, judge)
    if unit in GAIN_UNITS:
        return Tolerance(GAIN_AMOUNT, "gain")
    return Tolerance() if points is None else Tolerance(points / 100, "points")


@dataclass(frozen=True)
class OurValue:
    """Our value, what it is made of in words, or the reason why it is None."""

    value: float | None
    detail: str = ""
    reason: str = ""


@dataclass(frozen=True)
class JudgedRow:
    """One published number beside ours.

    `ours` is None where we have none, and `reason` says why. `why` says in a few words what a difference comes
    from; `detail` what ours is made of. A number that is not `scored` stands beside ours without a verdict; one
    that is `listed` has a verdict and does not count.
    """

    id: str
    what: str
    where: str
    model: str
    unit: str
    published: float | None
    ours: float | None
    tolerance: Tolerance = Tolerance()
    scored: bool = True
    fitted: bool = False
    why: str = ""
    detail: str = ""
    reason: str = ""
    listed: Listed = ""

    @property
    def counts(self) -> bool:
        """Return whether the verdict is counted: the row holds, is near or differs, and is not only listed."""
        return not self.listed and self.verdict in (HOLDS, NEAR, DIFFERS)

    @property
    def verdict(self) -> str:
        """MISSING without our value, ALONE without a published one or where not `scored`; else the judgement of
        `tolerance`: HOLDS, NEAR or DIFFERS.
        """
        if self.ours is None:
            return MISSING
        if self.published is None or not self.scored:
            return ALONE
        return self.tolerance.judge(self.published, self.ours)

    @property
    def remark(self) -> str:
        """Why there is no number of ours; else why it differs, what it is made of, and why it is listed."""
        if self.ours is None:
            return self.reason
        parts = [
            self.why if self.verdict != HOLDS else "",
            self.detail,
            f"listed: {LISTED[self.listed]}" if self.listed else "",
        ]
        return "; ".join(part for part in parts if part)

    def to_json(self) -> dict[str, Any]:
        """Return the row as plain values, with its verdict."""
        return {
            "id": self.id,
            "model": self.model,
            "what": self.what,
            "where": self.where,
            "unit": self.unit,
            "published": self.published,
            "ours": self.ours,
            "verdict": self.verdict,
            "fitted": self.fitted,
            "counts": self.counts,
            "listed": self.listed,
            "why": self.why,
            "detail": self.detail,
            "reason": self.reason,
        }


def count_verdicts(rows: Sequence[JudgedRow]) -> dict[str, int]:
    """Return how many rows that count have each verdict, in the order of `HOLDS`, `NEAR` and `DIFFERS`.

    What is listed follows as `listed`, and rows without a verdict as `ALONE` and `MISSING`; zeros are left out.
    """
    counts = {
        verdict: sum(row.counts and row.verdict == verdict for row in rows)
        for verdict in (HOLDS, NEAR, DIFFERS)
    }
    counts["listed"] = sum(bool(row.listed) and row.verdict in counts for row in rows)
    for verdict in (ALONE, MISSING):
        counts[verdict] = sum(row.verdict == verdict for row in rows)
    return {verdict: count for verdict, count in counts.items() if count}


def percent_faster(slow_s: float, fast_s: float) -> float:
    """Return by how many percent what takes `fast_s` seconds is faster than what takes `slow_s`."""
    return 100 * (slow_s / fast_s - 1)
