"""A program template as columns of integers, with what the simulator core needs to price its ops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from meshweave.cost.calls import call_flops
from meshweave.ir.columns.op_fields import FLAGS, FLOPS, NBYTES, RATE, Column, OpFields
from meshweave.ir.columns.template import TemplateColumns
from meshweave.ir.program import Program, ops
from meshweave.ir.program.call_dims import CALL_DIMS
from meshweave.ir.program.expressions import Index
from meshweave.ir.work import (
    Compute,
    Transfer,
    axis_of,
    call_dtype,
    counts_view_bytes,
    exchange_work,
    joins_product,
    matmul_work,
    require_local_operands,
)

_MAX_PACKETS = 1 << 16
"""Of a broadcast or reduce; the core refuses more."""
_VIEW_BYTES = 16
_WORK_WIDTH = 12
"""Numbers of each row of `Core.works`."""


class Columns(TemplateColumns):
    """A program template as columns of integers, with its prices.

    Attributes:
        priced_axes: the mesh axes ("tp.row"; "" for none) whose constants the core will ask for, in its order.
        rated_work: the (kind of work of calls, dtype) whose FLOP rates the core will ask for, in its order.
        exchanges: for each op as written, by the index in `priced_axes` of a group that it runs on, the transfer
            whose price an `Exchange` is timed by; nothing for other ops.
        has_pair_costs: whether the cost of some ops depends on their two ranks. These are one-sided ops, and
            messages that are no step of a collective.
    """

    def __init__(self, program: Program, copies: Mapping[str, int] | None = None) -> None:
        self.priced_axes: list[str] = []
        self.rated_work: list[tuple[str, str]] = []
        self.has_pair_costs = False
        self.exchanges: list[dict[int, Transfer]] = []
        self._op_messages: list[int] = []
        self._ops: list[ops.Op] = []
        super().__init__(program, copies)

    def most_messages(self, rows: Column) -> int:
        """Return an estimate, from above, of the number of messages that a run sends.

        `rows` has, for each op of each rank, the number of the template op that it is an instance of.
        """
        counts = np.bincount(rows, minlength=len(self._op_messages)).tolist()
        return sum(count * each for count, each in zip(counts, self._op_messages, strict=True))

    def describe_op(self, op: ops.Op) -> None:
        """Append the row of integers of an op as written, and note what its price depends on.

        Raises:
            ProgramError: the op uses names that are not declared, or is an exchange of sizes out of range.
            UnsupportedError: it reads another rank's memory in place, which has no price.
        """
        super().describe_op(op)
        self._ops.append(op)
        require_local_operands(op)
        self._op_messages.append(self._messages(op))
        self.exchanges.append(self._exchange(op))
        if isinstance(op, (ops.Get, ops.Put, ops.Accumulate)) or (
            isinstance(op, ops.Send) and op.step is None
        ):
            self.has_pair_costs = True

    def group_price_index(self, row: Column) -> int:
        """Return the index in `priced_axes` of the mesh axis or whole mesh whose ranks form a group.

        A group that is neither, or not in the order of the mesh, has the index of "". A name that `priced_axes`
        lacks is appended.

        Args:
            row: the members of the group, as their positions among the ascending ranks of the program.
        """
        return self.price_index(axis_of(self.program, tuple(self.ranks[row].tolist())))

    def price_index(self, axis: str) -> int:
        """Return the index in `priced_axes` of a mesh axis, "" for none. A new axis is added."""
        if axis not in self.priced_axes:
            self.priced_axes.append(axis)
        return self.priced_axes.index(axis)

    def rate(self, work: str, dtype: str) -> int:
        """Return the index in `rated_work` of (`work`, `dtype`), which is added if new; `work` "" is a product."""
        if (work, dtype) not in self.rated_work:
            self.rated_work.append((work, dtype))
        return self.rated_work.index((work, dtype))

    def note_call_costs(self, op: ops.Call, fields: OpFields) -> None:
        """Set the entries of `fields`, the op's row of integers, by which the core prices a call.

        They are the numbers of the expressions of its FLOPs and bytes, whether the bytes of its views count, and
        the index of its FLOP rate (`rate`).

        Raises:
            UnsupportedError: it has neither FLOPs nor a known kind of work with its sizes.
        """
        counted = call_flops(op.work, op.part, op.shape) if op.flops == 0 else op.flops
        number = self.expressions.number
        fields[FLOPS], fields[NBYTES] = number(counted), number(op.bytes)
        fields[FLAGS] = _VIEW_BYTES * counts_view_bytes(op)
        fields[RATE] = self.rate(op.work, call_dtype(self.program, op))

    def work_sizes(self, op: ops.Call) -> Sequence[Index]:
        """Return the `shape` of a call if it has as many sizes as `CALL_DIMS` names for its work, else ()."""
        return op.shape if len(op.shape) == len(CALL_DIMS.get(op.work, ())) else ()

    def works(self, rows: Column) -> list[Compute]:
        """Return the work of each product and call whose price the core asks for, in its order.

        `rows` is the flat array of `Core.works`: for each, the number of the op as written and its sizes (or FLOPs
        and bytes) on the ranks where it has these, as `_WORK_WIDTH` integers.
        """
        out = []
        for row, a, b, c, num_products, count, *sizes in rows.reshape(-1, _WORK_WIDTH).tolist():
            op = self._ops[row]
            if isinstance(op, ops.Matmul):
                dtype = self.program.buffer_of[op.a.buffer].dtype
                work = matmul_work(a, b, c, dtype, num_products)
                out.append(replace(work, joins=joins_product(op)))
                continue
            assert isinstance(op, ops.Call)
            dtype, shape = call_dtype(self.program, op), tuple(sizes[:count])
            out.append(Compute("call", a, b, dtype=dtype, call=op.work, shape=shape, part=op.part))
        return out

    def _exchange(self, op: ops.Op) -> dict[int, Transfer]:
        if not isinstance(op, ops.Exchange):
            return {}
        groups = np.unique(self._axis_groups[self._axis(op.over)]).tolist()
        prices = {self._group_price[group] for group in groups if group >= 0}
        return {price: exchange_work(op, self.priced_axes[price]) for price in prices}

    def _messages(self, op: ops.Op) -> int:
        """Return about how many messages a member of a collective sends, at most; 1 for other ops."""
        if isinstance(op, (ops.Broadcast, ops.Reduce)):
            return op.packets if isinstance(op.packets, int) else _MAX_PACKETS
        if isinstance(op, ops.Collective) and not isinstance(op, (ops.Permute, ops.Fence, ops.Exchange)):
            return 2 * self.program.group_size(op.over)
        return 1
