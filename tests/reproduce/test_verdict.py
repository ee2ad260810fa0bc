"""Judging a number of ours by the published one."""

from __future__ import annotations

import pytest

from meshweave.reproduce.meshslice.agreement import picks_best, summary
from meshweave.reproduce.verdict import JudgedRow, Tolerance, count_verdicts


def row(
    published: float | None,
    ours: float | None,
    unit: str = "x",
    tolerance: Tolerance | None = None,
    scored: bool = True,
) -> JudgedRow:
    given = tolerance or Tolerance()
    return JudgedRow(
        "id", "what", "where", "both", unit, published, ours, given, scored, why="because", reason="none"
    )


@pytest.mark.parametrize(
    ("published", "ours", "unit", "tolerance", "verdict"),
    [
        (100, 103, "x", Tolerance(), "holds"),
        (100, 96.9, "x", Tolerance(), "near"),
        (100, 110.1, "x", Tolerance(), "differs"),
        (67.4, 64.4, "%", Tolerance(0.03, "points"), "holds"),
        (67.4, 64.3, "%", Tolerance(0.03, "points"), "near"),
        (67.4, 57.3, "% faster", Tolerance(0.03, "points"), "differs"),
        (1.3, 1.5, "%", Tolerance(), "differs"),
        (13.8, 19.8, "% faster", Tolerance(0.06, "points"), "holds"),
        (13.8, 19.9, "% faster", Tolerance(0.06, "points"), "near"),
        (0, 0, "cases", Tolerance(0, "exact"), "holds"),
        (0, 1, "cases", Tolerance(0, "exact"), "differs"),
        (5, 1.2, "%", Tolerance(0, "goal"), "holds"),
        (5, 5.1, "%", Tolerance(0, "goal"), "differs"),
    ],
)
def test_verdicts(published: float, ours: float, unit: str, tolerance: Tolerance, verdict: str) -> None:
    assert row(published, ours, unit, tolerance).verdict == verdict


def test_rows_without_a_verdict() -> None:
    assert row(1, None).verdict == "not reproduced" and row(1, None).remark == "none"
    assert row(None, 1).verdict == "ours alone"
    assert row(10, 9, scored=False).verdict == "ours alone"


def test_why_is_shown_only_where_a_row_does_not_hold() -> None:
    assert row(100, 100).remark == ""
    assert row(100, 200).remark == "because"


def test_counts_are_in_the_order_of_merit() -> None:
    assert list(count_verdicts([row(1, 9), row(1, 1), row(1, 1)]).items()) == [("holds", 2), ("differs", 1)]


def test_what_an_estimate_picks() -> None:
    assert picks_best({(4, 4): (1.0, 2.0), (2, 8): (1.5, 2.5)}) == (True, "")
    is_best, loss = picks_best({(4, 4): (1.0, 3.0), (2, 8): (1.5, 2.0)})
    assert not is_best and loss == "4x4 is picked, 2x8 is 50.0 % faster"


def test_errors_by_algorithm() -> None:
    mean, text = summary({"wang": [1.0, 3.0], "fsdp": [8.0]})
    assert mean == 4.0
    assert text == "3 products: wang 2.0 % (worst 3.0 %), fsdp 8.0 % (worst 8.0 %)"
