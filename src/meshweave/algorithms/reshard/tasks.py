"""Unit tasks: the largest pieces of tensors that go from one set of ranks to another as a whole.

The ends of all source shards and of all destination shards cut a tensor into pieces. The ranks of one source shard
have a piece, and those of one destination shard need it (AlpaComm, MLSys '23, section 2.2). Pieces with the same
sources and the same destinations are one unit task, also those of several tensors, since they take the same
routes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise, product

from meshweave.algorithms.reshard.problem import ReshardProblem
from meshweave.cost.fabric import HostTopology
from meshweave.describe.layout import Intervals, Layout
from meshweave.describe.layout.intervals import common_runs, even_bounds, num_indices

Offsets = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """A box (a range of indices in each dim) of one tensor, with its place in a source and a destination shard.

    Attributes:
        tensor_index: number of the tensor in the problem.
        src_offsets: first index of the box in the source shard, one per dim.
        dst_offsets: first index of the box in the destination shard, one per dim.
        shape: elements per dim.
        num_bytes: bytes of the box.
        src_shard, dst_shard: shapes of the source and the destination shard; () if the box is to count as
            contiguous in that shard's memory.
    """

    tensor_index: int
    src_offsets: Offsets
    dst_offsets: Offsets
    shape: tuple[int, ...]
    num_bytes: int
    src_shard: tuple[int, ...] = field(default=(), compare=False)
    dst_shard: tuple[int, ...] = field(default=(), compare=False)

    def part(self, start: Offsets, shape: tuple[int, ...]) -> TensorPiece:
        """Return the smaller box of `shape` elements that begins at index `start` (one per dim) of this box."""
        each = self.num_bytes // math.prod(self.shape)
        return TensorPiece(
            self.tensor_index,
            tuple(a + b for a, b in zip(self.src_offsets, start, strict=True)),
            tuple(a + b for a, b in zip(self.dst_offsets, start, strict=True)),
            shape,
            each * math.prod(shape),
            self.src_shard,
            self.dst_shard,
        )

    @property
    def is_strided(self) -> tuple[bool, bool]:
        """Return whether the box has gaps in memory, as (in the source shard, in the destination shard)."""
        return _has_gaps(self.shape, self.src_shard), _has_gaps(self.shape, self.dst_shard)


@dataclass(frozen=True)
class UnitTask:
    """All pieces that exactly the ranks `sources` have and the ranks `destinations` need.

    Ranks are global; a rank may be in both.
    """

    sources: tuple[int, ...]
    destinations: tuple[int, ...]
    pieces: tuple[TensorPiece, ...]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all pieces, each counted once however many ranks need it."""
        return sum(piece.num_bytes for piece in self.pieces)


def unit_tasks(problem: ReshardProblem) -> tuple[UnitTask, ...]:
    """Return one task for each set of source ranks and set of destination ranks that have pieces in common.

    They are in the order of source shards. Pieces of several tensors share a task if their ranks are equal.
    """
    pieces_of: dict[tuple[tuple[int, ...], tuple[int, ...]], list[TensorPiece]] = {}
    for index, move in enumerate(problem.moves):
        for sources, destinations, boxes, shards in _overlaps(move.shape, move.src, move.dst):
            pieces = pieces_of.setdefault((sources, destinations), [])
            for src_offsets, dst_offsets, shape in boxes:
                num_bytes = math.prod(shape) * move.element_bytes
                pieces.append(TensorPiece(index, src_offsets, dst_offsets, shape, num_bytes, *shards))
    return tuple(
        UnitTask(sources, destinations, tuple(pieces))
        for (sources, destinations), pieces in pieces_of.items()
    )


Box = tuple[Offsets, Offsets, tuple[int, ...]]
Overlap = tuple[tuple[int, ...], tuple[int, ...], tuple[Box, ...], tuple[Offsets, Offsets]]


@lru_cache(maxsize=1024)
def _overlaps(shape: tuple[int, ...], src: Layout, dst: Layout) -> tuple[Overlap, ...]:
    """Return (sources, destinations, boxes, shapes of both shards) for each two shards that overlap."""
    overlaps = []
    src_shards, dst_shards = _ranks_of_shards(src, shape), _ranks_of_shards(dst, shape)
    shapes = {shard: tuple(map(num_indices, shard)) for shard in (*src_shards, *dst_shards)}
    for src_shard, sources in src_shards.items():
        for dst_shard, destinations in dst_shards.items():
            runs = [list(common_runs(a, b)) for a, b in zip(src_shard, dst_shard, strict=True)]
            boxes = tuple(
                (
                    tuple(run[0] for run in box),
                    tuple(run[1] for run in box),
                    tuple(run[2] for run in box),
                )
                for box in product(*runs)
            )
            if boxes:
                overlaps.append((sources, destinations, boxes, (shapes[src_shard], shapes[dst_shard])))
    return tuple(overlaps)


