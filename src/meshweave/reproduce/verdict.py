"""A published number beside ours, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

HOLDS, NEAR, DIFFERS, ALONE, MISSING = "holds", "near", "differs", "ours alone", "not reproduced"
Kind = Literal["share", "points", "goal", "exact", "least", "more"]
NEAR_AMOUNT = 0.1
"""What still counts as near: 10 % of the number, or 10 points of a percentage that is judged in points."""


@dataclass(frozen=True)
class Tolerance:
    """By how much ours may differ from the published number and still hold.

    `amount` is a share of the published number, or, in `points`, of the 100 % that a percentage is of. A `goal` is
    met by all that is at most as large; `least` by all that is at least as large, and `more` by what is larger by
    0.01 at least, so that equals are no lead; `exact` allows nothing.
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
        gap = abs(ours - published) / (100 if self.kind == "points" else abs(published))
        gap = round(gap, 12)  # 57.6 - 55.6 is no more than 2 points
        return HOLDS if gap <= self.amount else NEAR if gap <= NEAR_AMOUNT else DIFFERS


@dataclass(frozen=True)
class OurValue:
    """Our value, what it is made of, or the reason why there is none."""

    value: float | None
    detail: str = ""
    reason: str = ""


@dataclass(frozen=True)
class JudgedRow:
    """One published number beside ours.

    `ours` is None where we have none, and `reason` says why. `why` says in a few words what a difference comes
    from; `detail` what ours is made of. A number that is not `scored` stands beside ours without a verdict.
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

    @property
    def verdict(self) -> str:
        """HOLDS, NEAR, DIFFERS, ALONE or MISSING."""
        if self.ours is None:
            return MISSING
        if self.published is None or not self.scored:
            return ALONE
        return self.tolerance.judge(self.published, self.ours)

    @property
    def remark(self) -> str:
        """Why there is no number of ours, or why it differs."""
        if self.ours is None:
            return self.reason
        parts = [
            self.why if self.verdict != HOLDS else "",
            self.detail,
            "a fit may use it" if self.fitted else "",
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
            "why": self.why,
            "detail": self.detail,
            "reason": self.reason,
        }


def count_verdicts(rows: Sequence[JudgedRow]) -> dict[str, int]:
    """Return how many rows have each verdict, in the order of `HOLDS`, `NEAR`, ..."""
    order = (HOLDS, NEAR, DIFFERS, ALONE, MISSING)
    counts = {verdict: sum(row.verdict == verdict for row in rows) for verdict in order}
    return {verdict: count for verdict, count in counts.items() if count}
