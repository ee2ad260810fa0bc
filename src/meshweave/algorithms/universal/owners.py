"""Who holds which part of a matrix, and where in its memory: the index arithmetic that slicing rests on.

In every layout the rows that a rank holds follow from some of its coordinates and the columns from others. So the
indices of each dim fall into *classes*, each the index list of some ranks, and a rank holds one class of
rows times one class of columns, of one term where the matrix is a sum of partial ones. An index has one class
and one place in it, whatever the tile shape, the process grid and the offset were.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

from meshweave.describe.layout import Intervals, Layout, Partial, chunk_bounds

BlockKey = tuple[int, int, int]
"""(row class, column class, term)."""


@dataclass(frozen=True, slots=True)
class ClassSegment:
    """`size` indices in a row, of one class: from `local` on in a holder's memory, from `at` on in the list
    that was cut, from `start` on in the whole matrix."""

    index_class: int
    local_start: int
    list_start: int
    size: int
    global_start: int


class DimTable:
    """The classes of one dim: for any index its class and its place in the memory of those who hold that class,
    where the class begins at `offsets`."""

    def __init__(self, classes: Sequence[Intervals], offsets: Sequence[int] | None = None) -> None:
        self.classes = tuple(classes)
        self.offsets = tuple(offsets) if offsets is not None else (0,) * len(self.classes)
        rows = []
        for number, intervals in enumerate(classes):
            local = self.offsets[number]
            for start, stop in intervals:
                rows.append((start, stop, number, local))
                local += stop - start
        rows.sort()
        self.segments = rows
        self._starts = [row[0] for row in rows]

    def size(self, number: int) -> int:
        return sum(stop - start for start, stop in self.classes[number])

    def split(self, intervals: Iterable[tuple[int, int]]) -> list[ClassSegment]:
        """A list of indices cut where class or memory changes; neighbours that continue each other are one
        piece."""
        out: list[ClassSegment] = []
        at = 0
        for start, stop in intervals:
            place = bisect_right(self._starts, start) - 1
            while start < stop:
                lo, hi, number, local = self.segments[place]
                size = min(stop, hi) - start
                _extend(out, ClassSegment(number, local + start - lo, at, size, start))
                start, at, place = start + size, at + size, place + 1
        return out


def _extend(pieces: list[ClassSegment], new: ClassSegment) -> None:
    if pieces:
        last = pieces[-1]
        if last.index_class == new.index_class and last.local_start + last.size == new.local_start and last.list_start + last.size == new.list_start:
            pieces[-1] = ClassSegment(last.index_class, last.local_start, last.list_start, last.size + new.size, last.global_start)
            return
    pieces.append(new)


@dataclass(frozen=True)
class OwnerMap:
    """`rows` and `columns` are the classes of the dims; `of` says which block each rank holds."""

    rows: DimTable
    columns: DimTable
    block_of: Mapping[int, BlockKey]
    num_terms: int

    @property
    def dims(self) -> tuple[DimTable, DimTable]:
        return self.rows, self.columns

    @cached_property
    def holders(self) -> Mapping[BlockKey, tuple[int, ...]]:
        """The ranks that hold each block, ascending."""
        found: dict[BlockKey, list[int]] = defaultdict(list)
        for rank in sorted(self.block_of):
            found[self.block_of[rank]].append(rank)
        return {block: tuple(ranks) for block, ranks in found.items()}

    def shape(self, rank: int) -> tuple[int, int]:
        """Rows and columns that a rank holds."""
        row, column, _ = self.block_of[rank]
        return self.rows.size(row), self.columns.size(column)


@lru_cache(maxsize=4096)
def owners(layout: Layout, shape: tuple[int, int]) -> OwnerMap:
    """Who holds what of a matrix of global `shape` in a layout."""
    numbers: tuple[dict[Intervals, int], dict[Intervals, int]] = ({}, {})
    axes = [axis for axis, placement in enumerate(layout.placements) if isinstance(placement, Partial)]
    of: dict[int, BlockKey] = {}
    for rank in sorted(layout.mesh.ranks):
        rows, columns = layout.intervals(shape, rank)
        coords = layout.mesh.coords(rank)
        term = 0
        for axis in axes:
            term = term * layout.mesh.shape[axis] + coords[axis]
        of[rank] = (
            numbers[0].setdefault(rows, len(numbers[0])),
            numbers[1].setdefault(columns, len(numbers[1])),
            term,
        )
    num_terms = 1
    for axis in axes:
        num_terms *= layout.mesh.shape[axis]
    return OwnerMap(DimTable(tuple(numbers[0])), DimTable(tuple(numbers[1])), of, num_terms)


def split_among_replicas(whole: OwnerMap, dim: int, group_of: Mapping[int, int]) -> OwnerMap:
    """The same matrix where each block that several ranks of a group hold is dealt out among them along `dim`,
    so that every element of a term has one owner per group; places still count in the memory of the whole
    block."""
    replica: dict[int, int] = {}
    count: dict[int, int] = defaultdict(lambda: 1)
    for block, ranks in whole.holders.items():
        if not (whole.rows.size(block[0]) and whole.columns.size(block[1])):
            replica.update(dict.fromkeys(ranks, 0))
            continue
        for group in sorted({group_of[rank] for rank in ranks}):
            members = [rank for rank in ranks if group_of[rank] == group]
            count[block[dim]] = max(count[block[dim]], len(members))
            replica.update((rank, index) for index, rank in enumerate(members))
    table = whole.dims[dim]
    classes: list[Intervals] = []
    offsets: list[int] = []
    first: dict[int, int] = {}
    for number, intervals in enumerate(table.classes):
        first[number] = len(classes)
        size = table.size(number)
        for part in range(count[number]):
            lo, hi = chunk_bounds(size, count[number], part)
            classes.append(_positions(intervals, lo, hi))
            offsets.append(lo)
    dealt = DimTable(classes, offsets)
    of: dict[int, BlockKey] = {}
    for rank, block in whole.block_of.items():
        number = first[block[dim]] + replica[rank]
        of[rank] = (number, block[1], block[2]) if dim == 0 else (block[0], number, block[2])
    rows, columns = (dealt, whole.columns) if dim == 0 else (whole.rows, dealt)
    return OwnerMap(rows, columns, of, whole.num_terms)


def _positions(intervals: Intervals, lo: int, hi: int) -> Intervals:
    """Positions [lo, hi) of an index list."""
    out, position = [], 0
    for start, stop in intervals:
        first, last = max(lo, position), min(hi, position + stop - start)
        if first < last:
            out.append((start + first - position, start + last - position))
        position += stop - start
    return tuple(out)


ClassPair = tuple[int, int]
"""Classes of one index in two matrices."""


@dataclass(frozen=True, slots=True)
class CommonRun:
    """`size` indices in a row in both of two matrices: `left` and `right` are the places in their holders'
    memory."""

    left_start: int
    right_start: int
    size: int

    def split(self, size: int) -> tuple[CommonRun, CommonRun]:
        return CommonRun(self.left_start, self.right_start, size), CommonRun(self.left_start + size, self.right_start + size, self.size - size)


def common_runs(left: DimTable, right: DimTable, total: int) -> dict[ClassPair, tuple[CommonRun, ...]]:
    """All indices of a dim by their classes in two matrices, as runs that lie together in both memories.

    The order in which a sum runs over them is free: sorted by class, a block-cyclic dim falls into as few runs
    as a block one, wherever the two matrices are cut alike.
    """
    cuts = sorted({0, total, *(row[0] for row in left.segments), *(row[0] for row in right.segments)})
    found: dict[ClassPair, list[CommonRun]] = defaultdict(list)
    for start, stop in pairwise(cuts):
        (mine,), (theirs,) = left.split([(start, stop)]), right.split([(start, stop)])
        runs = found[mine.index_class, theirs.index_class]
        if runs:
            last = runs[-1]
            if last.left_start + last.size == mine.local_start and last.right_start + last.size == theirs.local_start:
                runs[-1] = CommonRun(last.left_start, last.right_start, last.size + stop - start)
                continue
        runs.append(CommonRun(mine.local_start, theirs.local_start, stop - start))
    return {pair: tuple(found[pair]) for pair in sorted(found)}


def nearest_holder(ranks: Sequence[int], me: int, position: Callable[[int], int], count: int) -> int:
    """The holder to take a block from: this rank, or the next one behind it, so that requests spread."""
    return min(ranks, key=lambda rank: (position(rank) - position(me)) % count)
