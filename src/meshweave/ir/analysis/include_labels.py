"""What an include makes, on index labels: the meanings of its sub-program, of what stands for its inputs.

The proof of the sub-program says that its outputs are what its meanings say. So an include is not run op by op.
Its inputs are gathered to whole tensors of labels, and the meanings are applied to these in the algebra of the
including program, which must declare them as well. Then the outputs are dealt out as their layouts say. One that
is laid out as partial sums is dealt out in as many disjoint parts as there are terms: which summands the terms
really are makes no difference to a program that adds them all.

What the including program declares no meaning of is taken for what the output's buffer is to hold, as with calls.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from meshweave.base.errors import ProgramError
from meshweave.describe.layout import Partial
from meshweave.ir.analysis.dataflow import Event
from meshweave.ir.analysis.interpret import Interpreter, product_operands
from meshweave.ir.analysis.labels import LabelAlgebra
from meshweave.ir.analysis.matching import Node
from meshweave.ir.analysis.positions import LABEL, Labels
from meshweave.ir.analysis.terms import UNWRITTEN, ZERO, partial_term_ranks
from meshweave.ir.program import Buffer, Call, Include, Matmul, Program, Range, View
from meshweave.ir.program.check_meanings import running_tensors
from meshweave.ir.program.include import include_error
from meshweave.ir.program.meanings import Function, Meaning, Product, Same, Sum, TensorPart, sources_of


class LabelInterpreter(Interpreter):
    """Runs a program on labels (`ir.analysis.labels`), an include as one op; `algebra` is a `LabelAlgebra`."""

    algebra: LabelAlgebra

    @cached_property
    def notes(self) -> dict[str, None]:
        """Return sentences on what was taken on trust so far, as the keys of a dict."""
        return {}

    def _event(self, event: Event) -> None:
        op = self.flow.op(event[0])
        if not isinstance(op, Include):
            super()._event(event)
            return
        self.current = event[0]
        use = _IncludeOnLabels(self, event)
        try:
            use.run()
        except ProgramError as error:
            label = error.op or self.flow.label(event[0])
            named = ProgramError(error.message, op=label, rank=error.rank, buffer=error.buffer)
            raise include_error(op.title, named) from None


class _IncludeOnLabels:
    """One include: the labels of the whole tensors of its sub-program, by name, as far as they are computed."""

    def __init__(self, interpreter: LabelInterpreter, event: Event) -> None:
        self.interpreter, self.algebra = interpreter, interpreter.algebra
        op = interpreter.flow.op(event[0])
        assert isinstance(op, Include)
        self.op: Include = op
        self.part: Program = interpreter.flow.program.parts[op.part]
        self.meanings = {meaning.out: meaning for meaning in self.part.computes}
        self.node_of: dict[int, Node] = dict(zip(self.part.ranks, event, strict=True))
        self.values: dict[str, Labels] = {}

    def run(self) -> None:
        """Gather the inputs' labels, apply the meanings, and write the outputs' labels to the ranks' views."""
        for buffer in self.part.buffers:
            if buffer.kind == "input":
                self._gather(buffer)
        for buffer in self.part.buffers:
            if buffer.kind != "output":
                continue
            assert buffer.tensor is not None
            try:
                value = self._value(buffer.tensor)
            except ProgramError:
                if self._is_declared(buffer):
                    raise
                value = None
            if value is None:
                self._trust(buffer)
            else:
                self._deal(buffer, value)

    def _actual(self, rank: int, formal: str) -> View:
        op = self.interpreter.flow.op(self.node_of[rank])
        assert isinstance(op, Include)
        return dict(op.buffers)[formal]

    def _is_declared(self, buffer: Buffer) -> bool:
        """Return whether the including program declares what the tensor is that this output is a part of."""
        view = self._actual(self.part.mesh_of[buffer.mesh].ranks[0], buffer.name)
        tensor = self.interpreter.flow.program.buffer_of[view.buffer].tensor
        return tensor is None or tensor in self.algebra.table.meanings

    # --- inputs and outputs ---------------------------------------------------------------------------

    def _gather(self, buffer: Buffer) -> None:
        """Put together the whole tensor that an input buffer holds; ranks with the same element must agree."""
        assert buffer.tensor is not None and buffer.layout is not None
        shape = self.part.tensor_of[buffer.tensor].shape
        whole = self.values.setdefault(buffer.tensor, np.zeros(shape, LABEL))
        for rank in buffer.layout.mesh.ranks:
            holders = partial_term_ranks(buffer.layout, rank)
            if holders[0] != rank:
                continue
            blocks = [
                self.interpreter.read_view(self.node_of[holder], self._actual(holder, buffer.name))
                for holder in holders
            ]
            block = self.algebra.reduce(_reduction(buffer), blocks) if len(blocks) > 1 else blocks[0]
            index = np.ix_(*buffer.layout.indices(shape, rank))
            known = whole[index]
            filled = known["term"] != UNWRITTEN
            if ((known["term"] != block["term"]) | (known["index"] != block["index"]))[filled].any():
                node = self.node_of[rank]
                raise ProgramError(
                    f"{buffer.name} has other elements of {buffer.tensor} here than on another rank",
                    rank=node[0],
                    buffer=self._actual(rank, buffer.name).buffer,
                )
            whole[index] = block

    def _deal(self, buffer: Buffer, value: Labels) -> None:
        assert buffer.layout is not None
        for rank in buffer.layout.mesh.ranks:
            holders = partial_term_ranks(buffer.layout, rank)
            own = value
            if len(holders) > 1:
                own = self._share(buffer, value, len(holders), holders.index(rank))
            block = own[np.ix_(*buffer.layout.indices(value.shape, rank))]
            self.interpreter.write_view(self.node_of[rank], self._actual(rank, buffer.name), block)

    def _share(self, buffer: Buffer, value: Labels, count: int, number: int) -> Labels:
        """Return share `number` of `count` disjoint ones into which the summands of some elements are cut."""
        table, share = self.algebra.table, value.copy()
        for term in np.unique(value["term"]).tolist():
            if term == ZERO:
                continue
            shares = table.shares(term, count)
            if shares is None:
                self.interpreter.notes[f"terms of {buffer.tensor} of {self.op.part}: not told apart"] = None
                shares = [term] + [ZERO] * (count - 1)
            share["term"][value["term"] == term] = shares[number]
        return share

    def _trust(self, buffer: Buffer) -> None:
        """Take an output for what its buffer in the including program is to hold."""
        self.interpreter.notes[f"values of {buffer.name} of {self.op.part}: not declared"] = None
        for rank in self.part.mesh_of[buffer.mesh].ranks:
            node = self.node_of[rank]
            op = self.interpreter.flow.op(node)
            assert isinstance(op, Include)
            view = self._actual(rank, buffer.name)
            call = Call(fn=self.op.part, outs=(view,), ins=op.reads, lane="")
            ins = [self.interpreter.read_view(node, read) for read in call.ins]
            (block,) = self.algebra.call(call, node[0], ins)
            self.interpreter.write_view(node, view, block)

    # --- meanings -------------------------------------------------------------------------------------

    def _value(self, tensor: str) -> Labels | None:
        """Return the labels of a whole tensor of the sub-program; None if nothing says what it is."""
        if tensor not in self.values:
            meaning = self.meanings.get(tensor)
            made = None if meaning is None else self._made(meaning)
            if made is None:
                return None
            self.values[tensor] = made
        return self.values[tensor]

    def _made(self, meaning: Meaning) -> Labels | None:
        shape = self.part.tensor_of[meaning.out].shape
        running = running_tensors(self.meanings, meaning)
        sources: dict[str, Labels] = {}
        for name in sources_of(meaning):
            value = (
                self.algebra.zeros(self.part.tensor_of[name].shape, "")
                if name in running
                else self._value(name)
            )
            if value is None:
                return None
            sources[name] = value
        match meaning:
            case Product():
                a, b = sources[meaning.a], sources[meaning.b]
                product = Matmul(
                    lane="",
                    out=_whole(shape),
                    a=_whole(a.shape),
                    b=_whole(b.shape),
                    transpose_a=meaning.transpose_a,
                    transpose_b=meaning.transpose_b,
                )
                return self.algebra.matmul(*product_operands(product, a, b))
            case Same():
                return sources[meaning.src].reshape(shape)
            case Sum():
                return self.algebra.reduce("sum", [sources[name] for name in meaning.terms])
        return self._function(meaning, shape, sources)

    def _function(self, meaning: Function, shape: tuple[int, ...], sources: dict[str, Labels]) -> Labels:
        def given(parts: tuple[TensorPart, ...]) -> list[tuple[View, Labels]]:
            blocks = (sources[part.tensor] for part in parts)
            return [
                (_whole(block.shape, part.tensor), block) for part, block in zip(parts, blocks, strict=True)
            ]

        stashed = given(meaning.stash) if meaning.stash else None
        view = _whole(shape, meaning.out)
        return self.algebra.calls.apply(meaning.fn, meaning.output, view, given(meaning.ins), stashed)


def _whole(shape: tuple[int, ...], tensor: str = "") -> View:
    """Return a view of a whole tensor of the sub-program, under the tensor's name."""
    return View(tensor, tuple(Range(0, size) for size in shape))


def _reduction(buffer: Buffer) -> str:
    assert buffer.layout is not None
    return next(p.op for p in buffer.layout.placements if isinstance(p, Partial))
