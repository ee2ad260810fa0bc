"""Proves what a program computes: a run on index labels whose outputs must be the tensors that they declare."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from meshweave.base.errors import ProgramError
from meshweave.base.limits import PROOF_ELEMENTS, PROOF_WORK
from meshweave.describe.layout import Layout, Partial
from meshweave.ir.analysis.call_labels import element_labels
from meshweave.ir.analysis.dataflow import Dataflow, Event
from meshweave.ir.analysis.include_labels import LabelInterpreter
from meshweave.ir.analysis.interpret import Interpreter
from meshweave.ir.analysis.labels import LabelAlgebra
from meshweave.ir.analysis.positions import LABEL, Labels
from meshweave.ir.analysis.terms import UNWRITTEN, partial_term_ranks
from meshweave.ir.program import Buffer, Program
from meshweave.ir.program.meanings import Function, Product
from meshweave.ir.program.ops import Call


def num_buffer_elements(program: Program) -> int:
    """Return the number of elements of all slots of all buffers on all ranks, which a proof holds in memory."""
    return sum(
        buffer.slots * sum(map(math.prod, program.local_shapes(buffer.name))) for buffer in program.buffers
    )


def unproved(flow: Dataflow) -> str:
    """Return why a program is too large for the proof of what it computes; "" where it is not.

    Elements in buffers take memory; the elements that ops read and write, and the summands that products and
    sums count, take time.
    """
    program = flow.program
    if (count := num_buffer_elements(program)) > PROOF_ELEMENTS.most:
        return PROOF_ELEMENTS.refusal(count)
    summands = work = most_summands(program)
    elements: dict[int, int] = {}  # by the identity of ops, which ranks share
    for ops in flow.matched.ops.values():
        for bound in ops:
            each = elements.get(id(bound.op))
            if each is None:
                each = elements[id(bound.op)] = sum(view.num_elements for _, view in bound.op.accesses())
            work += summands + each
            if work > PROOF_WORK.most:
                return PROOF_WORK.refusal()
    return ""


def most_summands(program: Program) -> int:
    """Return the most summands that a declared product can have: its k, times the partial terms of its operands.

    With a sum over a batch, k runs over the batch as well. An operand that is not an input of partial sums has
    one term. It is 0 without products.
    """
    terms = dict.fromkeys(program.tensor_of, 1)
    for buffer in program.buffers:
        layout = buffer.layout
        if buffer.kind == "input" and layout is not None and buffer.tensor is not None:
            terms[buffer.tensor] *= math.prod(layout.mesh.size(axis) for axis in layout.partial_axes)
    most = 0
    for meaning in program.computes:
        if isinstance(meaning, Product):
            *batch, rows, columns = program.tensor_of[meaning.a].shape
            sums_batch = len(program.tensor_of[meaning.out].shape) == 2
            summed = (rows if meaning.transpose_a else columns) * (math.prod(batch) if sums_batch else 1)
            most = max(most, summed * terms[meaning.a] * terms[meaning.b])
    return most


def prove_outputs(flow: Dataflow, order: Sequence[Event]) -> tuple[str, ...]:
    """Prove that the program computes what it declares, by executing `order` on labels.

    Returns notes on what is taken on trust, because nothing declares it.

    Raises:
        ProgramError: it does not; the error names op, rank and buffer.
    """
    program = flow.program
    algebra = LabelAlgebra(program, flow)
    interpreter = LabelInterpreter(flow, algebra, lambda shape, dtype: np.zeros(shape, LABEL))
    algebra.interpreter = interpreter
    interpreter.fill_inputs(lambda buffer, rank: _input_labels(algebra, buffer, rank))
    interpreter.run(order)
    for buffer in program.buffers:
        if buffer.kind == "output":
            assert buffer.layout is not None
            for rank in program.mesh_of[buffer.mesh].ranks:
                _check_output(algebra, interpreter, buffer, buffer.layout, rank)
    return (*trust_notes(program), *interpreter.notes)


def trust_notes(program: Program) -> tuple[str, ...]:
    """Return sentences on what no meaning declares and so is not proved: outputs, and what calls make."""
    computed = {meaning.out for meaning in program.computes}
    outputs = [b.tensor for b in program.buffers if b.kind == "output" and b.tensor not in computed]
    functions = {meaning.fn for meaning in program.computes if isinstance(meaning, Function)}
    made = (op for op in program.ops() if isinstance(op, Call) and op.outs)
    calls = dict.fromkeys(op.fn for op in made if op.fn not in functions)
    notes = (
        [f"values of {', '.join(map(str, outputs))}: not declared what they are computed from"]
        if outputs
        else []
    )
    notes += [f"calls of {', '.join(calls)}: not declared what they make"] if calls else []
    return tuple(notes)


def _input_labels(algebra: LabelAlgebra, buffer: Buffer, rank: int) -> Labels:
    table = algebra.table
    block = element_labels(table, buffer, rank)
    assert buffer.layout is not None and buffer.tensor is not None
    axes = [i for i, p in enumerate(buffer.layout.placements) if isinstance(p, Partial)]
    if axes:
        mesh = buffer.layout.mesh
        coords = mesh.coords(rank)
        number = np.ravel_multi_index([coords[i] for i in axes], [mesh.shape[i] for i in axes])
        block["term"] = table.part(buffer.tensor, np.arange(table.arrived[buffer.tensor].count) == number)
    return block


def _check_output(
    algebra: LabelAlgebra, interpreter: Interpreter, buffer: Buffer, layout: Layout, rank: int
) -> None:
    assert buffer.tensor is not None
    holders = partial_term_ranks(layout, rank)
    if rank != holders[0]:
        return
    result = interpreter.memory[rank, buffer.name, 0]
    op = next((p.op for p in layout.placements if isinstance(p, Partial)), "sum")
    for holder in holders[1:]:
        try:
            term = interpreter.memory[holder, buffer.name, 0]
            result = algebra.reduce(op, [algebra.read(result), algebra.read(term)])
        except ProgramError as error:
            raise ProgramError(error.message, rank=holder, buffer=buffer.name) from None
    expected = element_labels(algebra.table, buffer, rank)
    tensor = buffer.tensor
    wrong = (
        (result["term"] != expected["term"]) | (result["index"] != expected["index"])
        if tensor in algebra.table.meanings
        else result["term"] == UNWRITTEN
    )
    if not wrong.any():
        return
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    position = np.unravel_index(int(expected[at]["index"]), algebra.program.tensor_of[tensor].shape)
    raise ProgramError(
        f"{tensor}{list(map(int, position))} {_fault_of(algebra, result[at], expected[at], tensor)} "
        f"({int(wrong.sum())} such elements)",
        op=algebra.writers[int(result[at]["writer"])],
        rank=rank,
        buffer=buffer.name,
    )


def _fault_of(algebra: LabelAlgebra, element: Any, expected: Any, tensor: str) -> str:
    """Return what is wrong with an output element of `tensor`, to follow its name."""
    number = int(element["term"])
    term = algebra.table.terms[number]
    if number == UNWRITTEN:
        return "is never written"
    if term is None:
        return "is zero"
    if term.is_opaque:
        return f"holds {term}"
    if element["index"] != expected["index"]:
        return f"holds another element of {algebra.table.goal(number)}"
    others = algebra.table.tensors_of(number)
    is_part = term.bases <= algebra.table.bases_of(tensor)
    if others and not is_part:
        return f"holds {others[0]}"
    return algebra.table.describe_faults(number, tensor if is_part else None)
