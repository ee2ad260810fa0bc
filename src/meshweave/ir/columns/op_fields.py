"""One op of a program template as a row of integers, and the arrays that rows are joined to."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshweave._core import Rows
from meshweave.base.errors import ProgramError
from meshweave.ir.program.call_dims import CALL_PARTS
from meshweave.ir.program.ops import OP_TYPES, Call, Op

Column = NDArray[np.int64]

_PART_NUMBERS = {part: number for number, part in enumerate(CALL_PARTS)} | {"in_place": 0}
"""Of parts of a stage. Where an output lies is nothing to what reads these rows."""


(
    KIND,
    LANE,
    OUT,
    SRC,
    SECOND_OPERAND,
    FLAGS,
    AXIS,
    DIM,
    FIRST,
    SECOND,
    SIZES_MODE,
    SIZES,
    COMM,
    STEP_INDEX,
    DIRECTIONS,
    PRICE,
    FLOPS,
    NBYTES,
    STASH,
    PART,
    FIRST_ARG,
    NUM_ARGS,
    RATE,
    NUM_WORK_SIZES,
) = range(24)
"""The places of the fields of an op in its row, in the order of the core's `OpRow`."""

NUM_FIELDS = NUM_WORK_SIZES + 1

OpFields = list[int]
"""The row of one op. Fields that it does not have are at their defaults, as `blank_fields` sets them."""


def _blank(kind: int) -> tuple[int, ...]:
    row = [-1] * NUM_FIELDS
    row[KIND], row[DIRECTIONS] = kind, 1
    for field in (FLAGS, DIM, SIZES_MODE, SIZES, PART, NUM_ARGS, NUM_WORK_SIZES):
        row[field] = 0
    return tuple(row)


_BLANK = {kind: _blank(number) for number, kind in enumerate(OP_TYPES)}


def blank_fields(op: Op) -> OpFields:
    """Return a new row of integers for an op: its kind, and the default (-1, 0 or 1) of every other field."""
    return list(_BLANK[op.kind])


def part_number(op: Call) -> int:
    """Return the number of a call's `part`: its index in CALL_PARTS, where 0 is none; 0 for "in_place", too.

    Raises ProgramError for an unknown part.
    """
    if op.part not in _PART_NUMBERS:
        raise ProgramError(
            f"has no part '{op.part}'; there are {', '.join(CALL_PARTS[1:])}", op=op.name or op.kind
        )
    return _PART_NUMBERS[op.part]


def flat(values: Any) -> Column:
    """Return integers of any shape as one 1-D column of int64."""
    if isinstance(values, Rows):
        return values.column()
    if isinstance(values, array):
        return np.frombuffer(values, np.int64) if values else np.empty(0, np.int64)
    return np.ascontiguousarray(np.asarray(values, dtype=np.int64).reshape(-1))


def joined(columns: list[Column]) -> Column:
    """Return columns concatenated to one."""
    return flat(np.concatenate(columns)) if columns else flat([])


def offsets(columns: list[Column]) -> Column:
    """Return the index at which each column starts when they are joined, and the end of the last: (0, 2, 5)."""
    return flat(np.cumsum([0, *map(len, columns)]))
