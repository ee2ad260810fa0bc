"""Unit tasks: what is sent as one, from any of the ranks that hold it to all that need it.

Where the shards of the source and those of the destination begin and end are the cut points of a tensor. Each
part between them is held by the ranks of one source shard and needed by those of one destination shard
(AlpaComm, MLSys '23, section 2.2). Parts with the same holders and the same needers are one unit task, also
those of several tensors: they cannot but take the same ways.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product

from meshweave.algorithms.reshard.problem import ReshardProblem
from meshweave.describe.layout import Intervals, Layout

At = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of one tensor: `shape` elements from position `src` of a source shard to `dst` of a destination
    shard."""

    item: int
    src: At
    dst: At
    shape: tuple[int, ...]
    num_bytes: int

    def part(self, start: At, shape: tuple[int, ...]) -> Piece:
        """The box of `shape` that begins `start` further on."""
        each = self.num_bytes // math.prod(self.shape)
        return Piece(
            self.item,
            tuple(a + b for a, b in zip(self.src, start, strict=True)),
            tuple(a + b for a, b in zip(self.dst, start, strict=True)),
            shape,
            each * math.prod(shape),
        )


@dataclass(frozen=True)
class UnitTask:
    """`pieces` lie on every rank of `holders` and are wanted by every rank of `needers`; a rank may be both."""

    holders: tuple[int, ...]
    needers: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces)


def unit_tasks(problem: ReshardProblem) -> tuple[UnitTask, ...]:
    """The unit tasks of a problem, source shard by source shard; those of no bytes are left out."""
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Piece]] = {}
    for number, item in enumerate(problem.items):
        for holders, needers, boxes in _overlaps(item.shape, item.src, item.dst):
            pieces = found.setdefault((holders, needers), [])
            for src, dst, shape in boxes:
                pieces.append(Piece(number, src, dst, shape, math.prod(shape) * item.element_bytes))
    return tuple(UnitTask(holders, needers, tuple(pieces)) for (holders, needers), pieces in found.items())


Box = tuple[At, At, tuple[int, ...]]
Overlap = tuple[tuple[int, ...], tuple[int, ...], tuple[Box, ...]]


@lru_cache(maxsize=1024)
def _overlaps(shape: tuple[int, ...], src: Layout, dst: Layout) -> tuple[Overlap, ...]:
    """(holders, needers, boxes) for each pair of a source and a destination shard that have elements in
    common."""
    held, wanted = _shards(src, shape), _shards(dst, shape)
    out = []
    for has, holders in held.items():
        for wants, needers in wanted.items():
            runs = [list(_common(a, b)) for a, b in zip(has, wants, strict=True)]
            boxes = tuple(
                (
                    tuple(run[0] for run in box),
                    tuple(run[1] for run in box),
                    tuple(run[2] for run in box),
                )
                for box in product(*runs)
            )
            if boxes:
                out.append((holders, needers, boxes))
    return tuple(out)


def _shards(layout: Layout, shape: tuple[int, ...]) -> dict[tuple[Intervals, ...], tuple[int, ...]]:
    """The ranks of each different shard."""
    found: dict[tuple[Intervals, ...], list[int]] = {}
    for rank in layout.mesh.ranks:
        found.setdefault(layout.intervals(shape, rank), []).append(rank)
    return {shard: tuple(ranks) for shard, ranks in found.items()}


def _common(a: Intervals, b: Intervals) -> Iterator[tuple[int, int, int]]:
    """(position in a, position in b, length) of each run of indices that both index lists have in a row."""
    i = j = at_a = at_b = 0
    while i < len(a) and j < len(b):
        (a_lo, a_hi), (b_lo, b_hi) = a[i], b[j]
        lo, hi = max(a_lo, b_lo), min(a_hi, b_hi)
        if lo < hi:
            yield at_a + lo - a_lo, at_b + lo - b_lo, hi - lo
        if a_hi <= b_hi:
            i, at_a = i + 1, at_a + a_hi - a_lo
        else:
            j, at_b = j + 1, at_b + b_hi - b_lo


# --- cutting pieces --------------------------------------------------------------------------------------


