"""A program template as columns of integers, with what the core needs to prove that it is sound.

To the template come names, reductions and dtypes in which partners agree, and the expressions that have no meaning
for the core but must have a value. `csrc/shapes.hpp` says what each number of an op is.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np

from meshweave._core import Rows, read_statements
from meshweave.base.errors import ProgramError
from meshweave.base.units import DTYPES
from meshweave.describe.layout import layouts
from meshweave.ir.columns.op_fields import flat
from meshweave.ir.columns.template import TemplateColumns
from meshweave.ir.program import Program, ops
from meshweave.ir.program.call_dims import CALL_DIMS
from meshweave.ir.program.declarations import is_loop_index
from meshweave.ir.program.expressions import Index
from meshweave.ir.program.release import TILE_ORDERS, CollectiveStep, Release

MAX_OPS = 1 << 19
"""Ops of all ranks of a program that the core proves; more are left to the reference."""
ANY = int(np.iinfo(np.int64).min)
"""The lower bound of an expression that may have any value."""
REDUCTIONS = {op: number for number, op in enumerate(layouts.REDUCTIONS)}
"""The numbers of the reductions that the core knows; other words get the numbers after these."""


class UnknownError(ProgramError):
    """A program has what the C++ core does not know, or what only the proof in Python can refuse in words."""


class ProofColumns(TemplateColumns):
    """A program template as columns of integers, for its proof.

    Attributes:
        functions: the number of each function that calls run, by name.
        reductions: the number of each reduction, by name.

    Raises:
        UnknownError: the program has what the core does not know.
        ProgramError: an op names what is not declared.
    """

    def __init__(self, program: Program) -> None:
        self.functions: dict[str, int] = {}
        self.reductions = dict(REDUCTIONS)
        self._names: dict[str, int] = {}
        self._steps: dict[tuple[object, ...], int] = {}
        self._known_ranks = frozenset(program.ranks)
        self._proof_rows = Rows()
        self._checks = array("q")
        if program.includes:
            raise UnknownError("the core knows no includes")
        super().__init__(program)
        dtypes: dict[str, int] = {}
        self.data["max_ops"] = flat([MAX_OPS])
        self.data["proof_ops"] = flat(self._proof_rows)
        self.data["checks"] = flat(self._checks)
        self.data["dtypes"] = flat([dtypes.setdefault(b.dtype, len(dtypes)) for b in program.buffers])

    def reduction(self, name: str) -> int:
        """Return the integer that stands for a reduction ("sum", ...); a new one at its first use."""
        return self.reductions.setdefault(name, len(self.reductions))

    def _describe_statements(self) -> None:
        read_statements(self, self.program.body)  # writes plain moves and messages itself

    def _set(self, where: str | tuple[int, ...]) -> int:
        is_known = where in self._at if isinstance(where, str) else self._known_ranks.issuperset(where)
        if not is_known:
            raise UnknownError("runs on ranks that are not declared")
        return super()._set(where)

    def _loop_slot(self, name: str) -> int:
        """Return the slot of a loop index."""
        if not is_loop_index(name):
            raise UnknownError("has a loop index of no such name")
        return self.expressions.slot(name)

    def describe_op(self, op: ops.Op) -> None:
        """Append the row of integers of an op as written, and what the proof needs of it besides.

        Raises UnknownError for what the core does not know, ProgramError for names that are not declared.
        """
        super().describe_op(op)
        number = self.num_ops - 1
        function = outs = step = dim = reduction = -1
        received = 0, 0
        if isinstance(op, ops.Call):
            self._check_call(number, op)
            function, outs = self.functions.setdefault(op.fn, len(self.functions)), len(op.outs)
        elif isinstance(op, ops.AllToAll):
            dim, received = op.concat_dim, self.sizes(op.recv_sizes)
            if received[0] == 1 or dim < 0:
                raise UnknownError("the core knows no sizes that differ between members")
        elif isinstance(op, (ops.Send, ops.Permute)):
            if op.step is not None:
                step = self._step(number, op.step, is_joint=isinstance(op, ops.Permute))
        elif isinstance(op, (ops.Matmul, ops.Copy, ops.Put)):
            if op.release is not None:
                self._check_release(number, op.release, op)
        elif isinstance(op, (ops.ReduceScatter, ops.AllReduce, ops.Reduce, ops.Accumulate)):
            reduction = self.reduction(op.op)
        name = self._names.setdefault(op.name, len(self._names))
        self._proof_rows.extend((name, reduction, dim, *received, function, step, outs))

    def _step(self, op: int, step: CollectiveStep, *, is_joint: bool) -> int:
        if is_joint and not isinstance(step.count, int):
            raise UnknownError("the core compares steps of a plain number only")
        self._check(op, (step.count,))
        key = step.collective, step.axis, step.num_directions, step.count if is_joint else 0
        return self._steps.setdefault(key, len(self._steps))

    def _check_release(self, number: int, release: Release, op: ops.Op) -> None:
        if len(release.tile) > len(op.out.selectors) or release.order not in TILE_ORDERS:  # type: ignore[attr-defined]
            raise UnknownError("releases along a dim, or in an order, that there is not")
        self._check(number, release.tile, 1)
        self._check(number, (release.first,))

    def _check_call(self, number: int, op: ops.Call) -> None:
        dims = CALL_DIMS.get(op.work)
        if (op.work and dims is None) or (op.dtype and op.dtype not in DTYPES):
            raise UnknownError("works at what is not declared")
        if len(op.shape) not in (0, len(dims or ())):
            raise UnknownError("has other sizes than its work")
        self._check(number, (op.flops, op.bytes, op.stash_bytes, op.freed_bytes, *op.args))
        self._check(number, op.shape, 0)

    def _check(self, op: int, values: Iterable[Index], low: int = ANY) -> None:
        """Note that expressions of an op must have a value, of at least `low`."""
        for value in values:
            if not isinstance(value, int):
                self._checks.extend((op, self.expressions.number(value), low))
            elif value < low:
                raise UnknownError(f"has {value}, which must be at least {low}")
