"""Arithmetic of half-open intervals `(start, stop)`: every index list of a tensor dim is a tuple of them.

Index lists are ascending and disjoint unless a function says otherwise. An *index* is global: it counts the
elements of the whole dim. A *position* is local: it counts the elements of one index list from its start.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

Interval = tuple[int, int]
"""A half-open range [start, stop)."""

Intervals = tuple[Interval, ...]
"""An index list: half-open [start, stop) ranges of global indices along one dim."""


def num_indices(intervals: Iterable[Interval]) -> int:
    """Return the number of indices in the intervals, each counted as often as it occurs."""
    return sum(stop - start for start, stop in intervals)


def chunk_bounds(size: int, parts: int, index: int) -> Interval:
    """Return [start, stop) of part `index` when `size` elements are cut into `parts` by torch.chunk's rule.

    Every part has ceil(size / parts) elements until they run out; the last ones may be shorter or empty.
    """
    each = -(-size // parts)
    return min(index * each, size), min((index + 1) * each, size)


def even_bounds(size: int, parts: int) -> list[int]:
    """Return the `parts` + 1 ascending bounds, from 0 to `size`, of parts that differ by one element at most."""
    return [size * number // parts for number in range(parts + 1)]


def blocked_intervals(first: int, block: int, stride: int, start: int, stop: int) -> list[Interval]:
    """Return the parts of [start, stop) in blocks [first + t stride, first + t stride + block), t any integer.

    The blocks at either end may be cut. Needs 0 <= block <= stride.
    """
    begin = first + (start - first) // stride * stride
    blocks = ((max(at, start), min(at + block, stop)) for at in range(begin, stop, stride))
    return [(lo, hi) for lo, hi in blocks if lo < hi]


def merge_adjacent(intervals: Iterable[Interval]) -> Intervals:
    """Return the intervals with empty ones dropped and each run of adjacent ones merged; the order stays."""
    out: list[Interval] = []
    for start, stop in intervals:
        if out and start < stop and out[-1][1] == start:
            out[-1] = out[-1][0], stop
        elif start < stop:
            out.append((start, stop))
    return tuple(out)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the ascending, disjoint intervals that cover what any of `intervals` (in any order) covers.

    Intervals that touch become one. An empty interval that touches no other stays.
    """
    out: list[Interval] = []
    for start, stop in sorted(intervals):
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(stop, out[-1][1])
        else:
            out.append((start, stop))
    return out


def indices_at(intervals: Sequence[Interval], positions: Iterable[Interval]) -> Intervals:
    """Return the indices at some positions of an index list: of (4, 8), (12, 16) at (2, 6) -> (6, 8), (12, 14).

    `positions` are ascending half-open ranges of positions.
    """
    out: list[Interval] = []
    at = position = 0  # intervals[at] starts at this position
    for lo, hi in positions:
        while at < len(intervals) and position < hi:
            start, stop = intervals[at]
            first, last = max(lo, position), min(hi, position + stop - start)
            if first < last:
                out.append((start + first - position, start + last - position))
            if position + stop - start > hi:
                break  # the next range may begin in this interval
            position += stop - start
            at += 1
    return tuple(out)


def common_runs(left: Sequence[Interval], right: Sequence[Interval]) -> Iterator[tuple[int, int, int]]:
    """Yield (position in left, position in right, length) of each run of indices that both lists have."""
    i = j = left_position = right_position = 0
    while i < len(left) and j < len(right):
        (left_start, left_stop), (right_start, right_stop) = left[i], right[j]
        start, stop = max(left_start, right_start), min(left_stop, right_stop)
        if start < stop:
            yield left_position + start - left_start, right_position + start - right_start, stop - start
        if left_stop <= right_stop:
            i, left_position = i + 1, left_position + left_stop - left_start
        else:
            j, right_position = j + 1, right_position + right_stop - right_start


def num_common(left: Sequence[Interval], right: Sequence[Interval]) -> int:
    """Return the number of indices that two index lists have in common."""
    count = i = j = 0
    while i < len(left) and j < len(right):
        start, stop = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        count += max(stop - start, 0)
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1
    return count


def flattened_box(sizes: Sequence[int], dims: Sequence[Intervals]) -> Intervals:
    """Return the row-major flat indices of the elements of a tensor of shape `sizes` whose indices are in `dims`.

    `dims` has an index list for each dim: rows (1, 2) and columns (0, 2) of shape (2, 4) -> (4, 6).
    """
    inner: Intervals = ((0, 1),)
    stride = 1
    for size, outer in zip(reversed(sizes), reversed(dims), strict=True):
        if inner == ((0, stride),):  # whole rows: a run of outer indices stays one run
            inner = merge_adjacent((start * stride, stop * stride) for start, stop in outer)
        else:
            rows = (row * stride for start, stop in outer for row in range(start, stop))
            inner = merge_adjacent((row + start, row + stop) for row in rows for start, stop in inner)
        stride *= size
    return inner
