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
from meshweave.ir.analysis.dataflow import Dataflow
from meshweave.ir.analysis.interpret import Interpreter, numpy_index
from meshweave.ir.analysis.positions import CallPositions, Labels, Positions, merges, positions_of
from meshweave.ir.analysis.terms import OPAQUE, UNWRITTEN, ZERO, Counts, Term, TermTable
from meshweave.ir.program import Buffer, Program
from meshweave.ir.program.meanings import Function, Product
from meshweave.ir.program.ops import Call
from meshweave.ir.program.views import View

LABEL = np.dtype([("term", np.int32), ("index", np.int64), ("writer", np.int32)])


@dataclass
class LabelAlgebra:
    """The `ir.analysis.interpret.Algebra` of index labels; the module docstring defines a label.

    Attributes:
        table: the terms.
        writers: the name of every op that wrote an element, indexed by its number in the labels.
        interpreter: the interpreter that runs the program, set by its creator; messages name its current op.
    """

    program: Program
    flow: Dataflow
    table: TermTable = field(init=False)
    writers: list[str] = field(default_factory=lambda: ["nothing"])
    interpreter: Interpreter | None = None
    _writer_ids: dict[str, int] = field(default_factory=dict)
    _stashes: dict[tuple[object, ...], list[tuple[View, Labels]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.table = TermTable(self.program)

    def _label(self) -> str:
        assert self.interpreter is not None
        return self.flow.label(self.interpreter.current)

    # --- elements -------------------------------------------------------------------------------------

    def read(self, block: Labels) -> Labels:
        """Return the block. Raises ProgramError where an element was never written."""
        if (block["term"] == UNWRITTEN).any():
            at = tuple(int(i) for i in np.argwhere(block["term"] == UNWRITTEN)[0])
            raise ProgramError(f"reads what was never written, first at {at} of the view")
        return block

    def write(self, block: Labels) -> Labels:
        """Return a copy of the block that names the current op as its writer."""
        block = block.copy()
        label = self._label()
        if label not in self._writer_ids:
            self._writer_ids[label] = len(self.writers)
            self.writers.append(label)
        block["writer"] = self._writer_ids[label]
        return block

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Labels:
        """Return a block of zeros."""
        block = np.zeros(shape, LABEL)
        block["term"] = ZERO
        return block

    # --- products -------------------------------------------------------------------------------------

    def matmul(self, a: Labels, b: Labels) -> Labels:
        """Return the labels of a block product (..., M, K) x (..., K, N).

        Raises ProgramError where no declared product is of these blocks.
        """
        shape = (*(a.shape[:-2] or b.shape[:-2]), a.shape[-2], b.shape[-1])
        if 0 in (*a.shape, *b.shape) or _all_are(a, ZERO) or _all_are(b, ZERO):
            return self.zeros(shape, "")
        left, right = self._operand_term(a), self._operand_term(b)
        of_a, of_b = self._factors(left), self._factors(right)
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

    def _factors(self, number: int) -> Sequence[str]:
        """Return the tensors that an operand's term may stand for in a product."""
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
        """Return the labels of a sum. Raises ProgramError where the elements do not belong together."""
        return self._combine("sum", x, y)

    def reduce(self, op: str, terms: Sequence[Labels]) -> Labels:
        """Return the reduction of some blocks. Raises ProgramError where they are no parts of one value."""
        total = terms[0].copy()
        for term in terms[1:]:
            total = self._combine(op, total, term)
        return total

    def _combine(self, op: str, x: Labels, y: Labels) -> Labels:
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

    # --- calls ----------------------------------------------------------------------------------------

    def call(self, op: Call, rank: int, ins: list[Labels]) -> list[Labels]:
        """Return the labels of a call's outputs, as their meanings say.

        Without a meaning, an output in a declared tensor is taken for the finished elements of that tensor,
        and one in scratch is an opaque term. Raises ProgramError for inputs that are not what the call needs.
        """
        given = list(zip(op.ins, ins, strict=True))
        key = (rank, op.stash, *op.args)
        stashed = self._stashes.get(key) if op.stash and op.part in ("input_grad", "weight_grad") else None
        outs = []
        for number, view in enumerate(op.outs):
            declared = self.table.functions.get((op.fn, number))
            if declared:
                meaning = self._best(declared, ins)
                try:
                    outs.append(self._apply(meaning, view, rank, given, stashed))
                except ProgramError as error:
                    where = error.buffer or (op.ins[0].buffer if op.ins else view.buffer)
                    raise ProgramError(error.message, op=self._label(), rank=rank, buffer=where) from None
            else:
                for in_view, block in given:
                    self._check_trusted_input(in_view, block, rank)
                outs.append(self._trusted(view, rank))
        if op.stash and op.part == "forward":
            self._stashes[key] = [(view, block.copy()) for view, block in given]
        elif op.stash and op.part == "weight_grad":
            self._stashes.pop(key, None)
        return outs

    def apply(
        self,
        fn: str,
        output: int,
        view: View,
        given: Sequence[tuple[View, Labels]],
        stashed: Sequence[tuple[View, Labels]] | None,
    ) -> Labels:
        """Return the labels of result number `output` of a function, in the shape of `view`, as a meaning says.

        Raises ProgramError where none is declared, or the inputs are not what it names.
        """
        declared = self.table.functions.get((fn, output))
        if not declared:
            raise ProgramError(f"calls '{fn}', which no declared meaning does")
        meaning = self._best(declared, [block for _, block in given])
        return self._apply(meaning, view, -1, given, stashed)

    def _best(self, declared: Sequence[Function], ins: Sequence[Labels]) -> Function:
        """Return the meaning whose inputs are those that a call has, or most of them."""

        def matching(meaning: Function) -> int:
            return sum(
                part.tensor in self._factors_of(block) for part, block in zip(meaning.ins, ins, strict=False)
            )

        return max(declared, key=matching) if len(declared) > 1 else declared[0]

    def _factors_of(self, block: Labels) -> set[str]:
        numbers = set(np.unique(block["term"]).tolist()) - {UNWRITTEN, ZERO}
        return {tensor for number in numbers for tensor in self._factors(number)}

    def _apply(
        self,
        meaning: Function,
        view: View,
        rank: int,
        given: Sequence[tuple[View, Labels]],
        stashed: Sequence[tuple[View, Labels]] | None,
    ) -> Labels:
        """Return the labels of one output of a call that a meaning declares."""
        if len(given) != len(meaning.ins):
            raise ProgramError(
                f"has {len(given)} inputs; call '{meaning.fn}' is declared with {len(meaning.ins)}"
            )
        read = list(zip(meaning.ins, given, strict=True))
        if meaning.stash:
            if stashed is None:
                raise ProgramError("reads a stash that no forward part has filled")
            if len(stashed) != len(meaning.stash):
                raise ProgramError(
                    f"reads a stash of {len(stashed)} inputs, declared with {len(meaning.stash)}"
                )
            read += zip(meaning.stash, stashed, strict=True)
        running = self.table.running[meaning.out]
        places = CallPositions(meaning.fn)
        so_far: list[tuple[str, View, Labels]] = []
        for part, (in_view, block) in read:
            shape = self.program.tensor_of[part.tensor].shape
            if part.tensor in running:
                so_far.append((part.tensor, in_view, block))
                if _all_are(block, ZERO):
                    continue
            else:
                self._check_finished(part.tensor, in_view, block)
            places.bind(part, shape, block, in_view.buffer)
        made = self._result(meaning, view, rank, places)
        if so_far:
            self._check_alike(so_far)
        for tensor, in_view, block in so_far:
            if tensor == meaning.out:
                if block.size != made.size:
                    raise ProgramError(
                        f"continues {block.size} elements of {tensor} and makes {made.size}",
                        buffer=in_view.buffer,
                    )
                made = self._continued(meaning, block.reshape(made.shape), made)
        return made

    def _continued(self, meaning: Function, so_far: Labels, made: Labels) -> Labels:
        op = meaning.reduce
        if op not in ("max", "min", "prod") and _all_are(so_far, ZERO):
            return made
        return self._combine(op, so_far, made)

    def _check_alike(self, so_far: Sequence[tuple[str, View, Labels]]) -> None:
        """Raise ProgramError unless all reductions so far have the same counts, or are all zeros."""
        counts: set[bytes] = set()
        for tensor, view, block in so_far:
            for number in np.unique(block["term"]).tolist():
                term = self.table.terms[number]
                if term is not None and term.bases != {tensor}:
                    raise ProgramError(f"continues {term} where {tensor} is expected", buffer=view.buffer)
                counts.add(b"" if term is None else term.parts[0][1])
        if len(counts) > 1:
            names = ", ".join(dict.fromkeys(tensor for tensor, _, _ in so_far))
            raise ProgramError(f"continues different reductions of {names}", buffer=so_far[0][1].buffer)

    def _result(self, meaning: Function, view: View, rank: int, places: CallPositions) -> Labels:
        """Return the labels of what a call makes of the positions of its inputs, in the shape of `view`."""
        shape = self.program.tensor_of[meaning.out].shape
        block = np.zeros(view.shape, LABEL)
        if not block.size:
            return block
        lists: list[Positions] = []
        for dim, (name, size) in enumerate(zip(meaning.part.dims, shape, strict=True)):
            known = np.arange(size) if name is None else places.of.get(name)
            lists.append(self._own_positions(meaning, view, rank, dim) if known is None else known)
        flat = np.ravel_multi_index(np.ix_(*lists), shape) if lists else np.zeros((), np.int64)
        if not merges(view.shape, flat.shape):
            made = "x".join(str(len(listed)) for listed in lists)
            raise ProgramError(
                f"makes {made} elements of {meaning.out}, {view} has {view.shape}", buffer=view.buffer
            )
        block["index"] = flat.reshape(view.shape)
        counts: Counts = np.ones(1, np.int32)
        for name, extent in zip(meaning.reduced, self.table.extents(meaning.out), strict=True):
            at = places.of.get(name, np.arange(0))
            counts = np.kron(counts, np.bincount(at, minlength=extent).astype(np.int32))
        is_empty_sum = meaning.reduce == "sum" and not counts.any()
        block["term"] = ZERO if is_empty_sum else self.table.part(meaning.out, counts)
        return block

    def _own_positions(self, meaning: Function, view: View, rank: int, dim: int) -> Positions:
        """Return the positions that an output has by its buffer, where no input tells."""
        buffer = self.program.buffer_of[view.buffer]
        if buffer.tensor != meaning.out:
            raise ProgramError(
                f"makes {meaning.part} of inputs that do not say which {meaning.part.dims[dim]}, into {view} "
                f"that holds no {meaning.out}",
                buffer=view.buffer,
            )
        shape = self.program.tensor_of[meaning.out].shape
        lists = positions_of(element_labels(self.table, buffer, rank)[numpy_index(view)]["index"], shape)
        assert lists is not None, "a view of a shard is a block"
        return lists[dim]

    def _check_finished(self, tensor: str, view: View, block: Labels) -> None:
        """Raise ProgramError unless a call's input is finished elements of `tensor`."""
        wrong = block["term"] != self.table.finished(tensor)
        if not wrong.any():
            return
        number = int(block["term"][wrong][0])
        term = self.table.terms[number]
        at = tuple(map(int, np.argwhere(wrong)[0]))
        if term is not None and not term.is_opaque and not self.table.tensors_of(number):
            story = f"unfinished sums of {self.table.goal(number)}: {self.table.describe_faults(number)}"
        else:
            story = f"what is not {tensor}, first at {at} of the view"
        raise ProgramError(f"gives a call {story}", buffer=view.buffer)

    def _trusted(self, view: View, rank: int) -> Labels:
        buffer = self.program.buffer_of[view.buffer]
        if buffer.tensor is not None:
            labels: Labels = element_labels(self.table, buffer, rank)[numpy_index(view)]
            return labels.copy()
        block = np.zeros(view.shape, LABEL)
        block["term"] = self.table.number(OPAQUE)
        block["index"] = np.arange(block.size).reshape(block.shape)
        return block

    def _check_trusted_input(self, view: View, block: Labels, rank: int) -> None:
        """Raise ProgramError for unfinished sums, or elements that are not those of the buffer's tensor."""
        buffer = self.program.buffer_of[view.buffer]
        if buffer.layout is not None and buffer.layout.partial_axes:
            return
        story = ""
        for number in np.unique(block["term"]).tolist():
            term = self.table.terms[number]
            if term is not None and not term.is_opaque and not self.table.tensors_of(number):
                story = f"unfinished sums of {self.table.goal(number)}: {self.table.describe_faults(number)}"
        if not story and buffer.tensor in self.table.meanings:
            expected = element_labels(self.table, buffer, rank)[numpy_index(view)]
            wrong = (block["term"] != expected["term"]) | (block["index"] != expected["index"])
            if wrong.any():
                at = tuple(map(int, np.argwhere(wrong)[0]))
                story = f"what is not {buffer.tensor}, first at {at} of the view"
        if story:
            raise ProgramError(f"gives a call {story}", op=self._label(), rank=rank, buffer=view.buffer)


def _all_are(block: Labels, term: int) -> bool:
    return bool((block["term"] == term).all())


def element_labels(table: TermTable, buffer: Buffer, rank: int) -> Labels:
    """Return the labels of the finished elements of a buffer's tensor, on one rank."""
    assert buffer.tensor is not None and buffer.layout is not None
    shape = table.program.tensor_of[buffer.tensor].shape
    indices = buffer.layout.indices(shape, rank)
    block = np.zeros(tuple(len(dim) for dim in indices), LABEL)
    flat = np.ravel_multi_index(np.ix_(*indices), shape) if block.size else np.zeros(block.shape, np.int64)
    block["index"] = flat
    block["term"] = table.finished(buffer.tensor)
    return block
