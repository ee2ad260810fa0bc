"""Interval arithmetic against plain lists of indices."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshweave.describe.layout.intervals import (
    Interval,
    Intervals,
    blocked_intervals,
    chunk_bounds,
    common_runs,
    even_bounds,
    flattened_box,
    indices_at,
    merge_adjacent,
    num_common,
    num_indices,
    union,
)

spans = st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@st.composite
def index_lists(draw: st.DrawFn, most: int = 40) -> Intervals:
    """Ascending, disjoint, not empty; neighbours may touch."""
    bounds = sorted(draw(st.sets(st.integers(0, most), max_size=10)))
    pairs = list(itertools.pairwise(bounds))
    return tuple(pair for pair in pairs if draw(st.booleans()))


def indices(intervals: list[Interval] | Intervals) -> list[int]:
    return [index for start, stop in intervals for index in range(start, stop)]


@given(st.integers(0, 50), st.integers(1, 9))
def test_chunks_are_those_of_torch(size: int, parts: int) -> None:
    chunks = [range(*chunk_bounds(size, parts, index)) for index in range(parts)]
    expected = [part.tolist() for part in torch.arange(size).chunk(parts)] if size else []
    assert [list(chunk) for chunk in chunks if chunk] == expected
    assert [index for chunk in chunks for index in chunk] == list(range(size))


@given(st.integers(0, 50), st.integers(1, 9))
def test_even_cuts_differ_by_one_at_most(size: int, parts: int) -> None:
    cuts = even_bounds(size, parts)
    sizes = [stop - start for start, stop in itertools.pairwise(cuts)]
    assert (cuts[0], cuts[-1], len(sizes)) == (0, size, parts) and max(sizes) - min(sizes) <= 1


@given(st.integers(-10, 30), st.integers(0, 6), st.integers(1, 6), st.integers(0, 20), st.integers(0, 20))
def test_blocked(first: int, block: int, gap: int, start: int, size: int) -> None:
    stride, stop = block + gap, start + size
    expected = [index for index in range(start, stop) if (index - first) % stride < block]
    assert indices(blocked_intervals(first, block, stride, start, stop)) == expected


@given(st.lists(spans))
def test_joined_keeps_elements_and_order(intervals: list[Interval]) -> None:
    result = merge_adjacent(intervals)
    assert indices(result) == indices(intervals) and num_indices(result) == num_indices(intervals)
    assert all(start < stop for start, stop in result)
    assert all(before[1] != after[0] for before, after in itertools.pairwise(result))


@given(st.lists(spans))
def test_union_covers_each_index_once(intervals: list[Interval]) -> None:
    result = union(intervals)
    assert indices(result) == sorted(set(indices(intervals)))
    assert all(before[1] < after[0] for before, after in itertools.pairwise(result))


@given(index_lists(), index_lists())
def test_select_is_indexing(intervals: Intervals, positions: Intervals) -> None:
    listed = indices(intervals)
    assert indices(indices_at(intervals, positions)) == [
        listed[at] for at in indices(positions) if at < len(listed)
    ]


@given(index_lists(), index_lists())
def test_common_runs_are_the_intersection(left: Intervals, right: Intervals) -> None:
    mine, theirs = indices(left), indices(right)
    common: list[int] = []
    for at_left, at_right, size in common_runs(left, right):
        run = mine[at_left : at_left + size]
        assert size > 0 and run == theirs[at_right : at_right + size]
        common += run
    assert common == sorted(set(mine) & set(theirs))
    assert num_common(left, right) == len(common)


@given(st.lists(index_lists(5), max_size=3))
def test_flattened_is_ravel_multi_index(dims: list[Intervals]) -> None:
    sizes = [5] * len(dims)
    whole = np.arange(math.prod(sizes)).reshape(sizes)
    box = whole[np.ix_(*(np.array(indices(dim), int) for dim in dims))] if dims else whole
    assert indices(flattened_box(sizes, dims)) == box.ravel().tolist()


@pytest.mark.parametrize("dims", [[((0, 4),), ((0, 6),)], [((1, 3),), ((0, 6),)]])
def test_whole_rows_are_one_run(dims: list[Intervals]) -> None:
    ((start, stop),) = dims[0]
    assert flattened_box((4, 6), dims) == ((start * 6, stop * 6),)
