"""One op of a program template as a row of integers, and the arrays that rows are joined to."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshweave.base.errors import ProgramError
from meshweave.ir.program.ops import CALL_PARTS, OP_TYPES, Op

Column = NDArray[np.int64]

_KIND_NUMBERS = {kind: number for number, kind in enumerate(OP_TYPES)}
_PART_NUMBERS = {part: number for number, part in enumerate(CALL_PARTS)}


class OpFields:
    """The columns of one op, -1 for those that it does not have."""

    __slots__ = (
        *(
            "op",
            "out",
            "src",
            "second_operand",
            "axis",
            "price",
            "first",
            "second",
            "flops",
            "nbytes",
            "stash",
        ),
        *("rate", "comm", "step_index", "dim", "flags", "sizes", "directions", "args"),
    )

    def __init__(self, op: Op) -> None:
        self.op = op
        self.out = self.src = self.second_operand = self.axis = self.price = self.first = self.second = -1
        self.flops = self.nbytes = self.stash = self.rate = self.comm = self.step_index = -1
        self.dim, self.flags, self.sizes, self.directions = 0, 0, (0, 0), 1
        self.args: list[int] = []

    def row(self, lane: int, first_arg: int) -> tuple[int, ...]:
        """Return the columns in the order of the core's `Op`."""
        return (
            *(_KIND_NUMBERS[self.op.kind], lane, self.out, self.src, self.second_operand),
            *(self.flags, self.axis, self.dim, self.first, self.second, *self.sizes),
            *(self.comm, self.step_index, self.directions, self.price),
            *(self.flops, self.nbytes, self.stash, _part(self.op), first_arg, len(self.args), self.rate),
        )


def _part(op: Op) -> int:
    part = getattr(op, "part", "")
    if part not in _PART_NUMBERS:
        raise ProgramError(
            f"has no part '{part}'; there are {', '.join(CALL_PARTS[1:])}", op=op.name or op.kind
        )
    return _PART_NUMBERS[part]


def flat(values: Any) -> Column:
    """Return numbers of any shape as one column."""
    return np.ascontiguousarray(np.asarray(values, dtype=np.int64).reshape(-1))


def joined(columns: list[Column]) -> Column:
    """Return columns one after the other as one."""
    return flat(np.concatenate(columns)) if columns else flat([])


def offsets(columns: list[Column]) -> Column:
    """Return where each of some columns starts when they are joined, and where the last one ends."""
    return flat(np.cumsum([0, *map(len, columns)]))
