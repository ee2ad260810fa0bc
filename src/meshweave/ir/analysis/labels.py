"""Index labels: symbolic elements on which a program runs to prove what it computes (`ir.analysis.proof`).

A label is a term (`ir.analysis.terms`) and a global element: its number in the row-major order of its tensor.
An element of input X has the term X. Multiplication checks that the operands are blocks of the declared
tensors and that their k agree; its term counts how often each k was added. A call checks that its inputs are
the parts of the declared tensors that its meaning names, and that equal names are equal positions. Addition
and reduction check that positions agree, and combine the counts. At the end every output element must be the
finished element of its tensor at its own position.

A tensor that arrives as partial sums may be multiplied before it is reduced, because a product is linear. A
summand of A B is then one k of one term of A and of B, and each combination must be counted once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from meshweave.base.errors import ProgramError
from meshweave.ir.analysis.call_labels import CallLabels, all_are
from meshweave.ir.analysis.dataflow import Dataflow
from meshweave.ir.analysis.interpret import Interpreter
from meshweave.ir.analysis.positions import LABEL, Labels, Positions
from meshweave.ir.analysis.terms import OPAQUE, UNWRITTEN, ZERO, Counts, Term, TermTable
from meshweave.ir.program import Program
from meshweave.ir.program.meanings import Product
from meshweave.ir.program.ops import Call


@dataclass
class LabelAlgebra:
    """Arithmetic on labels, by which `Interpreter` proves what a program computes instead of computing it.

    A label stands for one element of memory: a term (`ir.analysis.terms`: which summands of which declared tensor
    it holds) and a position (the element's row-major number in that tensor).

    Attributes:
        table: the terms.
        calls: computes the labels that calls write.
        writers: the name of every op that wrote an element, indexed by the field "writer" of labels.
        interpreter: the interpreter that runs the program, set by its creator; messages name its current op.
    """

    program: Program
    flow: Dataflow
    table: TermTable = field(init=False)
    writers: list[str] = field(default_factory=lambda: ["nothing"])
    interpreter: Interpreter | None = None
    _writer_ids: dict[str, int] = field(default_factory=dict)
    calls: CallLabels = field(init=False)

    def __post_init__(self) -> None:
        self.table = TermTable(self.program)
        self.calls = CallLabels(self)

    def label(self) -> str:
        """Return the name of the op that runs, for messages."""
        assert self.interpreter is not None
        return self.flow.label(self.interpreter.current)

    # --- elements -------------------------------------------------------------------------------------

    def read(self, block: Labels) -> Labels:
        """Return the block as it is. Raises ProgramError where an element of it was never written."""
        if (block["term"] == UNWRITTEN).any():
            at = tuple(int(i) for i in np.argwhere(block["term"] == UNWRITTEN)[0])
            raise ProgramError(f"reads what was never written, first at {at} of the view")
        return block

    def write(self, block: Labels) -> Labels:
        """Return a copy of the block whose labels name the op that is executed now as their writer."""
        block = block.copy()
        label = self.label()
        if label not in self._writer_ids:
            self._writer_ids[label] = len(self.writers)
            self.writers.append(label)
        block["writer"] = self._writer_ids[label]
        return block

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Labels:
        """Return a block, in `shape`, of labels that stand for zeros; `dtype` makes no difference."""
        block = np.zeros(shape, LABEL)
        block["term"] = ZERO
        return block

    # --- products -------------------------------------------------------------------------------------

    def matmul(self, a: Labels, b: Labels) -> Labels:
        """Return the labels of a block product (..., M, K) x (..., K, N).

        Raises ProgramError where no declared product is of these blocks.
        """
        shape = (*(a.shape[:-2] or b.shape[:-2]), a.shape[-2], b.shape[-1])
        if 0 in (*a.shape, *b.shape) or all_are(a, ZERO) or all_are(b, ZERO):
            return self.zeros(shape, "")
        left, right = self._operand_term(a), self._operand_term(b)
        of_a, of_b = self.factors(left), self.factors(right)
        declared = [p for p in self.table.products.values() if p.a in of_a and p.b in of_b]
        if not declared:
            names = (self.table.goal(number) for number in (left, right))
            raise ProgramError(f"multiplies {' by '.join(names)}, which no declared product does")
        for number, product in enumerate(declared):
            try:
                return self._product(a, b, product, left, right)
            except ProgramError:
                if number == len(declared) - 1:
                    raise
        raise AssertionError

    def factors(self, number: int) -> Sequence[str]:
        """Return the names of the tensors that a block may be part of, if its elements have term `number`."""
        return self.table.tensors_of(number) or sorted(self._of(number).bases)

    def _of(self, number: int) -> Term:
        term = self.table.terms[number]
        assert term is not None
        return term

    def _product(self, a: Labels, b: Labels, product: Product, left: int, right: int) -> Labels:
        shape = self.table.shape_of(product)
        sums = shape.sums_batch
        m, k = self._axes(a, product.a, product.transpose_a, is_left=True, sums_batch=sums)
        n, k_right = self._axes(b, product.b, product.transpose_b, is_left=False, sums_batch=sums)
        if not np.array_equal(k, k_right):
            bad = int(np.argmax(k != k_right)) if k.shape == k_right.shape else 0
            raise ProgramError(f"multiplies k = {k[bad]} of {product.a} by k = {k_right[bad]} of {product.b}")
        out = np.zeros(np.broadcast_shapes(m.shape, n.shape), LABEL)
        rows, batch = m % shape.m, m // shape.m
        columns, batch_right = n % shape.n, n // shape.n
        if not sums and shape.batch_a and shape.batch_b and (batch != batch_right).any():
            raise ProgramError(f"multiplies other batches of {product.a} and of {product.b}")
        batch = batch if shape.batch_a else batch_right
        out["index"] = (batch * shape.m + rows) * shape.n + columns if not sums else rows * shape.n + columns
        counts: Counts = np.bincount(k, minlength=self.table.extents(product.out)[0]).astype(np.int32)
        for tensor, number in ((product.a, left), (product.b, right)):
            if tensor in self.table.arrived:
                ((_, of_operand),) = self._of(number).parts
                counts = np.kron(counts, np.frombuffer(of_operand, np.int32))
        out["term"] = self.table.part(product.out, counts)
        return out

    def _axes(
        self, block: Labels, tensor: str, transposed: bool, *, is_left: bool, sums_batch: bool
    ) -> tuple[Positions, Positions]:
        """Return the positions of a block along the free dims and along k of a declared operand.

        Free positions are numbered (batch, row) and broadcast against the other operand's; those along k are
        one-dimensional, and with `sums_batch` numbered (batch, k).
        """
        *_, rows, columns = self.program.tensor_of[tensor].shape
        at, column = np.divmod(block["index"], columns)
        leading, row = np.divmod(at, rows)
        row, column, rows, columns = (
            (column, row, columns, rows) if transposed else (row, column, rows, columns)
        )
        free, inner, extent = (row, column, rows) if is_left else (column, row, columns)
        if sums_batch:
            inner = leading * (columns if is_left else rows) + inner
        else:
            free = leading * extent + free
        along = -1 if is_left else -2
        first: tuple[Any, ...] = (0,) * (block.ndim - 2) + ((0, slice(None)) if is_left else (slice(None), 0))
        line = inner[first]
        spread = line if is_left else line[:, None]
        constant = np.take(free, [0], axis=along)
        if (free != constant).any() or (inner != spread).any():
            raise ProgramError(f"multiplies something that is no block of {tensor}")
        return constant, line

    def _operand_term(self, block: Labels) -> int:
        """Return the one term of an operand's elements: finished, or a term of a tensor that arrives in parts."""
        numbers = np.unique(block["term"])
        terms = [self.table.terms[int(number)] for number in numbers]
        if len(terms) != 1 or terms[0] is None:
            names = sorted({str(term) if term else "zeros" for term in terms})
            names = names if len(names) > 1 else [f"different sums of {names[0]}"]
            raise ProgramError(f"multiplies a block that mixes {', '.join(names)}")
        number, term = int(numbers[0]), terms[0]
        if term.is_opaque:
            raise ProgramError(f"multiplies {term}, which no declared product does")
        if not self.table.tensors_of(number):
            basis = self.table.goal(number)
            arrived = self.table.arrived.get(basis)
            if arrived is None or arrived.op != "sum":
                raise ProgramError(
                    f"multiplies unfinished sums of {basis}: {self.table.describe_faults(number)}"
                )
        return number

    # --- sums and reductions --------------------------------------------------------------------------

    def add(self, x: Labels, y: Labels) -> Labels:
        """Return the labels of a sum, element by element.

        Raises ProgramError where elements of different positions are added, or values that no declared tensor
        sums.
        """
        return self.combine("sum", x, y)

    def reduce(self, op: str, terms: Sequence[Labels]) -> Labels:
        """Return the labels of the reduction `op` ("sum", ...) of blocks of one shape, element by element.

        Raises ProgramError where elements of different positions meet, or blocks are no parts of one value.
        """
        total = terms[0].copy()
        for term in terms[1:]:
            total = self.combine(op, total, term)
        return total

    def combine(self, op: str, x: Labels, y: Labels) -> Labels:
        """Return the labels of the sum, or other reduction `op`, of two blocks of one shape.

        Raises ProgramError where elements of different positions meet, where two values do not add up to part of
        a declared one, or where zeros are in a reduction other than "sum".
        """
        x_zero, y_zero = x["term"] == ZERO, y["term"] == ZERO
        if op != "sum" and (x_zero.any() or y_zero.any()):
            raise ProgramError(f"takes the {op} of zeros, which count as values there")
        out = np.where(x_zero, y, x)
        both = ~(x_zero | y_zero)
        if not both.any():
            return out
        p, q = x["term"][both], y["term"][both]
        pairs, inverse = np.unique(p.astype(np.int64) << 32 | q, return_inverse=True)
        combined = [self.table.combine(op, int(pair >> 32), int(pair & 0xFFFFFFFF)) for pair in pairs]
        numbers = np.array(combined, np.int32)[inverse.reshape(-1)]
        apart = x["index"][both] != y["index"][both]
        if apart.any() and (apart & (numbers != self.table.number(OPAQUE))).any():
            raise ProgramError("adds elements of different positions")
        out["term"][both] = numbers
        return out

    def call(self, op: Call, rank: int, ins: list[Labels]) -> list[Labels]:
        """Return the labels of the outputs of a call on global rank `rank`, from those of its inputs, `ins`.

        Raises ProgramError for inputs that are not what the call's meaning needs.
        """
        return self.calls.call(op, rank, ins)
