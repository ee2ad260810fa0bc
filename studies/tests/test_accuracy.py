"""The page of a release says the saved scores, and a drift of more than a point is told from others."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from sampling import examples

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "validation"))

import accuracy  # noqa: E402


def test_the_page_is_that_of_the_saved_scores() -> None:
    saved = json.loads(accuracy.SAVED.read_text())
    assert accuracy.PAGE.read_text() == accuracy.page(saved, saved)
    kinds = {name.split(":")[0] for name in saved}
    assert kinds == {*accuracy.VERBS, "lab"}


@examples(50)
@given(
    st.dictionaries(st.sampled_from("abcd"), st.integers(0, 5000), min_size=1),
    st.sampled_from("abcd"),
    st.data(),
)
def test_a_median_that_got_worse_by_more_than_a_point_is_named(before, name, data) -> None:
    old = {group: {"median": value / 10000} for group, value in before.items()}
    new = {group: dict(score) for group, score in old.items()}
    moved = data.draw(st.integers(0, 5000))
    new[name] = {"median": moved / 10000}
    medians, rows, others = accuracy.drifts(old, new)
    assert not rows and others == ([] if name in old else [name])
    worse = [drift.name for drift in medians if drift.is_worse]
    assert worse == ([name] if name in old and moved > before[name] + 100 else [])
    assert [drift.name for drift in medians] == ([name] if name in old and moved != before[name] else [])
