"""Proves a program with counts, whatever values they get.

With one row a cell it is a plain program, in which a label stands for a cell of unknown length: what is proved
of it holds for every length, none included, as long as ops handle the rows of a cell alike. They do (moves and
sums go element by element, products row by row, or sum over rows), if the cells of an op's views are the same
ones in the same order in memory. That is `check_cells`: a send and its recv name the same cells. What a `call`
does within a cell is its own affair. A few tables of counts are tried besides.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshweave.base.errors import ProgramError
from meshweave.ir.analysis.dataflow import Dataflow
from meshweave.ir.analysis.matching import Node
from meshweave.ir.program import Program
from meshweave.ir.program import ops as op_types
from meshweave.ir.program.counts import CellRows, cell_rows
from meshweave.ir.program.meanings import Function
from meshweave.ir.program.views import Range, View
from meshweave.ir.program.written import WrittenProgram

Cells = NDArray[np.int64]

COUNTS_TRIED = 4
"""How many tables of counts `validate` tries: one of zeros, one of as many rows as fit, and random ones."""


def sampled_counts(program: WrittenProgram, seed: int) -> dict[str, Cells]:
    """Return numbers of rows to try for each table of counts, {name: integers in the table's shape}.

    For seed 0 all are 0. For other seeds cells are filled in a random order: for seed 1 each gets as many rows as
    the table's capacity and totals leave, for others a random number of these.
    """
    draw = np.random.default_rng(seed)
    out = {}
    for table in program.counts:
        values = np.zeros(table.shape, np.int64)
        totals = table.totals or (0,) * len(table.shape)
        left = [
            np.full(size, most or np.iinfo(np.int64).max)
            for size, most in zip(table.shape, totals, strict=True)
        ]
        for cell in draw.permutation(values.size) if seed else ():
            at = np.unravel_index(cell, table.shape)
            drawn = int(draw.integers(0, table.capacity + 1)) * int(draw.integers(0, 4) > 0)
            free = min(int(each[place]) for each, place in zip(left, at, strict=True))
            values[at] = rows = min(table.capacity if seed == 1 else drawn, free)
            for each, place in zip(left, at, strict=True):
                each[place] -= rows
        out[table.name] = values
    return out


def check_cells(program: Program, flow: Dataflow) -> None:
    """Raise ProgramError where views that must hold the same cells, in the same order in memory, do not.

    A cell stands for a number of rows that is known at run time (`ir.program.counts`). Compared are the views of
    one op, and what one member of a message or collective sends and another receives; of a product both operands
    where it sums over rows, else the result and the left operand; of a call with a meaning the views of one
    table. `flow` is the dataflow of the program with one row a cell.
    """
    _Cells(program, flow).check()


class _Cells:
    def __init__(self, program: Program, flow: Dataflow) -> None:
        self.program, self.flow = program, flow
        tables = {table.name: np.ones(table.shape, np.int64) for table in program.counts}
        self.rows: dict[str, CellRows] = cell_rows(program, tables)
        self.meant = {meaning.fn for meaning in program.computes if isinstance(meaning, Function)}

    def check(self) -> None:
        """Raise ProgramError for the first op or collective whose views hold other cells than they must."""
        for node in self.flow.nodes():
            self._check_op(node, self.flow.op(node))
        for joint in self.flow.matched.joints:
            self._check_joint(joint.members, [self.flow.op(node) for node in joint.members])

    def _check_joint(self, members: tuple[Node, ...], ops: list[Any]) -> None:
        """Raise ProgramError where what one member sends is not what another takes."""
        if isinstance(ops[0], op_types.AllToAll):
            self._check_exchange(members, ops)
        elif isinstance(ops[0], op_types.Permute):
            for number, (node, op) in enumerate(zip(members, ops, strict=True)):
                source = (number - int(ops[0].shift)) % len(ops)  # type: ignore[arg-type]
                self._require_equal([(members[source], ops[source].src), (node, op.out)])
        elif isinstance(ops[0], op_types.DataCollective):
            pairs = zip(members, ops, strict=True)
            self._require_equal([(node, view) for node, op in pairs for view in (op.src, op.out)])
        elif isinstance(ops[0], op_types.Send):
            self._require_equal([(members[0], ops[0].src), (members[1], ops[1].out)])

    def _check_op(self, node: Node, op: op_types.Op) -> None:
        if isinstance(op, (op_types.Collective, op_types.Send, op_types.Recv)):
            return
        if isinstance(op, op_types.Matmul):
            self._check_product(node, op)
        elif not isinstance(op, op_types.Call):
            self._require_equal([(node, view) for _, view in op.accesses()])
        elif op.fn in self.meant:
            by_table: dict[str, list[tuple[Node, View]]] = {}
            for _, view in op.accesses():
                if view.buffer in self.rows:
                    by_table.setdefault(self.rows[view.buffer].table.name, []).append((node, view))
            for views in by_table.values():
                self._require_equal(views)

    def _check_product(self, node: Node, op: op_types.Matmul) -> None:
        """Raise ProgramError unless the rows of a product are those of its operand, or those that it sums over."""
        sums = op.out.buffer not in self.rows
        if sums and op.b.buffer in self.rows:
            self._require_equal([(node, op.a), (node, op.b)])
        elif not sums and not op.transpose_a and op.b.buffer not in self.rows:
            self._require_equal([(node, op.out), (node, op.a)])
        elif any(view.buffer in self.rows for view in (op.out, op.a, op.b)):
            raise self._error(node, "multiplies cells as neither rows nor summands", op.out)

    def _check_exchange(self, members: tuple[Node, ...], ops: list[Any]) -> None:
        """Raise ProgramError unless each part of an exchange is, in order, what the other end takes."""
        count = len(members)
        sent: list[list[tuple[int, ...]]] = []
        for node, op in zip(members, ops, strict=True):
            sent.append([*self._parts(node, op.src, op.split_dim, count)])
        for number, (node, op) in enumerate(zip(members, ops, strict=True)):
            for source, part in enumerate(self._parts(node, op.out, op.concat_dim, count)):
                if part != sent[source][number]:
                    raise self._error(node, f"takes other cells than member {source} sends it", op.out)

    def _parts(self, node: Node, view: View, dim: int, count: int) -> Iterator[tuple[int, ...]]:
        """Yield the cells of each part along a dim, in the order of memory, one part after another."""
        if view.buffer not in self.rows:
            raise self._error(node, "exchanges cells with what has none", view)
        held = self.rows[view.buffer]
        cells = cells_of(held, view, node[0])
        listed = [part.transpose(held.order).ravel() for part in np.split(cells, count, axis=dim)]
        if not np.array_equal(np.concatenate(listed), cells.transpose(held.order).ravel()):
            raise self._error(
                node, f"cuts {view} along dim {dim} into parts that are no runs in memory", view
            )
        return (tuple(part.tolist()) for part in listed)

    def _require_equal(self, views: list[tuple[Node, View]]) -> None:
        """Raise ProgramError unless all views have the same cells in the same order, or none has any."""
        known: tuple[str, tuple[int, ...]] | None = None
        for number, (node, view) in enumerate(views):
            held = self.rows.get(view.buffer)
            own = None
            if held is not None:
                cells = cells_of(held, view, node[0]).transpose(held.order)
                own = held.table.name, tuple(cells.ravel().tolist())
            if number and own != known:
                raise self._error(node, f"has other cells in {view} than in {views[0][1]}", view)
            known = own

    def _error(self, node: Node, message: str, view: View) -> ProgramError:
        return ProgramError(message, op=self.flow.label(node), rank=node[0], buffer=view.buffer)


def cells_of(rows: CellRows, view: View, rank: int) -> Cells:
    """Return the cells of the table that a resolved view of `rank` names, as row-major numbers in the table.

    The result has the shape of the view's first dims, those of the table. Raises ProgramError for a view that
    names cells by blocks.
    """
    owner = rank if view.rank is None else view.rank
    assert isinstance(owner, int)
    held = rows.layout.indices(rows.cells.shape, owner)[: rows.num_dims]
    dims: list[Any] = []
    for selector, indices in zip(view.selectors, held, strict=False):
        if not isinstance(selector, Range):
            raise ProgramError(f"view {view} names cells by blocks", rank=rank, buffer=view.buffer)
        dims.append(indices[selector.start : selector.stop])
    flat: Cells = np.asarray(np.ravel_multi_index(np.ix_(*dims), rows.table.shape))
    return flat