def _ranks_of_shards(layout: Layout, shape: tuple[int, ...]) -> dict[tuple[Intervals, ...], tuple[int, ...]]:
    """Return the ranks of each distinct shard."""
    ranks_of: dict[tuple[Intervals, ...], list[int]] = {}
    for rank in layout.mesh.ranks:
        ranks_of.setdefault(layout.intervals(shape, rank), []).append(rank)
    return {shard: tuple(ranks) for shard, ranks in ranks_of.items()}


def _has_gaps(shape: Sequence[int], shard: Sequence[int]) -> bool:
    """Return whether a box is no single run of a dense shard's memory; False where `shard` is ()."""
    inner = shard and [dim for dim, size in enumerate(shape) if size > 1][:1]
    return bool(inner) and any(shape[dim] != shard[dim] for dim in range(inner[0] + 1, len(shape)))


# --- cutting pieces --------------------------------------------------------------------------------------


def cut_piece(piece: TensorPiece, most: int) -> tuple[TensorPiece, ...]:
    """Return the parts of a piece, of nearly equal size, each of at most `most` bytes or of one element.

    Leading dims are cut first, so that a part has whole rows and is as contiguous in memory as possible.
    """
    dim, count = _cuts(piece, most)
    if not count:
        return (piece,)
    bounds = even_bounds(piece.shape[dim], count)
    out = []
    for lead in product(*(range(size) for size in piece.shape[:dim])):
        for lo, hi in pairwise(bounds):
            out.append(_row_part(piece, dim, lead, lo, hi))
    return tuple(out)


