"""Counts that are known at run time only: tensors of cells, each of which stands for a number of rows.

A table `n = counts((8, 4), 6)` has a cell for each of 8 experts and 4 sources. A tensor `(8, 4, 16)` with
`counts=n` is written as if each cell were one row of 16 elements: layouts shard experts or sources, views name
cells, and every analysis reads it as any other tensor. `with_counts` is the plain program in which cell (e, s) is
n[e, s] rows:

- a buffer holds the rows of its rank's cells one after another, in the order of its memory (`Buffer.order`),
  as one dim; the dims of the table before it have size 1;
- a view of cells is a run of rows, so cells that it names must follow one another in memory: single positions,
  then one range, then whole dims, from the outermost dim of the table to the innermost;
- ops stay one for one. So what is proved of the order of ops at one row a cell holds for all counts.

Temporary buffers become scratch. An input or output of cells becomes a tensor with the rows of one rank after
those of another, each padded to the most that a rank has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import prod
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshweave.base.errors import ProgramError, did_you_mean
from meshweave.describe.layout import Layout, Replicate, Shard, StridedShard
from meshweave.describe.layout.mesh import Mesh
from meshweave.ir.program.expressions import Index, Var, binary, select
from meshweave.ir.program.meanings import sources_of
from meshweave.ir.program.ops import AllToAll, DataCollective, Op
from meshweave.ir.program.statements import rewrite
from meshweave.ir.program.views import FULL, Range, Selector, View
from meshweave.ir.program.written import Buffer, Counts, Tensor, WrittenProgram

CountValues = Mapping[str, ArrayLike]
"""The entries of each table of counts, by name."""

WrittenT = TypeVar("WrittenT", bound=WrittenProgram)


def one_row_a_cell(program: WrittenT) -> WrittenT:
    """Return the program without tables of counts, as if each cell were one row; itself if it has none."""
    if not program.counts:
        return program
    return replace(program, counts=(), tensors=tuple(replace(each, counts="") for each in program.tensors))


def with_counts(program: WrittenT, values: CountValues) -> WrittenT:
    """Return the program without tables of counts: each cell has as many rows as `values` (by table) says.

    Meanings that name a tensor of cells are dropped, and tensors of cells that only temp buffers hold. Raises
    ProgramError where values or an op do not fit.
    """
    if not program.counts and not values:
        return program
    tables = checked_values(program, values)
    rows = cell_rows(program, tables)
    counted = {tensor.name for tensor in program.tensors if tensor.counts}
    kept = {b.tensor: rows[b.name] for b in program.buffers if b.name in rows and b.kind != "temp"}
    for buffer in program.buffers:
        if buffer.tensor in kept and buffer.kind != "temp":
            kept[buffer.tensor].require_alike(rows[buffer.name])
    return replace(
        program,
        counts=(),
        tensors=tuple(
            each if each.name not in counted else kept[each.name].tensor
            for each in program.tensors
            if each.name not in counted or each.name in kept
        ),
        buffers=tuple(
            rows[buffer.name].buffer if buffer.name in rows else buffer for buffer in program.buffers
        ),
        computes=tuple(
            meaning for meaning in program.computes if not counted & {meaning.out, *sources_of(meaning)}
        ),
        body=rewrite(program.body, lambda op: (_of_rows(program, op, rows),)),
    )


def checked_values(program: WrittenProgram, values: CountValues) -> dict[str, NDArray[np.int64]]:
    """Return `values` as int64, by table. Raises ProgramError where they do not fit the declared tables."""
    for name in values:
        if name not in program.counts_of:
            known = did_you_mean(name, program.counts_of)
            raise ProgramError(f"program {program.name} has no counts '{name}'{known}")
    tables = {}
    for table in program.counts:
        if table.name not in values:
            raise ProgramError(f"program {program.name} needs values of counts '{table.name}'")
        entries = np.asarray(values[table.name])
        if entries.shape != table.shape or entries.dtype.kind not in "iu":
            raise ProgramError(
                f"counts {table.name} are integers of shape {table.shape}, not {entries.dtype} {entries.shape}"
            )
        if entries.size and not 0 <= int(entries.min()) <= int(entries.max()) <= table.capacity:
            raise ProgramError(
                f"counts {table.name} are 0 to {table.capacity}, not {entries.min()} to {entries.max()}"
            )
        for dim, most in enumerate(table.totals):
            others = tuple(other for other in range(entries.ndim) if other != dim)
            largest = int(entries.sum(axis=others).max(initial=0))
            if most and largest > most:
                raise ProgramError(
                    f"counts {table.name} have {largest} rows at one position of dim {dim}, at most {most} fit"
                )
        tables[table.name] = entries.astype(np.int64)
    return tables


def cell_rows(program: WrittenProgram, tables: Mapping[str, NDArray[np.int64]]) -> dict[str, CellRows]:
    """Return {buffer: where the rows of its cells lie}; `tables` has the entries of each table, by name."""
    out = {}
    for buffer in program.buffers:
        tensor = None if buffer.tensor is None else program.tensor_of[buffer.tensor]
        if tensor is not None and tensor.counts:
            out[buffer.name] = CellRows(
                buffer, tensor, program.counts_of[tensor.counts], tables[tensor.counts]
            )
    return out


@dataclass(frozen=True)
class CellRows:
    """Where the rows of each rank's cells lie in one buffer; a cell is a number of rows, known at run time only.

    `written` is the buffer of the tensor `cells`; `values` are the entries of the `table` of counts.
    """

    written: Buffer
    cells: Tensor
    table: Counts
    values: NDArray[np.int64]

    @property
    def num_dims(self) -> int:
        """Return the number of dims of the table of counts."""
        return len(self.table.shape)

    @property
    def layout(self) -> Layout:
        """Return the layout of the buffer's tensor of cells."""
        assert self.written.layout is not None
        return self.written.layout

    @property
    def mesh(self) -> Mesh:
        """Return the mesh of the buffer."""
        return self.layout.mesh

    @property
    def order(self) -> tuple[int, ...]:
        """Return the dims of the table from outermost to innermost in memory."""
        order = self.written.order
        return tuple(range(self.num_dims)) if order is None else order[: self.num_dims]

    @cached_property
    def extents(self) -> tuple[int, ...]:
        """Return the most cells that a rank has along each dim of the table."""
        shapes = [self.layout.local_shape(self.cells.shape, rank) for rank in self.mesh.ranks]
        return tuple(max(sizes) for sizes in list(zip(*shapes, strict=True))[: self.num_dims])

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """Return where each cell's rows begin on each rank, in rows: shape (ranks of the mesh, cells + 1).

        Cells are in the order of memory; the last entry is the number of all rows.
        """
        out = np.zeros((self.mesh.num_ranks, prod(self.extents) + 1), np.int64)
        for place, rank in enumerate(self.mesh.ranks):
            held = self.layout.indices(self.cells.shape, rank)[: self.num_dims]
            local = np.zeros(self.extents, np.int64)
            local[tuple(slice(len(dim)) for dim in held)] = self.values[np.ix_(*held)]
            out[place, 1:] = np.cumsum(local.transpose(self.order).ravel())
        return out

    @cached_property
    def _entries(self) -> tuple[int, ...]:
        return tuple(self.starts.ravel().tolist())

    def rows_at(self, place: Index, cell: Index) -> Index:
        """Return the row at which cell number `cell` in memory begins, on rank number `place` of the mesh."""
        return select(self._entries, place * self.starts.shape[1] + cell)

    @property
    def here(self) -> Index:
        """Return the index of the executing rank in the mesh, as an expression."""
        place: Index = 0
        for axis, size in zip(self.mesh.axes, self.mesh.shape, strict=True):
            place = place * size + Var(f"{self.mesh.name}.{axis}")
        return place

    def place_of(self, rank: Index | None) -> Index:
        """Return the index in the mesh of global rank `rank`, as an expression; None is the executing rank."""
        if rank is None:
            return self.here
        first = min(self.mesh.ranks)
        if self.mesh.ranks == tuple(range(first, first + self.mesh.num_ranks)):
            return binary("-", rank, first)
        numbers = {each: number for number, each in enumerate(self.mesh.ranks)}
        return select([numbers.get(each, 0) for each in range(max(self.mesh.ranks) + 1)], rank)

    # --- declarations ---------------------------------------------------------------------------------

    @property
    def num_rows(self) -> NDArray[np.int64]:
        """Return the number of rows that each rank of the mesh holds, shape (ranks of the mesh,)."""
        return self.starts[:, -1]

    @property
    def tensor(self) -> Tensor:
        """Return the tensor of an input or output in rows: those of all ranks, each padded to the most."""
        rows = self.mesh.num_ranks * int(self.num_rows.max())
        ones = (1,) * (self.num_dims - 1)
        return replace(self.cells, shape=(*ones, rows, *self.cells.shape[self.num_dims :]), counts="")

    @property
    def buffer(self) -> Buffer:
        """Return the buffer of rows that takes the place of `written`; a temp buffer becomes scratch."""
        order = self.written.order and (*range(self.num_dims), *self.written.order[self.num_dims :])
        if order == tuple(range(len(order or ()))):
            order = None
        if self.written.kind != "temp":
            layout = Layout(self.mesh, (Shard(self.num_dims - 1),) * len(self.mesh.shape))
            return replace(self.written, layout=layout, order=order)
        shapes = [self.layout.local_shape(self.cells.shape, rank) for rank in self.mesh.ranks]
        rest = list(zip(*shapes, strict=True))[self.num_dims :]
        sizes = tuple(select(each, self.here) for each in (self.num_rows.tolist(), *rest))
        shape = (*(1,) * (self.num_dims - 1), *sizes)
        return replace(self.written, kind="scratch", tensor=None, layout=None, shape=shape, order=order)

    def require_alike(self, other: CellRows) -> None:
        """Raise ProgramError unless the rows of `other`, a buffer of the same tensor, make one of equal shape."""
        if self.tensor != other.tensor:
            raise ProgramError(
                f"inputs and outputs hold {self.cells.name} in layouts of unlike rows",
                buffer=other.written.name,
            )

    # --- views ----------------------------------------------------------------------------------------

    def _run(self, view: View, split: int | None = None) -> tuple[int, Index, Index, Index]:
        """Return the dim of the range of a run of cells, the cells before it, and where the range begins and ends.

        Args:
            split: the dim that is cut into parts, where each part is to be a run.
        """
        before: Index = 0
        chosen: tuple[int, Index, Index] | None = None
        for dim in self.order:
            selector, extent = view.selectors[dim], self.extents[dim]
            assert isinstance(selector, Range)
            stop = extent if selector.stop is None else selector.stop
            is_whole = selector.start == 0 and stop == extent
            if chosen is None and dim != split and _is_point(selector, extent):
                before = before * extent + selector.start
            elif chosen is None:
                before, chosen = before * extent, (dim, selector.start, stop)
            elif is_whole:
                before, chosen = before * extent, chosen
            else:
                raise ProgramError(f"view {view} names cells that are no run in memory", buffer=view.buffer)
        if chosen is None:  # one cell
            return self.order[-1], before, 0, 1
        step = prod(self.extents[dim] for dim in self.order[self.order.index(chosen[0]) + 1 :])
        return chosen[0], before, chosen[1] * step, chosen[2] * step

    def view(self, view: View) -> View:
        """Return the view of the rows of the cells that `view` names.

        Raises ProgramError where the cells do not follow one another in memory, or a selector is `Blocked`.
        """
        rest = view.selectors[self.num_dims :]
        if any(not isinstance(selector, Range) for selector in view.selectors[: self.num_dims]):
            raise ProgramError(f"view {view} names cells by blocks", buffer=view.buffer)
        run: Selector = FULL
        if any(selector != FULL for selector in view.selectors[: self.num_dims]) or self._is_padded:
            _, before, first, last = self._run(view)
            place = self.place_of(view.rank)
            run = Range(self.rows_at(place, before + first), self.rows_at(place, before + last))
        return View(view.buffer, (*(FULL,) * (self.num_dims - 1), run, *rest), view.slot, view.rank)

    @property
    def _is_padded(self) -> bool:
        return self.written.kind != "temp"

    def part_sizes(self, view: View, dim: int, count: int) -> Index:
        """Return the number of rows of part `peer` of a view cut along `dim` into `count` equal runs of cells.

        It is an expression in `peer` and in the executing rank's coordinates. Raises ProgramError where `count`
        does not divide its cells, or a part is no run of cells that follow one another in memory.
        """
        chosen, before, first, last = self._run(view, dim)
        length = binary("-", last, first)
        if chosen != dim or not isinstance(length, int) or length % count:
            raise ProgramError(
                f"view {view} is not cut into {count} runs of cells along dim {dim}", buffer=view.buffer
            )
        start = before + first + Var("peer") * (length // count)
        place = self.place_of(view.rank)
        return binary("-", self.rows_at(place, start + length // count), self.rows_at(place, start))


def _is_point(selector: Range, extent: int) -> bool:
    """Return whether a range is surely one position of a dim."""
    stop = extent if selector.stop is None else selector.stop
    return stop == binary("+", selector.start, 1)


def _of_rows(program: WrittenProgram, op: Op, rows: Mapping[str, CellRows]) -> Op:
    """Return an op on the rows of cells."""
    views = [view for view in _views(op) if view.buffer in rows]
    if not views:
        return op
    changes: dict[str, Any] = {}
    if isinstance(op, AllToAll):
        changes = _all_to_all(program, op, rows)
    elif isinstance(op, DataCollective) and hasattr(op, "dim"):
        raise ProgramError(f"{op.kind} has no form for cells: exchange them by all_to_all or messages")
    for item in fields(op):
        value = getattr(op, item.name)
        if isinstance(value, View):
            changes[item.name] = _view_of_rows(value, rows)
        elif isinstance(value, tuple) and value and all(isinstance(each, View) for each in value):
            changes[item.name] = tuple(_view_of_rows(each, rows) for each in value)
    return replace(op, **changes)


def _view_of_rows(view: View, rows: Mapping[str, CellRows]) -> View:
    return rows[view.buffer].view(view) if view.buffer in rows else view


def _views(op: Op) -> list[View]:
    return [view for _, view in op.accesses()]


def _all_to_all(program: WrittenProgram, op: AllToAll, rows: Mapping[str, CellRows]) -> dict[str, Any]:
    """Return the fields of an exchange of cells that differ in the exchange of their rows."""
    count = program.group_size(op.over)
    changes: dict[str, Any] = {}
    for view, dim, word in ((op.src, "split_dim", "send_sizes"), (op.out, "concat_dim", "recv_sizes")):
        held = rows.get(view.buffer)
        if held is None or getattr(op, dim) >= held.num_dims or getattr(op, word) is not None:
            raise ProgramError(f"an all_to_all of cells cuts {view} along dims of the table, in equal parts")
        changes[word] = held.part_sizes(view, getattr(op, dim), count)
        changes[dim] = held.num_dims - 1
    return changes


# --- what is declared -----------------------------------------------------------------------------------


def check_counts(program: WrittenProgram, parts: Iterable[WrittenProgram]) -> None:
    """Check the tables of counts, and the tensors and buffers of their cells; `parts` are included programs.

    Raises ProgramError where one does not fit its table, a number is out of range, or a part has counts
    itself.
    """
    for part in parts:
        if part.counts:
            raise ProgramError(f"program {part.name} has counts: give it values before it is included")
    for table in program.counts:
        if not table.shape or min(table.shape) < 1 or table.capacity < 0:
            raise ProgramError(f"counts {table.name} have shape {table.shape} and capacity {table.capacity}")
        if table.totals and (len(table.totals) != len(table.shape) or min(table.totals) < 0):
            raise ProgramError(f"counts {table.name} have {len(table.shape)} dims, not totals {table.totals}")
    for tensor in program.tensors:
        if tensor.counts:
            _check_tensor(program, tensor)
    for buffer in program.buffers:
        if buffer.tensor is not None and program.tensor_of[buffer.tensor].counts:
            _check_buffer(program, buffer)


def _check_tensor(program: WrittenProgram, tensor: Tensor) -> None:
    table = program.counts_of.get(tensor.counts)
    if table is None:
        known = did_you_mean(tensor.counts, program.counts_of)
        raise ProgramError(f"tensor {tensor.name} has unknown counts '{tensor.counts}'{known}")
    if tensor.shape[: len(table.shape)] != table.shape:
        raise ProgramError(f"tensor {tensor.name} {tensor.shape} does not begin with counts {table.shape}")


def _check_buffer(program: WrittenProgram, buffer: Buffer) -> None:
    assert buffer.tensor is not None and buffer.layout is not None
    dims = len(program.counts_of[program.tensor_of[buffer.tensor].counts].shape)
    cuts = (Shard, StridedShard, Replicate)
    if buffer.layout.folds is not None or not all(isinstance(p, cuts) for p in buffer.layout.placements):
        raise ProgramError("holds cells, which are sharded or replicated", buffer=buffer.name)
    if buffer.order is not None and sorted(buffer.order[:dims]) != list(range(dims)):
        raise ProgramError(f"holds cells, whose {dims} dims come first in its order", buffer=buffer.name)
    is_cut = all(isinstance(p, (Shard, StridedShard)) and p.dim < dims for p in buffer.layout.placements)
    if buffer.kind != "temp" and not is_cut:
        raise ProgramError(
            "is an input or output of cells, which every axis of its mesh cuts", buffer=buffer.name
        )
