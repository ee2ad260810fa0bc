"""Index labels: symbolic elements on which a program runs to prove what it computes (`ir.analysis.proof`).

A label names a term and a global element. An element of input tensor T has the term T. A partial sum of a
product has a term that counts how often each k was added. Multiplication checks that the operands are blocks of
the declared tensors and that their k agree. Addition checks that positions agree, and adds the counts. At the end
every output element must be the element of its tensor at its own position, with each k counted once.

A tensor that arrives as partial sums may be multiplied before it is reduced, because a product is linear. A
summand of A B is then one k of one term of A and of B, and each combination must be counted once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshweave.base.errors import ProgramError
from meshweave.describe.layout import Layout, Partial
from meshweave.ir.analysis.dataflow import Dataflow
from meshweave.ir.analysis.interpret import Interpreter, numpy_index
from meshweave.ir.program import Buffer, Product, Program, Same
from meshweave.ir.program.ops import Call
from meshweave.ir.program.views import View

LABEL = np.dtype([("term", np.int32), ("index", np.int64), ("writer", np.int32)])
Labels = NDArray[Any]

UNWRITTEN, ZERO = 0, 1


@dataclass(frozen=True)
class PartialSum:
    """A sum to which some of its summands have been added.

    Attributes:
        basis: what is summed: a product's output tensor, or a tensor that arrives as partial sums.
        counts: how often each summand was added, for a product in the order (k, term of a, term of b). All ones
            mean the finished element. An empty tuple means the result of a call: it can be moved and added, and
            never counts as an element of a declared product.
    """

    basis: str
    counts: tuple[int, ...]

    @property
    def is_complete(self) -> bool:
        """Return whether every summand was added exactly once."""
        return all(count == 1 for count in self.counts)

    @property
    def is_opaque(self) -> bool:
        """Return whether the value comes from a call, so that its summands are unknown."""
        return not self.counts


@dataclass
class LabelAlgebra:
    """The `ir.analysis.interpret.Algebra` of index labels; the module docstring defines a label.

    Attributes:
        terms: every term so far, indexed by its number in the labels.
        ids: the number of each term.
        writers: the name of every op that wrote an element, indexed by its number in the labels.
        interpreter: the interpreter that runs the program, set by its creator; messages name its current op.
    """

    program: Program
    flow: Dataflow
    terms: list[PartialSum | None] = field(default_factory=lambda: [None, None])
    ids: dict[PartialSum, int] = field(default_factory=dict)
    writers: list[str] = field(default_factory=lambda: ["nothing"])
    interpreter: Interpreter | None = None
    _writer_ids: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.products = {m.out: m for m in self.program.computes if isinstance(m, Product)}
        self.same = {m.out: m.src for m in self.program.computes if isinstance(m, Same)}
        self.arrived = self._arrived()
        self.summands = {tensor: terms for tensor, (terms, _) in self.arrived.items()}
        self.summands |= {out: math.prod(self._extents(product)) for out, product in self.products.items()}

    def _arrived(self) -> dict[str, tuple[int, bool]]:
        """Return (number of terms, whether they are to be summed) of each tensor that arrives partial."""
        arrived: dict[str, tuple[int, bool]] = {}
        for buffer in self.program.buffers:
            tensor, layout = buffer.tensor, buffer.layout
            if buffer.kind != "input" or tensor is None or layout is None or not layout.partial_axes:
                continue
            if tensor in arrived or tensor in self.products:
                conflict = "is computed, too" if tensor in self.products else "arrives in terms twice"
                raise ProgramError(f"holds terms of {tensor}, which {conflict}", buffer=buffer.name)
            linear = all(p.op == "sum" for p in layout.placements if isinstance(p, Partial))
            arrived[tensor] = len(partial_term_ranks(layout, layout.mesh.ranks[0])), linear
        return arrived

    def _extents(self, product: Product) -> tuple[int, int, int]:
        """Return the number of k, of terms of a and of terms of b that a product sums over."""
        inner = self.program.tensor_of[product.a].shape[0 if product.transpose_a else 1]
        return inner, self.arrived.get(product.a, (1,))[0], self.arrived.get(product.b, (1,))[0]

    def term_number(self, term: PartialSum) -> int:
        """Return the number of a term, which is registered at first use; equal terms share a number."""
        if term not in self.ids:
            self.ids[term] = len(self.terms)
            self.terms.append(term)
        return self.ids[term]

    def finished_term(self, tensor: str) -> int:
        """Return the number of the term of a finished element of `tensor`."""
        return self.term_number(PartialSum(tensor, (1,) * self.summands.get(tensor, 1)))

    # --- algebra --------------------------------------------------------------------------------------

    def read(self, block: Labels) -> Labels:
        """Return the block. Raises ProgramError where an element was never written."""
        if (block["term"] == UNWRITTEN).any():
            at = tuple(int(i) for i in np.argwhere(block["term"] == UNWRITTEN)[0])
            raise ProgramError(f"reads what was never written, first at {at} of the view")
        return block

    def write(self, block: Labels) -> Labels:
        """Return a copy of the block that names the current op as its writer."""
        assert self.interpreter is not None
        block = block.copy()
        label = self.flow.label(self.interpreter.current)
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

    def matmul(self, a: Labels, b: Labels) -> Labels:
        """Return the labels of a block product.

        Raises ProgramError where no declared product is of these blocks.
        """
        shape = (a.shape[0], b.shape[1])
        if 0 in (*a.shape, *b.shape) or self._all_are(a, ZERO) or self._all_are(b, ZERO):
            return self.zeros(shape, "")
        left, right = self._operand_term(a), self._operand_term(b)
        declared = [p for p in self.products.values() if (p.a, p.b) == (left.basis, right.basis)]
        if not declared:
            raise ProgramError(f"multiplies {left.basis} by {right.basis}, which no declared product does")
        for number, product in enumerate(declared):
            try:
                return self._product(a, b, product, left, right)
            except ProgramError:
                if number == len(declared) - 1:
                    raise
        raise AssertionError

    def _product(self, a: Labels, b: Labels, product: Product, left: PartialSum, right: PartialSum) -> Labels:
        m, k = self._axes(a, product.a, product.transpose_a)
        k_right, n = self._axes(b, product.b, product.transpose_b)
        if not np.array_equal(k, k_right):
            bad = int(np.argmax(k != k_right)) if k.shape == k_right.shape else 0
            raise ProgramError(f"multiplies k = {k[bad]} of {product.a} by k = {k_right[bad]} of {product.b}")
        counts = np.bincount(k, minlength=self._extents(product)[0])
        for term in (left, right):
            if term.basis in self.arrived:
                counts = np.kron(counts, term.counts)
        out = np.zeros((len(m), len(n)), LABEL)
        out["term"] = self.term_number(PartialSum(product.out, tuple(counts.tolist())))
        out["index"] = m[:, None] * self.program.tensor_of[product.out].shape[1] + n[None, :]
        return out

    def add(self, x: Labels, y: Labels) -> Labels:
        """Return the labels of a sum. Raises ProgramError where the elements do not belong together."""
        out = np.where(x["term"] == ZERO, y, x)
        both = (x["term"] != ZERO) & (y["term"] != ZERO)
        if not both.any():
            return out
        opaque = [number for number, term in enumerate(self.terms) if term is not None and term.is_opaque]
        placed = both & ~np.isin(x["term"], opaque) & ~np.isin(y["term"], opaque)
        if (x["index"] != y["index"])[placed].any():
            raise ProgramError("adds elements of different positions")
        pairs, inverse = np.unique(np.stack([x["term"][both], y["term"][both]]), axis=1, return_inverse=True)
        sums = np.array([self._sum(int(p), int(q)) for p, q in pairs.T], np.int32)
        out["term"][both] = sums[inverse.reshape(-1)]
        return out

    def _sum(self, p: int, q: int) -> int:
        left, right = self.terms[p], self.terms[q]
        assert left is not None and right is not None
        if left.is_opaque or right.is_opaque:
            return self.term_number(PartialSum("a sum with what a call made", ()))
        if left.basis != right.basis or len(left.counts) != len(right.counts):
            raise ProgramError(f"adds a term of {left.basis} to one of {right.basis}")
        if len(left.counts) == 1:
            raise ProgramError(f"adds a finished element of {left.basis} to itself")
        return self.term_number(
            PartialSum(left.basis, tuple(a + b for a, b in zip(left.counts, right.counts, strict=True)))
        )

    def reduce(self, op: str, terms: Sequence[Labels]) -> Labels:
        """Return the sum of some blocks. Raises ProgramError for any other reduction."""
        if op != "sum":
            raise ProgramError(f"labels know sums only, not '{op}'")
        total = terms[0].copy()
        for term in terms[1:]:
            total = self.add(total, term)
        return total

    def call(self, op: Call, rank: int, ins: list[Labels]) -> list[Labels]:
        """Return the labels of a call's outputs.

        An output in a declared tensor is taken for the finished elements of that tensor; one in scratch is an
        opaque term. Raises ProgramError for an input that still lacks a summand.
        """
        for view, block in zip(op.ins, ins, strict=True):
            self._check_input(view, block, rank)
        outs = []
        for view in op.outs:
            buffer = self.program.buffer_of[view.buffer]
            assert self.interpreter is not None
            block = np.zeros(view.shape, LABEL)
            if buffer.tensor is not None:
                block = element_labels(self, buffer, rank)[numpy_index(view)].copy()
            else:
                block["term"] = self.term_number(
                    PartialSum(f"{op.fn}({self.flow.label(self.interpreter.current)})", ())
                )
                block["index"] = np.arange(block.size).reshape(block.shape)
            outs.append(block)
        return outs

    def _check_input(self, view: View, block: Labels, rank: int) -> None:
        """Raise ProgramError for unfinished sums, or elements that are not those of the buffer's tensor."""
        buffer = self.program.buffer_of[view.buffer]
        if buffer.layout is not None and buffer.layout.partial_axes:
            return
        story = ""
        for term in (self.terms[int(i)] for i in np.unique(block["term"])):
            if term is not None and not term.is_complete:
                story = f"unfinished sums of {term.basis}: {self.describe_faults(term)}"
        if not story and buffer.tensor in self.products.keys() | self.same.keys():
            expected = self.finished_labels(buffer, rank)[numpy_index(view)]
            wrong = (block["term"] != expected["term"]) | (block["index"] != expected["index"])
            if wrong.any():
                at = tuple(map(int, np.argwhere(wrong)[0]))
                story = f"what is not {buffer.tensor}, first at {at} of the view"
        if story:
            assert self.interpreter is not None
            label = self.flow.label(self.interpreter.current)
            raise ProgramError(f"gives a call {story}", op=label, rank=rank, buffer=view.buffer)

    def finished_labels(self, buffer: Buffer, rank: int) -> Labels:
        """Return the labels that a buffer of `rank` must hold when its tensor is finished."""
        labels = element_labels(self, buffer, rank)
        if buffer.tensor in self.same:
            labels["term"] = self.finished_term(self.same[buffer.tensor])
        return labels

    # --- reading labels -------------------------------------------------------------------------------

    @staticmethod
    def _all_are(block: Labels, term: int) -> bool:
        return bool((block["term"] == term).all())

    def _operand_term(self, block: Labels) -> PartialSum:
        """Return the one term of an operand's elements: finished, or a term of a tensor that arrives partial."""
        ids = np.unique(block["term"])
        terms = [self.terms[int(i)] for i in ids]
        if len(terms) != 1 or terms[0] is None:
            names = sorted({term.basis if term else "zeros" for term in terms})
            names = names if len(names) > 1 else [f"different sums of {names[0]}"]
            raise ProgramError(f"multiplies a block that mixes {', '.join(names)}")
        linear = self.arrived.get(terms[0].basis, (1, False))[1]
        if not (terms[0].is_complete or linear):
            raise ProgramError(
                f"multiplies unfinished sums of {terms[0].basis}: {self.describe_faults(terms[0])}"
            )
        return terms[0]

    def _axes(
        self, block: Labels, tensor: str, transposed: bool
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the global row and column numbers of a block, after its transposition if any."""
        columns = self.program.tensor_of[tensor].shape[1]
        first, second = np.divmod(block["index"], columns)
        rows, cols = (second, first) if transposed else (first, second)
        if (rows != rows[:, :1]).any() or (cols != cols[:1, :]).any():
            raise ProgramError(f"multiplies something that is no block of {tensor}")
        return rows[:, 0], cols[0, :]

    def describe_faults(self, term: PartialSum) -> str:
        """Return, in words, the summands that a term lacks or has more than once."""
        lacking = [i for i, count in enumerate(term.counts) if count == 0]
        doubled = [i for i, count in enumerate(term.counts) if count > 1]
        parts = [f"lacks {self._summands(term.basis, lacking)}"] if lacking else []
        parts += [f"has {self._summands(term.basis, doubled)} more than once"] if doubled else []
        return " and ".join(parts) or "complete"

    def _summands(self, basis: str, numbers: Sequence[int]) -> str:
        """Return summands in words: `k = 3`; `k = 3 of term 1 of A` if A arrived partial; `term 1` of A itself."""
        product = self.products.get(basis)
        if product is None:
            return f"term {_some(numbers)}"
        extents = self._extents(product)
        groups: dict[str, list[int]] = {}
        for number in numbers:
            k, *terms = (int(i) for i in np.unravel_index(number, extents))
            named = zip((product.a, product.b), extents[1:], terms, strict=True)
            of = " and ".join(f"term {term} of {tensor}" for tensor, count, term in named if count > 1)
            groups.setdefault(of, []).append(k)
        return _some([f"k = {_some(k)}{of and ' of ' + of}" for of, k in sorted(groups.items())], "; ")


def _some(values: Sequence[object], between: str = ", ") -> str:
    shown = between.join(map(str, values[:4]))
    return shown + (f" and {len(values) - 4} more" if len(values) > 4 else "")


def partial_term_ranks(layout: Layout, rank: int) -> list[int]:
    """Return the ranks whose local values are the terms of those of `rank`, in order of their coordinates."""
    holders = [rank]
    for axis in layout.partial_axes:
        holders = [other for holder in holders for other in layout.mesh.group(holder, axis)]
    return holders


def element_labels(algebra: LabelAlgebra, buffer: Buffer, rank: int) -> Labels:
    """Return the labels of the finished elements of a buffer's tensor, on one rank."""
    assert buffer.tensor is not None and buffer.layout is not None
    shape = algebra.program.tensor_of[buffer.tensor].shape
    indices = buffer.layout.indices(shape, rank)
    block = np.zeros(tuple(len(dim) for dim in indices), LABEL)
    flat = np.ravel_multi_index(np.ix_(*indices), shape) if block.size else np.zeros(block.shape, np.int64)
    block["index"] = flat
    block["term"] = algebra.finished_term(buffer.tensor)
    return block
