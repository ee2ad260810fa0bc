"""Views against brute force over sets of elements."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshweave.base.errors import ProgramError
from meshweave.ir.program.expressions import Var
from meshweave.ir.program.views import (
    Blocked,
    Range,
    Selector,
    View,
    selector_indices,
    selector_intervals,
    selectors_overlap,
    view,
)
from sampling import examples

SIZE = 30


@st.composite
def selectors(draw: st.DrawFn) -> Selector:
    start = draw(st.integers(0, SIZE))
    stop = draw(st.integers(start, SIZE))
    if draw(st.booleans()):
        return Range(start, stop)
    stride = draw(st.integers(1, 12))
    return Blocked(draw(st.integers(-25, 25)), draw(st.integers(0, stride)), stride, start, stop)


def elements(selector: Selector) -> set[int]:
    """By the definition of each selector, element by element."""
    inside = range(selector.start, selector.stop)  # type: ignore[arg-type]
    if isinstance(selector, Range):
        return set(inside)
    return {at for at in inside if (at - selector.first) % selector.stride < selector.block}  # type: ignore[operator]


@examples(100)
@given(selectors())
def test_size_intervals_and_indices(selector: Selector) -> None:
    chosen = elements(selector)
    assert selector.size == len(chosen)
    pieces = selector_intervals(selector)
    assert [at for lo, hi in pieces for at in range(lo, hi)] == sorted(chosen)
    assert all(lo < hi for lo, hi in pieces)
    assert selector_indices(selector).tolist() == sorted(chosen)


@examples(300)
@given(selectors(), selectors())
def test_overlap_is_exact(a: Selector, b: Selector) -> None:
    assert selectors_overlap(a, b) == bool(elements(a) & elements(b)) == selectors_overlap(b, a)


def boxes(selected: tuple[Selector, ...]) -> set[tuple[int, int]]:
    return {(i, j) for i in elements(selected[0]) for j in elements(selected[1])}


@examples(100)
@given(st.tuples(selectors(), selectors()), st.tuples(selectors(), selectors()))
def test_views_overlap_and_cover(a: tuple[Selector, ...], b: tuple[Selector, ...]) -> None:
    left, right = View("x", a), View("x", b)
    assert left.overlaps(right) == bool(boxes(a) & boxes(b))
    assert left.num_elements == len(boxes(a))
    if left.covers(right):
        assert boxes(a) >= boxes(b)
    assert left.covers(left)
    assert not left.overlaps(View("y", b)) and not left.overlaps(View("x", b, slot=1))
    assert not left.covers(View("y", a)) and not left.covers(View("x", a, slot=1))


@examples(100)
@given(selectors(), st.integers(0, 3))
def test_resolving_keeps_the_elements(selector: Selector, shift: int) -> None:
    """The same selector, written with a loop index, and one whose blocks fill their stride."""
    s = Var("s")
    if isinstance(selector, Range):
        start = selector.start - shift + s
        written: Selector = Range(start, selector.stop)
    else:
        written = Blocked(
            selector.first - shift + s, selector.block, selector.stride, selector.start, selector.stop
        )
    resolved = View("x", (written,)).resolve({"s": shift}, (SIZE,), 1)
    assert elements(resolved.selectors[0]) == elements(selector)
    if isinstance(selector, Blocked) and selector.block == selector.stride:
        assert isinstance(resolved.selectors[0], Range)


def test_whole_dims_by_default() -> None:
    whole = view("x", slice(2, 5), dims=3)
    assert str(whole) == "x[2:5, :, :]"
    assert whole.resolve({}, (6, 7, 8), 1).shape == (3, 7, 8)
    assert np.prod(whole.resolve({}, (6, 7, 8), 1).shape) == 168


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (view("x", slice(0, 5)), r"selects \[0, 5\) of a dim of size 4"),
        (view("x", slice(3, 2)), r"selects \[3, 2\)"),
        (view("x", Range(-1, 2)), r"selects \[-1, 2\)"),
        (view("x", dims=3), "has 3 dims, its buffer has 2"),
        (view("x", slot=2), "slot 2 of 2"),
        (view("x", Blocked(0, 1, 0)), "block 1 and stride 0"),
        (view("x", Blocked(0, -1, 3)), "block -1 and stride 3"),
    ],
)
def test_what_does_not_fit(wrong: View, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        wrong.resolve({}, (4, 4), 2)
