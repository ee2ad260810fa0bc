"""Terms: what an element of memory holds of a declared value, as counts of summands.

A term is a formal sum. For each tensor that goes into it, its basis, it counts how often each summand was
added: for a product each k, for the result of a call each position that is reduced over, for an input the
element itself. The term of a finished tensor follows from its meaning: a sum of tensors has the summands of
all of them, and a tensor that is the same as another has that one's. So a residual is recognised in whatever
order its parts were added.

For a basis that is reduced by "max" or "min", taking a part twice changes nothing, and counts stop at one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshweave.base.errors import ProgramError
from meshweave.describe.layout import Layout, Partial
from meshweave.ir.program import Program
from meshweave.ir.program.check_meanings import running_tensors
from meshweave.ir.program.meanings import Function, Product, Same, Sum
from meshweave.ir.program.product_shapes import ProductShape, product_shape

UNWRITTEN, ZERO = 0, 1
"""The numbers of what was never written, and of zeros."""

Counts = NDArray[np.int32]

_IDEMPOTENT = ("max", "min")


@dataclass(frozen=True)
class Term:
    """What an element holds of one or more tensors: how often each summand of an element of theirs was added.

    `parts` has for each tensor, its basis, sorted by name, the counts of its summands as bytes of int32. A term
    without parts is opaque: the result of a call without a declared meaning, which can be moved and added.
    """

    parts: tuple[tuple[str, bytes], ...]

    @property
    def is_opaque(self) -> bool:
        """Return whether the value comes from a call that no meaning declares."""
        return not self.parts

    @property
    def bases(self) -> frozenset[str]:
        """Return the names of the tensors whose summands the term counts."""
        return frozenset(basis for basis, _ in self.parts)

    def __str__(self) -> str:
        return " + ".join(basis for basis, _ in self.parts) or "what a call made"


OPAQUE = Term(())


@dataclass(frozen=True)
class ArrivedParts:
    """A tensor that input buffers hold as `count` partial terms, to be reduced by `op` ("sum", ...)."""

    count: int
    op: str


class TermTable:
    """The terms of a program, each with a number, and the rules by which two terms add up to a third.

    A term (`Term`) says what an element holds: which summands of which declared tensors. A tensor that is counted
    so is a basis.

    Attributes:
        terms: every term so far, indexed by its number; None for what was never written, and for zeros.
        meanings: the declared meanings by their result.
        products: the declared products by their result.
        functions: the declared results of calls by (fn, number of the result).
        running: by tensor, the inputs of its meaning that are reductions so far (`running_tensors`).
        arrived: the tensors that input buffers hold as partial terms, by name.

    Raises ProgramError where input buffers hold terms of a tensor that is computed, or of one tensor twice, or for
    different reductions.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.terms: list[Term | None] = [None, None]
        self._numbers: dict[Term, int] = {}
        self.meanings = {meaning.out: meaning for meaning in program.computes}
        self.products = {m.out: m for m in program.computes if isinstance(m, Product)}
        self.functions: dict[tuple[str, int], list[Function]] = {}
        for meaning in program.computes:
            if isinstance(meaning, Function):
                self.functions.setdefault((meaning.fn, meaning.output), []).append(meaning)
        self.running = {m.out: running_tensors(self.meanings, m) for m in program.computes}
        self.arrived = self._arrived()
        self._shapes: dict[str, ProductShape] = {}
        self._finished: dict[str, int] = {}
        self._tensors_of: dict[int, list[str]] = {}
        self._combined: dict[tuple[str, int, int], int] = {}
        for tensor in program.tensors:
            self._tensors_of.setdefault(self.finished(tensor.name), []).append(tensor.name)
        self._wholes = [self._term(number) for number in self._tensors_of]

    def _arrived(self) -> dict[str, ArrivedParts]:
        arrived: dict[str, ArrivedParts] = {}
        for buffer in self.program.buffers:
            tensor, layout = buffer.tensor, buffer.layout
            if buffer.kind != "input" or tensor is None or layout is None or not layout.partial_axes:
                continue
            if tensor in arrived or tensor in self.meanings:
                conflict = "is computed, too" if tensor in self.meanings else "arrives in terms twice"
                raise ProgramError(f"holds terms of {tensor}, which {conflict}", buffer=buffer.name)
            ops = {p.op for p in layout.placements if isinstance(p, Partial)}
            if len(ops) > 1:
                raise ProgramError(
                    f"holds terms of {tensor} for {' and '.join(sorted(ops))}", buffer=buffer.name
                )
            arrived[tensor] = ArrivedParts(len(partial_term_ranks(layout, layout.mesh.ranks[0])), ops.pop())
        return arrived

    # --- summands -------------------------------------------------------------------------------------

    def shape_of(self, product: Product) -> ProductShape:
        """Return the sizes of a declared product."""
        shape = self._shapes.get(product.out)
        if shape is None:
            a, b, out = (self.program.tensor_of[name].shape for name in (product.a, product.b, product.out))
            known = product_shape(a, b, product.transpose_a, product.transpose_b, len(out))
            assert isinstance(known, ProductShape)
            shape = self._shapes[product.out] = known
        return shape

    def extents(self, basis: str) -> tuple[int, ...]:
        """Return the sizes of the dims along which the summands of an element of tensor `basis` are numbered.

        These are (k, terms of a, terms of b) of a product, with its batch before k where that is summed over;
        the positions that a function reduces over; and (terms,) of a tensor that arrives.
        """
        meaning = self.meanings.get(basis)
        if isinstance(meaning, Product):
            shape = self.shape_of(meaning)
            k = math.prod(shape.batch) * shape.k if shape.sums_batch else shape.k
            return k, self._parts_of(meaning.a), self._parts_of(meaning.b)
        if isinstance(meaning, Function):
            return tuple(self._size_of(meaning, name) for name in meaning.reduced)
        return (self._parts_of(basis),)

    def _parts_of(self, tensor: str) -> int:
        return self.arrived[tensor].count if tensor in self.arrived else 1

    def _size_of(self, meaning: Function, name: str) -> int:
        part = next(part for part in (*meaning.ins, *meaning.stash) if name in part.dims)
        return self.program.tensor_of[part.tensor].shape[part.dims.index(name)]

    def reduction(self, basis: str) -> str:
        """Return the reduction that combines parts of `basis`: "sum", "max", or a function's own word."""
        meaning = self.meanings.get(basis)
        if isinstance(meaning, Function) and meaning.reduce:
            return meaning.reduce
        return self.arrived[basis].op if basis in self.arrived else "sum"

    # --- terms ----------------------------------------------------------------------------------------

    def _term(self, number: int) -> Term:
        term = self.terms[number]
        assert term is not None
        return term

    def number(self, term: Term) -> int:
        """Return the number of a term, which is registered at first use; equal terms share a number."""
        number = self._numbers.get(term)
        if number is None:
            number = self._numbers[term] = len(self.terms)
            self.terms.append(term)
        return number

    def part(self, basis: str, counts: Counts) -> int:
        """Return the number of the term in which each summand of tensor `basis` was added `counts` times.

        `counts` is flat, in the row-major order of `extents(basis)`. With a reduction by "max" or "min" counts
        above 1 become 1.
        """
        if self.reduction(basis) in _IDEMPOTENT:
            counts = np.minimum(counts, 1)
        return self.number(Term(((basis, counts.astype(np.int32).tobytes()),)))

    def shares(self, number: int, count: int) -> list[int] | None:
        """Return the numbers of `count` terms that share out the summands of term `number`, in order.

        None if it has fewer than `count` summands.
        """
        summands = [
            (basis, place)
            for basis, counts in self._term(number).parts
            for place in np.flatnonzero(np.frombuffer(counts, np.int32)).tolist()
        ]
        if len(summands) < count:
            return None
        have = {basis: np.frombuffer(counts, np.int32) for basis, counts in self._term(number).parts}
        shares: list[int] = []
        for share in range(count):
            own: dict[str, Counts] = {}
            for basis, place in summands[
                share * len(summands) // count : (share + 1) * len(summands) // count
            ]:
                own.setdefault(basis, np.zeros_like(have[basis]))[place] = have[basis][place]
            parts = tuple((basis, own[basis].tobytes()) for basis in sorted(own))
            shares.append(self.number(Term(parts)))
        return shares

    def finished(self, tensor: str) -> int:
        """Return the number of the term of a finished element of `tensor`."""
        number = self._finished.get(tensor)
        if number is not None:
            return number
        meaning = self.meanings.get(tensor)
        if isinstance(meaning, Same):
            number = self.finished(meaning.src)
        elif isinstance(meaning, Sum):
            number = self.number(self._added(self._term(self.finished(name)) for name in meaning.terms))
        else:
            number = self.part(tensor, np.ones(math.prod(self.extents(tensor)), np.int32))
        self._finished[tensor] = number
        return number

    def bases_of(self, tensor: str) -> frozenset[str]:
        """Return the names of the tensors whose summands make up a finished element of `tensor`."""
        return self._term(self.finished(tensor)).bases

    def tensors_of(self, number: int) -> Sequence[str]:
        """Return the names of the tensors whose finished elements have term `number`; () if there are none."""
        return self._tensors_of.get(number, ())

    @staticmethod
    def _added(terms: Iterable[Term]) -> Term:
        total: dict[str, Counts] = {}
        for term in terms:
            for basis, counts in term.parts:
                own = np.frombuffer(counts, np.int32)
                total[basis] = total[basis] + own if basis in total else own
        return Term(tuple((basis, total[basis].tobytes()) for basis in sorted(total)))

    def combine(self, op: str, p: int, q: int) -> int:
        """Return the number of the term that is the sum, or other reduction `op`, of the terms numbered p and q.

        Raises ProgramError where no declared tensor combines these two terms by `op`.
        """
        key = (op, p, q) if p <= q else (op, q, p)
        known = self._combined.get(key)
        if known is None:
            known = self._combined[key] = self._sum(p, q) if op == "sum" else self._reduced(op, p, q)
        return known

    def _sum(self, p: int, q: int) -> int:
        left, right = self._term(p), self._term(q)
        if left.is_opaque or right.is_opaque:
            return self.number(OPAQUE)
        total = self._added((left, right))
        for basis in sorted(total.bases):
            if (op := self.reduction(basis)) != "sum":
                raise ProgramError(f"adds a term of {basis}, whose terms are combined by '{op}'")
        wholes = [whole for whole in self._wholes if total.bases <= whole.bases]
        if not wholes:
            raise ProgramError(f"adds a term of {left} to one of {right}")
        for basis, counts in total.parts:
            if len(counts) == np.int32().itemsize:
                most = max(np.frombuffer(dict(whole.parts)[basis], np.int32)[0] for whole in wholes)
                if np.frombuffer(counts, np.int32)[0] > most:
                    raise ProgramError(f"adds a finished element of {basis} to itself")
        return self.number(total)

    def _reduced(self, op: str, p: int, q: int) -> int:
        if p == q and op in _IDEMPOTENT and (self._term(p).is_opaque or self.tensors_of(p)):
            return p
        left, right = self._term(p), self._term(q)
        if left.is_opaque or right.is_opaque:
            return self.number(OPAQUE)
        if left.bases != right.bases or len(left.parts) > 1:
            raise ProgramError(f"takes the {op} of a term of {left} and one of {right}")
        ((basis, counts),), ((_, more),) = left.parts, right.parts
        if self.reduction(basis) != op:
            raise ProgramError(
                f"combines terms of {basis} by '{op}', which are combined by '{self.reduction(basis)}'"
            )
        return self.part(basis, np.frombuffer(counts, np.int32) + np.frombuffer(more, np.int32))

    # --- words ----------------------------------------------------------------------------------------

    def describe_faults(self, number: int, tensor: str | None = None) -> str:
        """Return, in words, which summands of `tensor` term `number` lacks, or has more than once.

        None stands for the tensor that `goal` gives. "complete" is the text where nothing is wrong.
        """
        term = self._term(number)
        if tensor is None:
            tensor = self.goal(number)
        want = dict(self._term(self.finished(tensor)).parts)
        have = dict(term.parts)
        lacks: list[str] = []
        doubled: list[str] = []
        for basis in sorted(want.keys() | have.keys()):
            size = max(len(want.get(basis, b"")), len(have.get(basis, b"")))
            wanted = np.frombuffer(want.get(basis, b"") or bytes(size), np.int32)
            counts = np.frombuffer(have.get(basis, b"") or bytes(size), np.int32)
            lacks += self._summands(basis, np.flatnonzero(counts < wanted).tolist(), len(want) > 1)
            doubled += self._summands(basis, np.flatnonzero(counts > wanted).tolist(), len(want) > 1)
        parts = [f"lacks {'; '.join(lacks)}"] if lacks else []
        parts += [f"has {'; '.join(doubled)} more than once"] if doubled else []
        return " and ".join(parts) or "complete"

    def goal(self, number: int) -> str:
        """Return the name of the tensor that term `number` is a part of, for error messages.

        If the term counts summands of one tensor, it is that one; if of several, the first declared tensor
        whose finished elements count summands of all of these. `number` is of a term with such counts:
        neither UNWRITTEN nor ZERO nor opaque.
        """
        term = self._term(number)
        if len(term.parts) == 1:
            return term.parts[0][0]
        for whole, tensors in self._tensors_of.items():
            if term.bases <= self._term(whole).bases:
                return tensors[0]
        raise AssertionError(term)

    def _summands(self, basis: str, numbers: Sequence[int], is_named: bool) -> list[str]:
        """Return summands in words: `k = 3`; `k = 3 of term 1 of A` if A arrived in parts; `term 1`; `i = 0`."""
        if not numbers:
            return []
        meaning, extents = self.meanings.get(basis), self.extents(basis)
        tail = f" of {basis}" if is_named else ""
        if isinstance(meaning, Function):
            if not extents:
                return [basis]
            places = np.unravel_index(np.array(numbers), extents)
            lists = [
                (name, sorted(set(at.tolist()))) for name, at in zip(meaning.reduced, places, strict=True)
            ]
            return [" and ".join(f"{name} = {_some(listed)}" for name, listed in lists) + tail]
        if not isinstance(meaning, Product):
            return [basis] if is_named and extents == (1,) else [f"term {_some(numbers)}{tail}"]
        groups: dict[str, list[int]] = {}
        for number in numbers:
            k, *terms = (int(i) for i in np.unravel_index(number, extents))
            named = zip((meaning.a, meaning.b), extents[1:], terms, strict=True)
            of = " and ".join(f"term {term} of {tensor}" for tensor, count, term in named if count > 1)
            groups.setdefault(of, []).append(k)
        return [
            _some([f"k = {_some(k)}{of and ' of ' + of}" for of, k in sorted(groups.items())], "; ") + tail
        ]


def _some(values: Sequence[object], between: str = ", ") -> str:
    shown = between.join(map(str, values[:4]))
    return shown + (f" and {len(values) - 4} more" if len(values) > 4 else "")


def partial_term_ranks(layout: Layout, rank: int) -> list[int]:
    """Return the global ranks whose partial terms reduce to one value, `rank` among them.

    They are in row-major order of their coordinates along the partial axes of the layout; [rank] if it has none.
    """
    holders = [rank]
    for axis in layout.partial_axes:
        holders = [other for holder in holders for other in layout.mesh.group(holder, axis)]
    return holders
