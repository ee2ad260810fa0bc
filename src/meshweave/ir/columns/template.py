"""A program template as columns of integers, which the C++ core reads to simulate a program and to prove it.

The core expands templates itself, so nothing here is per rank but coordinates, groups and the shapes of shards.
`csrc/columns.hpp` says what each column holds and checks it.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import numpy as np

from meshweave._core import Rows
from meshweave.base.errors import ProgramError
from meshweave.base.limits import SIMULATED_DIMS
from meshweave.base.units import dtype_bytes
from meshweave.describe.machine.links import COMM_KINDS
from meshweave.ir.columns.groups import GroupColumns
from meshweave.ir.columns.op_fields import (
    AXIS,
    COMM,
    DIM,
    DIRECTIONS,
    FIRST,
    FIRST_ARG,
    FLAGS,
    LANE,
    NUM_ARGS,
    NUM_FIELDS,
    NUM_WORK_SIZES,
    OUT,
    PART,
    PRICE,
    RATE,
    SECOND,
    SECOND_OPERAND,
    SIZES,
    SIZES_MODE,
    SRC,
    STASH,
    STEP_INDEX,
    Column,
    OpFields,
    blank_fields,
    flat,
    joined,
    offsets,
    part_number,
)
from meshweave.ir.program import On, Program, Repeat, ops
from meshweave.ir.program.expressions import Index
from meshweave.ir.program.statements import preorder
from meshweave.ir.program.views import Blocked, View

MODES: dict[ops.Mode, int] = {ops.READ: 0, ops.WRITE: 1, ops.UPDATE: 2}
MAX_OPS = 200_000_000
"""Ops of all ranks; at some 40 bytes each that is what a large machine holds."""

_OP, _ON, _REPEAT, _WHEN = range(4)
_VIEW, _SELECTOR, _ACCESS = 5, 6, 3
"""Numbers per view, selector and access."""
_TRANSPOSE_A, _TRANSPOSE_B, _TRACKED, _UPDATES = 1, 2, 4, 8
_JOINS = 32


class TemplateColumns(GroupColumns):
    """A program template as columns (1-D arrays of int64) for the C++ core; each op as written has a row.

    Indices of cost constants are 0 here; a subclass sets them.

    Attributes:
        data: the columns that the core takes, by name.
    """

    def __init__(self, program: Program, copies: Mapping[str, int] | None = None) -> None:
        super().__init__(program, copies)
        self._lists: list[tuple[int, ...]] = []
        self._args = array("q")
        self._stashes: dict[str, int] = {}
        self._views: dict[int, int] = {}  # by the identity of views, which the program keeps
        self._view_rows = Rows()
        self._selectors = Rows()
        self._op_rows = Rows()
        self._accesses = Rows()
        self._op_access = Rows()
        self._statements = Rows()
        self._lanes = {lane.name: number for number, lane in enumerate(program.lanes)}
        self._buffers = {buffer.name: number for number, buffer in enumerate(program.buffers)}
        self._buffer_rows: list[tuple[int, ...]] = []
        self._shapes: list[Column] = []
        self._shape_exprs: list[int] = []
        self._op_access.extend((0,))
        self._describe_buffers()
        self._describe_statements()
        self.data = self._described()

    def _described(self) -> dict[str, Column]:
        return {
            "ranks": self.ranks,
            "num_coords": flat([len(self._coords)]),
            "num_vars": flat([self.expressions.num_slots]),
            "num_sets": flat([len(self._set_ranks)]),
            "num_axes": flat([len(self._axes)]),
            "max_ops": flat([MAX_OPS]),
            "coords": flat(np.stack(self._coords, axis=1)) if self._coords else flat([]),
            "code": flat(self.expressions.code),
            "exprs": flat(self.expressions.starts),
            "tables": flat(self.expressions.tables),
            "entries": flat(self.expressions.entries),
            "sets": offsets(self._set_ranks),
            "set_ranks": joined(self._set_ranks),
            "axis_group": joined(self._axis_groups),
            "groups": offsets(self._members),
            "members": joined(self._members),
            "group_price": flat(self._group_price),
            "group_copies": flat(self._group_copies),
            "lists": joined([flat(sizes) for sizes in self._lists]),
            "list_offsets": offsets([flat(sizes) for sizes in self._lists]),
            "args": flat(self._args),
            "buffers": flat(self._buffer_rows),
            "shapes": joined(self._shapes),
            "shape_exprs": flat(self._shape_exprs),
            "views": flat(self._view_rows),
            "selectors": flat(self._selectors),
            "ops": flat(self._op_rows),
            "accesses": flat(self._accesses),
            "op_access": flat(self._op_access),
            "statements": flat(self._statements),
            "lanes": flat([(int(lane.order == "ready"), lane.width) for lane in self.program.lanes]),
        }

    def rate(self, work: str, dtype: str) -> int:
        """Return the index of the FLOP rates of a kind of work ("" for products) in a dtype.

        This default returns 0; a subclass with prices overrides it.
        """
        return 0

    def note_call_costs(self, op: ops.Call, fields: OpFields) -> None:
        """Set the entries of the op's row, `fields`, that its time depends on; this default sets RATE to 0."""
        fields[RATE] = 0

    def work_sizes(self, op: ops.Call) -> Sequence[Index]:
        """Return the sizes that the time of a call may depend on; (), for none, in this class without prices."""
        return ()

    # --- buffers and views ----------------------------------------------------------------------------

    def _describe_buffers(self) -> None:
        program, size = self.program, 0
        for buffer in program.buffers:
            num_dims = buffer.num_dims(program.tensor_of)
            if num_dims > SIMULATED_DIMS.most:
                raise ProgramError(SIMULATED_DIMS.refusal(num_dims), buffer=buffer.name)
            common = dtype_bytes(buffer.dtype), buffer.slots, num_dims, self._set(buffer.mesh)
            order = _packed_order(buffer.order)
            if buffer.tensor is None:
                self._buffer_rows.append((*common, 0, len(self._shape_exprs), order))
                self._shape_exprs += [self.expressions.number(extent) for extent in buffer.shape]
                continue
            table = np.full((len(self.ranks), num_dims), -1, dtype=np.int64)
            table[self._at[buffer.mesh]] = program.local_shapes(buffer.name)
            self._buffer_rows.append((*common, 1, size, order))
            self._shapes.append(flat(table))
            size += table.size

    def _view(self, view: View) -> int:
        known = self._views.get(id(view))
        if known is not None:
            return known
        known = self._views[id(view)] = len(self._view_rows) // _VIEW
        buffer = self._buffers.get(view.buffer)
        if buffer is None:
            raise ProgramError(f"there is no buffer '{view.buffer}'; declared are {', '.join(self._buffers)}")
        number, selectors = self.expressions.number, self._selectors
        owner = -1 if view.rank is None else number(view.rank)
        dims = len(view.selectors)
        self._view_rows.extend((buffer, number(view.slot), owner, len(selectors) // _SELECTOR, dims))
        for selector in view.selectors:
            start, stop = number(selector.start), -1 if selector.stop is None else number(selector.stop)
            if isinstance(selector, Blocked):
                parts = number(selector.first), number(selector.block), number(selector.stride)
                selectors.extend((1, start, stop, *parts))
            else:
                selectors.extend((0, start, stop, -1, -1, -1))
        return known

    # --- statements -----------------------------------------------------------------------------------

    @property
    def num_ops(self) -> int:
        """Return the number of ops described so far."""
        return len(self._op_rows) // NUM_FIELDS

    def _describe_statements(self) -> None:
        for statement, end in preorder(self.program.body):
            if isinstance(statement, ops.Op):
                row = _OP, self.num_ops, 0, end
                self.describe_op(statement)
            elif isinstance(statement, On):
                row = _ON, self._set(statement.where), 0, end
            elif isinstance(statement, Repeat):
                row = (
                    _REPEAT,
                    self.expressions.slot(statement.var),
                    self.expressions.number(statement.count),
                    end,
                )
            else:
                row = _WHEN, 0, self.expressions.number(statement.condition), end
            self._statements.extend(row)

    def describe_op(self, op: ops.Op) -> None:
        """Append the row of integers of an op as written. Raises ProgramError for names that are not declared."""
        fields = blank_fields(op)
        lane = self._lanes.get(op.lane)
        if lane is None:
            raise ProgramError(
                f"there is no lane '{op.lane}'; declared are {', '.join(self._lanes)}", op=op.name or op.kind
            )
        fields[LANE], fields[FIRST_ARG] = lane, len(self._args)
        self._note_accesses(op)
        if isinstance(op, (ops.Send, ops.Recv)):
            self._describe_message(op, fields)
        elif isinstance(op, ops.Collective):
            self._describe_collective(op, fields)
        elif isinstance(op, ops.Call):
            self._describe_call(op, fields)
        elif isinstance(op, ops.Matmul):
            fields[OUT], fields[SRC], fields[SECOND_OPERAND] = map(self._view, (op.out, op.a, op.b))
            fields[FLAGS] = _TRANSPOSE_A * op.transpose_a | _TRANSPOSE_B * op.transpose_b
            fields[RATE] = self.rate("", self.program.buffer_of[op.a.buffer].dtype)
        elif isinstance(op, (ops.Get, ops.Put, ops.Accumulate)):
            fields[OUT], fields[SRC] = self._view(op.out), self._view(op.src)
            fields[PRICE] = self.price_index("")
        else:
            fields[OUT] = self._view(op.out)  # type: ignore[attr-defined]
        if isinstance(op, (ops.Matmul, ops.Copy, ops.Put)) and op.release is not None:
            fields[FLAGS] |= _TRACKED | _JOINS * op.release.joins
        if isinstance(op, (ops.Send, ops.Permute)) and op.step is not None:
            fields[COMM] = COMM_KINDS.index(op.step.collective)
            fields[STEP_INDEX] = self.expressions.number(op.step.index)
            fields[DIRECTIONS] = op.step.num_directions
        self._op_rows.extend(fields)

    def _describe_call(self, op: ops.Call, fields: OpFields) -> None:
        self.note_call_costs(op, fields)
        fields[STASH] = self._stashes.setdefault(op.stash, len(self._stashes)) if op.stash else -1
        fields[PART], fields[NUM_ARGS] = part_number(op), len(op.args)
        sizes = self.work_sizes(op)
        fields[NUM_WORK_SIZES] = len(sizes)
        self._args.extend(map(self.expressions.number, (*op.args, *sizes)))

    def _describe_collective(self, op: ops.Collective, fields: OpFields) -> None:
        fields[AXIS] = self._axis(op.over)
        if isinstance(op, ops.DataCollective):
            fields[OUT], fields[SRC] = self._view(op.out), self._view(op.src)
        if isinstance(op, (ops.AllGather, ops.ReduceScatter)):
            fields[DIM], (fields[SIZES_MODE], fields[SIZES]) = op.dim, self.sizes(op.sizes)
        elif isinstance(op, ops.AllToAll):
            fields[DIM] = op.split_dim
            fields[SIZES_MODE], fields[SIZES] = self.sizes(op.send_sizes)
        elif isinstance(op, (ops.Broadcast, ops.Reduce)):
            fields[FIRST], fields[SECOND] = (
                self.expressions.number(op.root),
                self.expressions.number(op.packets),
            )
        elif isinstance(op, ops.Permute):
            fields[FIRST] = self.expressions.number(op.shift)

    def _describe_message(self, op: ops.Send | ops.Recv, fields: OpFields) -> None:
        fields[FIRST], fields[SECOND] = self.expressions.number(op.peer), self.expressions.number(op.tag)
        if isinstance(op, ops.Send):
            fields[SRC] = self._view(op.src)
        else:
            fields[OUT], fields[FLAGS] = self._view(op.out), _UPDATES * op.update
        fields[PRICE] = self.price_index(op.step.axis if isinstance(op, ops.Send) and op.step else "")

    def sizes(self, sizes: Index | tuple[int, ...] | None) -> tuple[int, int]:
        """Return how the core is told the sizes of a collective's parts, as (form, number).

        (0, 0) for equal parts, (1, number of an expression in `peer`), or (2, number of a new list of sizes).
        """
        if sizes is None:
            return 0, 0
        if isinstance(sizes, tuple):
            self._lists.append(sizes)
            return 2, len(self._lists) - 1
        return 1, self.expressions.number(sizes)

    def _note_accesses(self, op: ops.Op) -> None:
        accesses = self._accesses
        for mode, view in op.accesses():
            # Whether a product reads what it adds to may depend on the turn.
            depends = isinstance(op, ops.Matmul) and mode == ops.READ and view is op.out
            condition = self.expressions.number(op.accumulate) if depends else -1  # type: ignore[attr-defined]
            accesses.extend((MODES[mode], self._view(view), condition))
        self._op_access.extend((len(accesses) // _ACCESS,))


def _packed_order(order: tuple[int, ...] | None) -> int:
    """Return dims in the order of memory as one number, 4 bits each; 0 for the order written."""
    packed = 0
    for dim in order or ():
        packed = packed << 4 | dim
    return packed
