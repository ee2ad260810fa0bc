"""Judging a number of ours by the published one."""

from __future__ import annotations

from collections import Counter
from fnmatch import fnmatchcase

import pytest

from meshweave_studies.meshslice.agreement import picks_best, summary
from meshweave_studies.meshslice.readings import READINGS
from meshweave_studies.papers import FIGURES
from meshweave_studies.published import listed_patterns, published_rows
from meshweave_studies.verdict import (
    LISTED,
    JudgedRow,
    Listed,
    OurValue,
    Tolerance,
    count_verdicts,
    tolerance_of,
)


def row(
    published: float | None,
    ours: float | None,
    unit: str = "x",
    tolerance: Tolerance | None = None,
    scored: bool = True,
    listed: Listed = "",
) -> JudgedRow:
    given = tolerance or Tolerance()
    return JudgedRow(
        "id",
        "what",
        "where",
        "both",
        unit,
        published,
        ours,
        given,
        scored,
        why="because",
        reason="none",
        listed=listed,
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
        (12.0, 15.0, "% faster", tolerance_of("% faster", None, None), "holds"),
        (12.0, 18.0, "% faster", tolerance_of("% faster", 6, None), "near"),
        (12.0, 18.1, "% faster", tolerance_of("% faster", 6, None), "differs"),
        (-4.0, -3.0, "% longer", tolerance_of("% longer", None, None), "holds"),
        (0.0, 0.1, "% faster", tolerance_of("% faster", None, None), "differs"),
        (0.0, 0.1, "% faster", tolerance_of("% faster", None, "more"), "holds"),
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


def test_listed_rows_have_a_verdict_and_do_not_count() -> None:
    rows = [
        row(1, 1),
        row(1, 1, listed="identity"),
        row(1, 9, listed="read again"),
        row(1, None, listed="follows"),
    ]
    assert count_verdicts(rows) == {"holds": 1, "listed": 2, "not reproduced": 1}
    assert [r.counts for r in rows] == [True, False, False, False]
    assert rows[1].remark == f"listed: {LISTED['identity']}" and rows[1].verdict == "holds"


@pytest.mark.parametrize("paper", FIGURES)
def test_what_is_listed_is_there_and_has_a_reason(paper: str) -> None:
    entries = published_rows(paper)
    names = [entry.id for entry in entries]
    names += [f"{entry.id} of {subject}" for entry in entries for subject in entry.models]
    names += [f"{entry.id} by {reading}" for entry in entries for reading in READINGS]
    for reason, patterns in listed_patterns(paper).items():
        assert reason in LISTED
        for pattern in patterns:
            assert any(fnmatchcase(name, pattern) for name in names), pattern
    assert any(not entry.listed(subject) for entry in entries for subject in entry.models)


def test_a_row_is_listed_for_a_subject_or_under_a_reading() -> None:
    entry = next(entry for entry in published_rows("meshslice") if entry.id == "real_wang")
    assert entry.listed("gpt3") == "" and entry.listed("gpt3", "public-defaults") == ""
    assert entry.beside("gpt3", OurValue(47.0), reading="fixed-batch").listed == "fitted"
    entry = next(entry for entry in published_rows("atp") if entry.id == "atp2_falls")
    assert entry.listed("ic5") == entry.listed("ic6") == "identity"
    entry = next(entry for entry in published_rows("atp") if entry.id == "optimum_falls")
    assert entry.listed("ic5") == "" and entry.listed("ic6") == "read again"


@pytest.mark.parametrize("paper", FIGURES)
def test_every_gain_is_judged_by_its_own_size(paper: str) -> None:
    for entry in published_rows(paper):
        if entry.unit == "% faster" and entry.tolerance.kind not in ("least", "more", "goal", "exact"):
            assert entry.tolerance == Tolerance(0.25, "gain"), entry.id


OUR_LIMITS = frozenset(
    {"meshslice_communication", "wang_communication", "strong_over_collective", "strong_over_wang"}
)
"""Rows of words such as "similar", whose limits are ours and alike."""
PRINTED_TWICE = {("atp", "table 3", "ic1-m4", 10.7)}
"""Numbers that a table prints in two places."""


@pytest.mark.parametrize("paper", FIGURES)
def test_a_printed_number_counts_once(paper: str) -> None:
    counted: Counter[tuple[str, str, str, float]] = Counter()
    for entry in published_rows(paper):
        if (
            entry.scored
            and entry.id not in OUR_LIMITS
            and entry.tolerance.kind in ("share", "points", "gain")
        ):
            of = {subject: value for subject, value in entry.values.items() if not entry.listed(subject)}
            counted.update(
                (paper, entry.where.split(";")[0], subject, value) for subject, value in of.items()
            )
    twice = {number for number, times in counted.items() if times > 1}
    assert twice <= PRINTED_TWICE


@pytest.mark.parametrize("paper", FIGURES)
def test_a_reading_with_rows_of_its_own_counts_once(paper: str) -> None:
    entries = {entry.id: entry for entry in published_rows(paper)}
    for name, entry in entries.items():
        base = next((entries[short] for short in entries if name.startswith(f"{short}_")), None)
        if base is None or base.where != entry.where:
            continue
        for subject, value in entry.values.items():
            if base.values.get(subject) == value and entry.tolerance.kind not in ("least", "more", "goal"):
                assert base.listed(subject) or entry.listed(subject) or not entry.scored, (name, subject)


def test_one_machine_read_in_two_counts_once() -> None:
    for entry in published_rows("atp"):
        for subject in entry.models:
            if subject.startswith("ic4-flat") and subject.replace("-flat", "") in entry.models:
                assert entry.listed(subject), (entry.id, subject)


def test_what_an_estimate_picks() -> None:
    assert picks_best({(4, 4): (1.0, 2.0), (2, 8): (1.5, 2.5)}) == (True, "")
    is_best, loss = picks_best({(4, 4): (1.0, 3.0), (2, 8): (1.5, 2.0)})
    assert not is_best and loss == "4x4 is picked, 2x8 is 50.0 % faster"


def test_errors_by_algorithm() -> None:
    mean, text = summary({"wang": [1.0, 3.0], "fsdp": [8.0]})
    assert mean == 4.0
    assert text == "3 products: wang 2.0 % (worst 3.0 %), fsdp 8.0 % (worst 8.0 %)"
