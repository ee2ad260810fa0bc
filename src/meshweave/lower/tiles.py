"""Released products tile by tile, for executors whose products release nothing before they end.

A machine that tracks tiles runs a released product as one kernel. A CPU runs a call of a library, which is done
all at once. So the product is written out as one for each tile, in the order of its release: what a tile adds to
or stores elsewhere then goes there, in a lane of its own, while the next one is computed. Nothing else changes:
what reads a region waits for all writes to it (T3's track and trigger: Pati et al., ASPLOS '24, section 4).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from meshweave.ir.program import Buffer, Lane, On, Program, Statement
from meshweave.ir.program.expressions import number_of
from meshweave.ir.program.ops import Copy, Matmul, Op, Put
from meshweave.ir.program.release import Release
from meshweave.ir.program.renaming import fresh_name
from meshweave.ir.program.views import Range, View
from meshweave.lower.boxes import mesh_with
from meshweave.lower.one_sided import in_sequential_order

MACHINE_TILES = 4
"""The tiles of a region whose release leaves the tile to the machine: so many, each of whole rows."""

Box = tuple[tuple[int, int], tuple[int, int]]
"""Rows and columns [start, stop) of a region."""


def write_out_tiles(program: Program, machine_tiles: int = MACHINE_TILES) -> Program:
    """Return the program, written out per rank, with each released product or put as one op for each tile.

    A product or put stays whole where its output has not two dims or a view has strided blocks. A tile that its
    release adds to memory, or that is stored in another rank's memory, is computed into scratch of its own and
    sent from there, so that the next tile does not wait for it.

    A release without a tile size takes that of the first product that has one.

    Args:
        machine_tiles: if no product has a tile size, regions are cut into at most so many tiles of whole rows.
    """
    program = program.expanded
    places = _Places(program)
    body: list[Statement] = []
    for rank, bound in in_sequential_order(program):
        body += [On((rank,), (op,)) for op in _tiles_of(bound.op, rank, places, machine_tiles)]
    lanes = program.lanes + ((Lane(places.lane),) if places.made else ())
    return replace(program, body=tuple(body), lanes=lanes, buffers=program.buffers + places.buffers())


def tiles(rows: int, columns: int, release: Release, machine_tiles: int = MACHINE_TILES) -> list[Box]:
    """Return the tiles of a region of `rows` x `columns`, as ((start, stop) of rows, (start, stop) of columns).

    They are in the order of release. Where the release has no tile size, tiles are whole rows, at most
    `machine_tiles` of them: 10 rows in at most 4 tiles -> 3, 3, 3 and 1 rows.
    """
    height, width = (number_of(size) for size in (*release.tile, columns, columns)[:2])
    if not release.tile:
        height, width = max(-(-rows // machine_tiles), 1), columns
    down = [(start, min(start + height, rows)) for start in range(0, rows, max(height, 1))]
    across = [(start, min(start + width, columns)) for start in range(0, columns, max(width, 1))]
    if release.order == "columns":
        listed = [(row, column) for column in across for row in down]
    else:
        listed = list(itertools.product(down, across))
    first = number_of(release.first) % max(len(listed), 1)
    return listed[first:] + listed[:first]


class _Places:
    """Scratch of each rank for tiles that go elsewhere, one below the other, and the lane in which they go."""

    def __init__(self, program: Program) -> None:
        self.lane = fresh_name("stores", program.names)
        self.made: dict[str, tuple[Buffer, int, int]] = {}
        ops = (bound.op for ops in program.ops_by_rank.values() for bound in ops)
        products = (op.release for op in ops if isinstance(op, Matmul) and op.release is not None)
        self.tile = next((release.tile for release in products if release.tile), ())
        """The tile of puts that name none, so that what is sent next is a region as small as what is computed."""
        self._program = program
        self._next_row: dict[tuple[str, int], int] = {}

    def of(self, out: View, rank: int) -> View:
        """Return a view of new scratch of `rank` in the shape of the tile `out`."""
        rows, columns = out.shape
        of = self._program.buffer_of[out.buffer]
        mesh = mesh_with(self._program, rank, of.mesh)
        name = f"{out.buffer}_tiles{'' if mesh == of.mesh else f'_{mesh}'}"
        name = fresh_name(name, self._program.names)
        start = self._next_row.get((name, rank), 0)
        self._next_row[name, rank] = start + rows
        _, most_rows, most_columns = self.made.get(name, (of, 0, 0))
        self.made[name] = replace(of, mesh=mesh), max(most_rows, start + rows), max(most_columns, columns)
        return View(name, (Range(start, start + rows), Range(0, columns)), 0)

    def buffers(self) -> tuple[Buffer, ...]:
        """Return the scratch buffers of all places so far."""
        return tuple(
            Buffer(name, "scratch", of.mesh, of.dtype, shape=(rows, columns))
            for name, (of, rows, columns) in self.made.items()
        )


def _tiles_of(op: Op, rank: int, places: _Places, machine_tiles: int) -> Iterator[Op]:
    if not isinstance(op, (Matmul, Put)) or op.release is None or not _is_box(op):
        yield op
        return
    release = op.release if op.release.tile else replace(op.release, tile=places.tile)
    rows, columns = op.out.shape
    boxes = tiles(rows, columns, release, machine_tiles)
    if isinstance(op, Put):
        for box in boxes:
            released = Release(update=release.update)
            yield replace(op, out=_part(op.out, box), src=_part(op.src, box), release=released)
        return
    whole = (0, op.a.shape[0 if op.transpose_a else 1])
    for box in boxes:
        a = _part(op.a, (whole, box[0]) if op.transpose_a else (box[0], whole))
        b = _part(op.b, (box[1], whole) if op.transpose_b else (whole, box[1]))
        tile = replace(op, out=_part(op.out, box), a=a, b=b, release=Release(update=release.update))
        if not release.update and op.out.rank is None:
            yield tile
            continue
        place, adds = places.of(tile.out, rank), release.update or bool(op.accumulate)
        yield replace(tile, out=place, release=None, accumulate=0, name="")
        delivered = {"out": tile.out, "src": place, "lane": places.lane, "name": op.name}
        if op.out.rank is None:
            yield Copy(release=Release(update=True), **delivered)  # type: ignore[arg-type]
        else:
            yield Put(release=Release(update=adds), **delivered)  # type: ignore[arg-type]


def _is_box(op: Matmul | Put) -> bool:
    views = (op.out, op.a, op.b) if isinstance(op, Matmul) else (op.out, op.src)
    return all(
        len(view.selectors) == 2 and all(isinstance(selector, Range) for selector in view.selectors)
        for view in views
    )


def _part(view: View, box: Box) -> View:
    selectors = []
    for selector, (start, stop) in zip(view.selectors, box, strict=True):
        assert isinstance(selector, Range) and isinstance(selector.start, int)
        selectors.append(Range(selector.start + start, selector.start + stop))
    return replace(view, selectors=tuple(selectors))
