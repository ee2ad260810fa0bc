"""What calls make, on index labels: parts of tensors, as their meanings say, at the positions of their inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from meshweave.base.errors import ProgramError
from meshweave.ir.analysis.interpret import numpy_index
from meshweave.ir.analysis.positions import LABEL, CallPositions, Labels, Positions, merges, positions_of
from meshweave.ir.analysis.terms import OPAQUE, UNWRITTEN, ZERO, Counts, TermTable
from meshweave.ir.program import Buffer
from meshweave.ir.program.meanings import Function
from meshweave.ir.program.ops import Call
from meshweave.ir.program.views import View


class TermAlgebra(Protocol):
    """What calls need of `LabelAlgebra`, which computes on labels.

    A label says which element of which declared tensor a memory element holds, and how complete its sum is: a
    term (`ir.analysis.terms`) and a position (`ir.analysis.labels`).
    """

    table: TermTable

    def label(self) -> str:
        """Return the name of the op that is executed now, for messages, such as `matmul 0.3.1`."""

    def factors(self, number: int) -> Sequence[str]:
        """Return the names of the tensors that a block may be part of, if its elements have term `number`."""

    def combine(self, op: str, x: Labels, y: Labels) -> Labels:
        """Return the labels of the sum, or other reduction `op`, of two blocks, element by element."""


@dataclass
class Stashed:
    """What a stash holds: the inputs (view, labels) of the forward part of a stage, then of its input gradient.

    The first `from_forward` of `inputs` are those of the forward part.
    """

    inputs: list[tuple[View, Labels]]
    from_forward: int


class CallLabels:
    """Computes the labels that calls write, and keeps what gradients read of earlier calls (their stash).

    The meaning of a call says which part of a declared tensor it makes of which parts of others
    (`ir.program.meanings.Function`).
    """

    def __init__(self, algebra: TermAlgebra) -> None:
        self.algebra = algebra
        self.table = algebra.table
        self._stashes: dict[tuple[object, ...], Stashed] = {}

    def call(self, op: Call, rank: int, ins: list[Labels]) -> list[Labels]:
        """Return the labels of a call's outputs on global rank `rank`, from the labels `ins` of its inputs.

        An output without a meaning is trusted: in the buffer of a tensor it is taken for finished elements of
        that tensor, in scratch for a value that can only be moved and added. Raises ProgramError for inputs that
        are not what the call needs.
        """
        given = list(zip(op.ins, ins, strict=True))
        key = (rank, op.stash, *op.args)
        stashed = self._stashes.get(key) if op.stash and op.part in ("input_grad", "weight_grad") else None
        outs = []
        for number, view in enumerate(op.outs):
            declared = self.table.functions.get((op.fn, number))
            if declared:
                meaning = self._best(declared, ins, self.table.program.buffer_of[view.buffer].tensor)
                try:
                    outs.append(self._apply(meaning, view, rank, given, stashed))
                except ProgramError as error:
                    where = error.buffer or (op.ins[0].buffer if op.ins else view.buffer)
                    raise ProgramError(
                        error.message, op=self.algebra.label(), rank=rank, buffer=where
                    ) from None
            else:
                for in_view, block in given:
                    self._check_trusted_input(in_view, block, rank)
                outs.append(self._trusted(view, rank))
        if op.stash and op.part == "forward":
            kept = [(view, block.copy()) for view, block in given]
            self._stashes[key] = Stashed(kept, len(kept))
        elif stashed is not None and op.part == "input_grad":
            stashed.inputs += [(view, block.copy()) for view, block in given]
        elif op.stash and op.part == "weight_grad":
            self._stashes.pop(key, None)
        return outs

    def apply(
        self,
        fn: str,
        output: int,
        view: View,
        given: Sequence[tuple[View, Labels]],
        stashed: list[tuple[View, Labels]] | None,
    ) -> Labels:
        """Return the labels of output number `output` of a call of `fn`, in the shape of `view`, by its meaning.

        Args:
            given: the call's inputs, each a view with its labels.
            stashed: the inputs of earlier calls that share its stash, likewise; None where it has no stash.

        Raises ProgramError where no meaning is declared, or the inputs are not what it names.
        """
        declared = self.table.functions.get((fn, output))
        if not declared:
            raise ProgramError(f"calls '{fn}', which no declared meaning does")
        meaning = self._best(declared, [block for _, block in given])
        kept = None if stashed is None else Stashed(stashed, len(stashed))
        return self._apply(meaning, view, -1, given, kept)

    def _best(self, declared: Sequence[Function], ins: Sequence[Labels], out: str | None = None) -> Function:
        """Return the meaning whose inputs are those that a call has, or most of them.

        Of equal ones, as where inputs are empty, it is that of `out`, the tensor of the buffer that is written.
        """

        def matching(meaning: Function) -> tuple[int, bool]:
            pairs = zip(meaning.ins, ins, strict=False)
            return sum(part.tensor in self._factors_of(block) for part, block in pairs), meaning.out == out

        return max(declared, key=matching) if len(declared) > 1 else declared[0]

    def _factors_of(self, block: Labels) -> set[str]:
        numbers = set(np.unique(block["term"]).tolist()) - {UNWRITTEN, ZERO}
        return {tensor for number in numbers for tensor in self.algebra.factors(number)}

    def _apply(
        self,
        meaning: Function,
        view: View,
        rank: int,
        given: Sequence[tuple[View, Labels]],
        stashed: Stashed | None,
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
            if len(meaning.stash) not in (stashed.from_forward, len(stashed.inputs)):
                raise ProgramError(
                    f"reads a stash of {len(stashed.inputs)} inputs, declared with {len(meaning.stash)}"
                )
            read += zip(meaning.stash, stashed.inputs, strict=False)
        running = self.table.running[meaning.out]
        places = CallPositions(meaning.fn)
        so_far: list[tuple[str, View, Labels]] = []
        for part, (in_view, block) in read:
            shape = self.table.program.tensor_of[part.tensor].shape
            if part.tensor in running:
                so_far.append((part.tensor, in_view, block))
                if all_are(block, ZERO):
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
        if op not in ("max", "min", "prod") and all_are(so_far, ZERO):
            return made
        return self.algebra.combine(op, so_far, made)

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
        shape = self.table.program.tensor_of[meaning.out].shape
        block = np.zeros(view.shape, LABEL)
        if not block.size:
            return block
        for part, buffer in places.untold:  # only a sum over nothing can be made of nothing
            if not any(name in meaning.reduced and not len(places.of.get(name, ())) for name in part.dims):
                raise ProgramError(f"gives call '{meaning.fn}' nothing of {part.tensor}", buffer=buffer)
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
        buffer = self.table.program.buffer_of[view.buffer]
        if buffer.tensor != meaning.out:
            raise ProgramError(
                f"makes {meaning.part} of inputs that do not say which {meaning.part.dims[dim]}, into {view} "
                f"that holds no {meaning.out}",
                buffer=view.buffer,
            )
        shape = self.table.program.tensor_of[meaning.out].shape
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
        buffer = self.table.program.buffer_of[view.buffer]
        if buffer.tensor is not None:
            labels: Labels = element_labels(self.table, buffer, rank)[numpy_index(view)]
            return labels.copy()
        block = np.zeros(view.shape, LABEL)
        block["term"] = self.table.number(OPAQUE)
        block["index"] = np.arange(block.size).reshape(block.shape)
        return block

    def _check_trusted_input(self, view: View, block: Labels, rank: int) -> None:
        """Raise ProgramError for unfinished sums, or elements that are not those of the buffer's tensor."""
        buffer = self.table.program.buffer_of[view.buffer]
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
            raise ProgramError(
                f"gives a call {story}", op=self.algebra.label(), rank=rank, buffer=view.buffer
            )


def all_are(block: Labels, term: int) -> bool:
    """Return whether every label of a block has the term with number `term` (`TermTable`)."""
    return bool((block["term"] == term).all())


def element_labels(table: TermTable, buffer: Buffer, rank: int) -> Labels:
    """Return the labels of the finished elements of a buffer's tensor that one rank holds, in its local shape."""
    assert buffer.tensor is not None and buffer.layout is not None
    shape = table.program.tensor_of[buffer.tensor].shape
    indices = buffer.layout.indices(shape, rank)
    block = np.zeros(tuple(len(dim) for dim in indices), LABEL)
    flat = np.ravel_multi_index(np.ix_(*indices), shape) if block.size else np.zeros(block.shape, np.int64)
    block["index"] = flat
    block["term"] = table.finished(buffer.tensor)
    return block
