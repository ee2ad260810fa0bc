"""The index arithmetic of slicing: which rank holds which part of a matrix, and where in its memory.

In every layout the rows that a rank holds follow from some of its mesh coordinates, and the columns from others.
So the indices of each dim fall into *classes*. A class is the list of indices of some ranks, and a rank holds one
class of rows times one class of columns. Where the matrix is partial, the rank holds that block of one *term* of
the sum. Every index has one class and one place in it, whatever the tile shape, the process grid and the offset
are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

from meshweave.describe.layout import Intervals, Layout, Partial, chunk_bounds
from meshweave.describe.layout.intervals import indices_at, num_indices

BlockKey = tuple[int, int, int]
"""(row class, column class, term)."""


@dataclass(frozen=True, slots=True)
class ClassSegment:
    """A piece of a list of indices: neighbours in the list that also lie together in the memory of their holders.

    Attributes:
        index_class: number of the class that the indices belong to (`DimTable`).
        local_start: position of the first index in the shard of a rank that holds the class.
        list_start: position of the first index in the list that was cut.
        size: how many indices.
        global_start: the first index, in the whole matrix.
    """

    index_class: int
    local_start: int
    list_start: int
    size: int
    global_start: int


class DimTable:
    """The classes of one dim (rows or columns) of a matrix; each index is in exactly one class.

    A class is the set of indices that some ranks hold: with 8 rows sharded over 2 ranks, class 0 is rows 0 to 3
    and class 1 rows 4 to 7. Index lists are tuples of intervals [start, stop).

    Attributes:
        classes: the index list of each class.
        offsets: position, in the shard of the ranks that hold a class, of the first index of the class.
        segments: (start, stop, class, position of `start` in the shard) of every interval, by start.
    """

    def __init__(self, classes: Sequence[Intervals], offsets: Sequence[int] | None = None) -> None:
        self.classes = tuple(classes)
        self.offsets = tuple(offsets) if offsets is not None else (0,) * len(self.classes)
        segments = []
        for number, intervals in enumerate(classes):
            local = self.offsets[number]
            for start, stop in intervals:
                segments.append((start, stop, number, local))
                local += stop - start
        segments.sort()
        self.segments = segments
        self._starts = [segment[0] for segment in segments]

    def size(self, number: int) -> int:
        """Return how many indices class `number` has."""
        return num_indices(self.classes[number])

    def split(self, intervals: Iterable[tuple[int, int]]) -> list[ClassSegment]:
        """Return the indices of `intervals` in pieces of one class that lie together in its holders' memory.

        `intervals` are [start, stop) each, of global indices.
        """
        out: list[ClassSegment] = []
        list_start = 0
        for start, stop in intervals:
            place = bisect_right(self._starts, start) - 1
            while start < stop:
                lo, hi, number, local = self.segments[place]
                size = min(stop, hi) - start
                _extend(out, ClassSegment(number, local + start - lo, list_start, size, start))
                start, list_start, place = start + size, list_start + size, place + 1
        return out


def _extend(segments: list[ClassSegment], new: ClassSegment) -> None:
    """Append a segment, or lengthen the last one where the two lie together."""
    if segments:
        last = segments[-1]
        if (
            last.index_class == new.index_class
            and last.local_start + last.size == new.local_start
            and last.list_start + last.size == new.list_start
        ):
            segments[-1] = ClassSegment(
                last.index_class, last.local_start, last.list_start, last.size + new.size, last.global_start
            )
            return
    segments.append(new)


@dataclass(frozen=True)
class OwnerMap:
    """The block of a matrix that each rank holds: one class of rows times one class of columns (`DimTable`).

    A partial matrix is the sum of `num_terms` terms, and a rank holds a block of one term.

    Attributes:
        rows, columns: the classes of the two dims.
        block_of: for each global rank its block, as (row class, column class, term).
        num_terms: how many terms a partial matrix has; 1 if it is not partial.
    """

    rows: DimTable
    columns: DimTable
    block_of: Mapping[int, BlockKey]
    num_terms: int

    @property
    def dims(self) -> tuple[DimTable, DimTable]:
        """Return (`rows`, `columns`), the tables of row classes and of column classes."""
        return self.rows, self.columns

    @cached_property
    def holders(self) -> Mapping[BlockKey, tuple[int, ...]]:
        """Return the global ranks that hold each block, ascending, by (row class, column class, term)."""
        ranks_of: dict[BlockKey, list[int]] = defaultdict(list)
        for rank in sorted(self.block_of):
            ranks_of[self.block_of[rank]].append(rank)
        return {block: tuple(ranks) for block, ranks in ranks_of.items()}

    def shape(self, rank: int) -> tuple[int, int]:
        """Return (number of rows, number of columns) that a global rank holds."""
        row, column, _ = self.block_of[rank]
        return self.rows.size(row), self.columns.size(column)


@lru_cache(maxsize=1024)
def owners(layout: Layout, shape: tuple[int, int]) -> OwnerMap:
    """Return which block each rank holds of a matrix of global `shape` (rows, columns) in a layout."""
    numbers: tuple[dict[Intervals, int], dict[Intervals, int]] = ({}, {})
    partial_axes = [
        axis for axis, placement in enumerate(layout.placements) if isinstance(placement, Partial)
    ]
    block_of: dict[int, BlockKey] = {}
    for rank in sorted(layout.mesh.ranks):
        rows, columns = layout.intervals(shape, rank)
        coords = layout.mesh.coords(rank)
        term = 0
        for axis in partial_axes:
            term = term * layout.mesh.shape[axis] + coords[axis]
        block_of[rank] = (
            numbers[0].setdefault(rows, len(numbers[0])),
            numbers[1].setdefault(columns, len(numbers[1])),
            term,
        )
    num_terms = 1
    for axis in partial_axes:
        num_terms *= layout.mesh.shape[axis]
    return OwnerMap(DimTable(tuple(numbers[0])), DimTable(tuple(numbers[1])), block_of, num_terms)


def split_among_replicas(whole: OwnerMap, dim: int, group_of: Mapping[int, int]) -> OwnerMap:
    """Return owners of a matrix of which, within a group of ranks, no two own the same element of one term.

    A block that several ranks of a group hold (`whole`) is cut among them along `dim`. Positions in memory still
    count from the start of the block that they hold.

    Args:
        whole: the blocks that ranks hold, replicas included.
        dim: 0 to cut the rows of a block, 1 to cut its columns.
        group_of: for each global rank the number of its group.
    """
    replica_of, num_replicas = _replicas(whole, dim, group_of)
    table = whole.dims[dim]
    classes: list[Intervals] = []
    offsets: list[int] = []
    first_part: dict[int, int] = {}
    for number, intervals in enumerate(table.classes):
        first_part[number] = len(classes)
        size = table.size(number)
        for part in range(num_replicas[number]):
            lo, hi = chunk_bounds(size, num_replicas[number], part)
            classes.append(indices_at(intervals, [(lo, hi)]))
            offsets.append(lo)
    parts = DimTable(classes, offsets)
    block_of: dict[int, BlockKey] = {}
    for rank, block in whole.block_of.items():
        number = first_part[block[dim]] + replica_of[rank]
        block_of[rank] = (number, block[1], block[2]) if dim == 0 else (block[0], number, block[2])
    rows, columns = (parts, whole.columns) if dim == 0 else (whole.rows, parts)
    return OwnerMap(rows, columns, block_of, whole.num_terms)


def _replicas(
    whole: OwnerMap, dim: int, group_of: Mapping[int, int]
) -> tuple[dict[int, int], dict[int, int]]:
    """Return for each rank its number among the holders of its block in its group, and for each class of `dim`
    into how many parts it is cut. Empty blocks are not cut."""
    replica_of: dict[int, int] = {}
    num_replicas: dict[int, int] = defaultdict(lambda: 1)
    for block, ranks in whole.holders.items():
        if not (whole.rows.size(block[0]) and whole.columns.size(block[1])):
            replica_of.update(dict.fromkeys(ranks, 0))
            continue
        for group in sorted({group_of[rank] for rank in ranks}):
            members = [rank for rank in ranks if group_of[rank] == group]
            num_replicas[block[dim]] = max(num_replicas[block[dim]], len(members))
            replica_of.update((rank, index) for index, rank in enumerate(members))
    return replica_of, num_replicas


ClassPair = tuple[int, int]
"""Classes of one index in two matrices."""


@dataclass(frozen=True, slots=True)
class CommonRun:
    """`size` indices that are consecutive in the memory of the holders of two matrices, where they begin at
    `left_start` and `right_start`."""

    left_start: int
    right_start: int
    size: int

    def split(self, size: int) -> tuple[CommonRun, CommonRun]:
        """Return two runs: one of the first `size` indices, and one of the rest."""
        return (
            CommonRun(self.left_start, self.right_start, size),
            CommonRun(self.left_start + size, self.right_start + size, self.size - size),
        )


def common_runs(left: DimTable, right: DimTable, total: int) -> dict[ClassPair, tuple[CommonRun, ...]]:
    """Return all indices 0 .. total - 1 of a dim that two matrices share as runs.

    The keys are (class in the left matrix, class in the right matrix). The indices of a run are consecutive in the
    shards of both matrices, though not always globally: they are sorted by class, so that a block-cyclic dim gives
    as few runs as a contiguous one if both matrices are cut alike.
    """
    edges = sorted({0, total, *(row[0] for row in left.segments), *(row[0] for row in right.segments)})
    runs_of: dict[ClassPair, list[CommonRun]] = defaultdict(list)
    for start, stop in pairwise(edges):
        (in_left,), (in_right,) = left.split([(start, stop)]), right.split([(start, stop)])
        runs = runs_of[in_left.index_class, in_right.index_class]
        if runs:
            last = runs[-1]
            if (
                last.left_start + last.size == in_left.local_start
                and last.right_start + last.size == in_right.local_start
            ):
                runs[-1] = CommonRun(last.left_start, last.right_start, last.size + stop - start)
                continue
        runs.append(CommonRun(in_left.local_start, in_right.local_start, stop - start))
    return {pair: tuple(runs_of[pair]) for pair in sorted(runs_of)}


def nearest_holder(ranks: Sequence[int], rank: int, position: Callable[[int], int], count: int) -> int:
    """Return the one of `ranks` from which `rank` takes a block that they all hold.

    It is `rank` itself if it is among them, else the next one after it in a cycle of `count` positions, so that
    different ranks prefer different holders. `position` maps a global rank to its position, from 0.
    """
    return min(ranks, key=lambda holder: (position(holder) - position(rank)) % count)