def _cuts(piece: TensorPiece, most: int) -> tuple[int, int]:
    """Return the dim along which each index of the dims before it is cut, and into how many; 0 for a whole box."""
    shape, dim = piece.shape, 0
    if piece.num_bytes <= most or not shape:
        return 0, 0
    row = piece.num_bytes // shape[0]
    while dim < len(shape) - 1 and row > most:
        dim += 1
        row //= shape[dim]
    return dim, -(-shape[dim] // max(most // row, 1))


def _row_part(piece: TensorPiece, dim: int, lead: Offsets, lo: int, hi: int) -> TensorPiece:
    """Return indices `lo` to `hi` of a dim, for one index of each dim before it."""
    start = (*lead, lo, *(0,) * (len(piece.shape) - dim - 1))
    return piece.part(start, (*(1,) * dim, hi - lo, *piece.shape[dim + 1 :]))


def in_chunks(pieces: Sequence[TensorPiece], count: int) -> Iterator[TensorPiece]:
    """Yield the pieces cut into chunks, each of at most 1 / `count` of the bytes of all pieces, or one element."""
    share = _chunk_bytes(pieces, count)
    for piece in pieces:
        yield from cut_piece(piece, share)


def kinds_of_chunks(
    pieces: Sequence[TensorPiece], count: int, tail: int | None = None
) -> Iterator[tuple[TensorPiece, int]]:
    """Yield (chunk, number): for each piece one chunk of each shape that `in_chunks` makes, and how many it makes.

    This takes less work and memory than `in_chunks` for large pieces.

    Args:
        count: a chunk has at most 1 / `count` of the bytes of all pieces, or one element.
        tail: if not None, the last chunk of all is cut as by `with_tail` with `most` = `tail`.
    """
    share = _chunk_bytes(pieces, count)
    for number, piece in enumerate(pieces, 1):
        kinds = _kinds_of_parts(piece, share)
        if number == len(pieces) and tail is not None:
            last, times = kinds.pop()
            yield from kinds
            if times > 1:
                yield last, times - 1
            kinds = [(part, 1) for part in with_tail([last], tail)]
        yield from kinds


def _kinds_of_parts(piece: TensorPiece, most: int) -> list[tuple[TensorPiece, int]]:
    """Return one part of each shape that `cut_piece` makes, with their number; that of the last part last."""
    dim, count = _cuts(piece, most)
    if not count:
        return [(piece, 1)]
    num_rows = math.prod(piece.shape[:dim])
    size, num_longer = divmod(piece.shape[dim], count)
    kinds = ((size, count - num_longer), (size + 1, num_longer))  # of `even_bounds`
    return [(_row_part(piece, dim, (0,) * dim, 0, each), num_rows * times) for each, times in kinds if times]


def _chunk_bytes(pieces: Sequence[TensorPiece], count: int) -> int:
    return max(-(-sum(piece.num_bytes for piece in pieces) // count), 1)


def with_tail(chunks: Iterable[TensorPiece], most: int) -> Iterator[TensorPiece]:
    """Yield the chunks unchanged, but cut the last one if it has more than 2 x `most` bytes.

    Its last part then has at most `most` bytes, or one element; the parts before have the rest.
    """
    last: TensorPiece | None = None
    for chunk in chunks:
        if last is not None:
            yield last
        last = chunk
    if last is not None:
        yield from _heads_and_tail(last, most) if last.num_bytes > 2 * most else (last,)


def _heads_and_tail(piece: TensorPiece, most: int) -> Iterator[TensorPiece]:
    """Yield all but the last rows, then the last rows of at most `most` bytes; a larger row is cut in turn."""
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


def num_messages(pieces: Sequence[TensorPiece], count: int) -> int:
    """Return the number of chunks that `in_chunks(pieces, count)` yields."""
    share = _chunk_bytes(pieces, count)
    cuts = ((piece.shape, *_cuts(piece, share)) for piece in pieces)
    return sum(math.prod(shape[:dim]) * max(parts, 1) for shape, dim, parts in cuts)


def packing_s(pieces: Sequence[TensorPiece], count: int, network: HostTopology) -> tuple[float, float]:
    """Return (seconds to pack the chunks at the source, seconds to unpack them at the destination).

    The chunks are those of `in_chunks(pieces, count)`; only those with gaps in memory are packed.
    """
    if not network.packs:
        return 0.0, 0.0
    at_source = at_destination = 0.0
    for chunk, times in kinds_of_chunks(pieces, count):
        src, dst = chunk.is_strided
        at_source += times * network.packing_s(chunk.num_bytes) if src else 0.0
        at_destination += times * network.packing_s(chunk.num_bytes) if dst else 0.0
    return at_source, at_destination


def equal_shares(pieces: Sequence[TensorPiece], count: int) -> list[tuple[TensorPiece, ...]]:
    """Return the pieces in `count` shares of nearly equal bytes, in the given order.

    A piece that belongs to two shares is cut. Shares may be empty.
    """
    total = sum(piece.num_bytes for piece in pieces)
    shares: list[list[TensorPiece]] = [[] for _ in range(count)]
    filled = 0
    for piece in pieces:
        for part in cut_piece(piece, max(total // count // 8, 1)):
            shares[min((filled + part.num_bytes // 2) * count // max(total, 1), count - 1)].append(part)
            filled += part.num_bytes
    return [_join_all(share) for share in shares]


def _join_all(parts: Sequence[TensorPiece]) -> tuple[TensorPiece, ...]:
    """Join parts that continue one another along one dim, and then the boxes that result."""
    joined: list[TensorPiece] = []
    for part in parts:
        joined.append(part)
        while len(joined) > 1 and (box := _join(joined[-2], joined[-1])) is not None:
            joined[-2:] = [box]
    return tuple(joined)


def _join(a: TensorPiece, b: TensorPiece) -> TensorPiece | None:
    """Return the box of both if `b` continues `a` along one dim, else None."""
    if a.tensor_index != b.tensor_index:
        return None
    src_steps = [y - x for x, y in zip(a.src_offsets, b.src_offsets, strict=True)]
    dst_steps = [y - x for x, y in zip(a.dst_offsets, b.dst_offsets, strict=True)]
    moved_dims = [dim for dim, steps in enumerate(zip(src_steps, dst_steps, strict=True)) if any(steps)]
    if len(moved_dims) != 1:
        return None
    dim = moved_dims[0]
    follows = src_steps[dim] == dst_steps[dim] == a.shape[dim]
    same_sizes = all(x == y for d, (x, y) in enumerate(zip(a.shape, b.shape, strict=True)) if d != dim)
    if not (follows and same_sizes):
        return None
    shape = tuple(x + b.shape[dim] if d == dim else x for d, x in enumerate(a.shape))
    num_bytes = a.num_bytes + b.num_bytes
    return replace(a, shape=shape, num_bytes=num_bytes)