def cut(piece: Piece, most: int) -> tuple[Piece, ...]:
    """Parts of nearly equal size, of no more than `most` bytes or of one element, each as contiguous in memory as
    it can be.

    Leading dims are cut apart first, so that a part is a run of whole rows.
    """
    shape, dim = piece.shape, 0
    if piece.num_bytes <= most or not shape:
        return (piece,)
    row = piece.num_bytes // shape[0]
    while dim < len(shape) - 1 and row > most:
        dim += 1
        row //= shape[dim]
    parts = -(-shape[dim] // max(most // row, 1))
    bounds = [shape[dim] * number // parts for number in range(parts + 1)]
    out = []
    for lead in product(*(range(size) for size in shape[:dim])):
        for lo, hi in pairwise(bounds):
            start = (*lead, lo, *(0,) * (len(shape) - dim - 1))
            out.append(piece.part(start, (*(1,) * dim, hi - lo, *shape[dim + 1 :])))
    return tuple(out)


def in_chunks(pieces: Sequence[Piece], count: int) -> Iterator[Piece]:
    """Pieces of no more than a `count`-th of all bytes each, or of one element."""
    share = _share(pieces, count)
    for piece in pieces:
        yield from cut(piece, share)


def _share(pieces: Sequence[Piece], count: int) -> int:
    return max(-(-sum(piece.num_bytes for piece in pieces) // count), 1)


def with_tail(chunks: Iterable[Piece], most: int) -> Iterator[Piece]:
    """The chunks, of which the last one is cut once more, so that it is no larger than `most` bytes or a row."""
    last: Piece | None = None
    for chunk in chunks:
        if last is not None:
            yield last
        last = chunk
    if last is not None:
        yield from _heads_and_tail(last, most) if last.num_bytes > 2 * most else (last,)


def _heads_and_tail(piece: Piece, most: int) -> Iterator[Piece]:
    """All but the last rows, then as many of these as have at most `most` bytes; of a larger row its parts."""
    dim = next((dim for dim, size in enumerate(piece.shape) if size > 1), None)
    if dim is None:
        yield piece
        return
    size, start = piece.shape[dim], [0] * len(piece.shape)
    row = piece.num_bytes // size
    count = min(max(most // row, 1), size - 1)
    yield piece.part(tuple(start), (*piece.shape[:dim], size - count, *piece.shape[dim + 1 :]))
    start[dim] = size - count
    tail = piece.part(tuple(start), (*piece.shape[:dim], count, *piece.shape[dim + 1 :]))
    yield from _heads_and_tail(tail, most) if row > most else (tail,)


def num_messages(pieces: Sequence[Piece], count: int) -> int:
    """How many pieces `in_chunks` yields, where their sizes divide; else it may yield some more."""
    share = _share(pieces, count)
    return sum(-(-piece.num_bytes // share) for piece in pieces)


def shared_out(pieces: Sequence[Piece], count: int) -> list[tuple[Piece, ...]]:
    """Pieces in `count` lots of nearly equal bytes, in order; a piece across a border is cut. Lots may be
    empty."""
    total = sum(piece.num_bytes for piece in pieces)
    lots: list[list[Piece]] = [[] for _ in range(count)]
    filled = 0
    for piece in pieces:
        for part in cut(piece, max(total // count // 8, 1)):
            lots[min((filled + part.num_bytes // 2) * count // max(total, 1), count - 1)].append(part)
            filled += part.num_bytes
    return [_joined(lot) for lot in lots]


def _joined(parts: Sequence[Piece]) -> tuple[Piece, ...]:
    """Parts that continue one another along one dim made one again, and then what these make."""
    out: list[Piece] = []
    for part in parts:
        out.append(part)
        while len(out) > 1 and (joined := _join(out[-2], out[-1])) is not None:
            out[-2:] = [joined]
    return tuple(out)


def _join(a: Piece, b: Piece) -> Piece | None:
    if a.item != b.item:
        return None
    ahead = [
        dim
        for dim, (x, y) in enumerate(zip(a.src, b.src, strict=True))
        if x != y or b.dst[dim] - a.dst[dim] != y - x
    ]
    if len(ahead) != 1:
        return None
    dim = ahead[0]
    follows = b.src[dim] - a.src[dim] == b.dst[dim] - a.dst[dim] == a.shape[dim]
    same = all(x == y for at, (x, y) in enumerate(zip(a.shape, b.shape, strict=True)) if at != dim)
    if not (follows and same):
        return None
    shape = tuple(x + b.shape[dim] if at == dim else x for at, x in enumerate(a.shape))
    return Piece(a.item, a.src, a.dst, shape, a.num_bytes + b.num_bytes)
